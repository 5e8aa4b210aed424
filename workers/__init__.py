"""Processes behind the bus (tokenizer, scheduler, detokenizer) and their libraries (text, engine, checkpoint)."""
