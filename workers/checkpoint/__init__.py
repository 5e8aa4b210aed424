"""Finds a model on disk and describes it: where its files are, what is in them, what shape it has.

Knows files and their formats; never imports torch or transformers, so that tokenizer processes stay small.
"""

from workers.checkpoint import folder_config, gguf_config
from workers.checkpoint.config import ModelConfig, RopeScaling
from workers.checkpoint.errors import CheckpointError
from workers.checkpoint.gguf import GGUFFile
from workers.checkpoint.locate import Checkpoint, Kind, locate

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "GGUFFile",
    "Kind",
    "ModelConfig",
    "RopeScaling",
    "load_config",
    "locate",
]


def load_config(checkpoint: Checkpoint) -> ModelConfig:
    """Describe a model; raises `CheckpointError` when its description is incomplete or not supported."""
    if checkpoint.kind is Kind.GGUF:
        return gguf_config.read_config(GGUFFile(checkpoint.path))
    return folder_config.read_config(checkpoint.path)
