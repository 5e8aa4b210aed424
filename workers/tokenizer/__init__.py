"""The tokenizer process: chat templates and encoding, between `in` and `sched`."""
