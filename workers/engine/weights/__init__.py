"""Weights by their transformers names, one tensor at a time, whatever file they are stored in.

Nothing here knows what a model does with them; nothing past here knows a storage format.
"""

from __future__ import annotations

from typing import Protocol

import torch

from workers.checkpoint import Checkpoint, Kind, ModelConfig


class Weights(Protocol):
    """Where a model takes its tensors from."""

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor in the target dtype; `CheckpointError` when it is missing or of another shape.

        Every call reads it anew, so that no more than the tensors in use are in memory.
        """


def open_weights(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """The weights of ``checkpoint``, converted to ``dtype`` as they are read."""
    if checkpoint.kind is Kind.GGUF:
        from workers.engine.weights.gguf import GGUFWeights

        return GGUFWeights(checkpoint.path, config, dtype)
    from workers.engine.weights.safetensors import SafetensorsWeights

    return SafetensorsWeights(checkpoint.path, dtype)
