"""The text side of a model: token codec, incremental decoding, stop strings, chat templates.

A library of pure functions of text and token ids; it knows no Redis, no torch and no other process.
"""
