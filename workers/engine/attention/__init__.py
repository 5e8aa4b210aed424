"""The seam between models and attention: a backend owns the KV layout and how queries meet it.

Models hand over q, k and v of the step's tokens in plan order and know neither blocks nor rows.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from workers.engine.plan import StepPlan

Metadata = TypeVar("Metadata")


class AttentionBackend(Protocol[Metadata]):
    """Stores keys and values and attends to them."""

    def prepare(self, plan: StepPlan) -> Metadata:
        """What all layers of a step share: where its tokens go and what each row may see."""

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Metadata
    ) -> torch.Tensor:
        """Store k and v [tokens, kv_heads, head_dim], then attend with q [tokens, heads, head_dim].

        Returns [tokens, heads * head_dim].
        """
