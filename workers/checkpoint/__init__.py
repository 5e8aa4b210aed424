"""Finds a model on disk and describes it: where its files are, what is in them, what shape it has.

Knows files and their formats; never imports torch or transformers, so that tokenizer processes stay small.
"""

from workers.checkpoint.errors import CheckpointError
from workers.checkpoint.gguf import GGUFFile
from workers.checkpoint.locate import Checkpoint, Kind, locate

__all__ = ["Checkpoint", "CheckpointError", "GGUFFile", "Kind", "locate"]
