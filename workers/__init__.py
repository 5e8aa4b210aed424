"""Processes behind the bus (tokenizer, scheduler, detokenizer) and the libraries they run (text, engine, checkpoint)."""
