"""The tokenizer process: turns admitted requests into token ids, and answers /tokenize and /detokenize."""
