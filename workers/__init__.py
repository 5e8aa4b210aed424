"""Processes behind the bus (tokenizer, scheduler, detokenizer) and the libraries they are made of."""
