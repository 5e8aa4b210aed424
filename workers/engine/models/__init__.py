"""The models by architecture name, and what the runner asks of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from workers.checkpoint import CheckpointError, ModelConfig
from workers.engine.attention import AttentionBackend, Metadata
from workers.engine.models.llama import Llama
from workers.engine.weights import Weights

#: Called with (layers loaded, layers in all) while a model loads.
Progress = Callable[[int, int], None]


class Model(Protocol):
    """A decoder-only language model."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend[Metadata],
        metadata: Metadata,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] after the last norm, float32."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every vocabulary id, float32."""


MODELS: dict[str, Callable[..., Model]] = {"llama": Llama}


def build_model(
    config: ModelConfig, weights: Weights, *, max_positions: int, dtype: torch.dtype, progress: Progress
) -> Model:
    """The model that ``config`` describes, with its weights."""
    model = MODELS.get(config.architecture)
    if model is None:
        raise CheckpointError(f"there is no model for architecture {config.architecture!r}")
    return model(config, weights, max_positions=max_positions, dtype=dtype, progress=progress)
