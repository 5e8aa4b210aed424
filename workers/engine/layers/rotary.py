"""Rotary position embeddings, with the ways models stretch them past their trained context."""

from __future__ import annotations

import math

import torch

from workers.checkpoint import CheckpointError, ModelConfig, RopeScaling


class Rotary:
    """Rotates the halves of each head by angles that grow with the position.

    Angles are tabled once in float32 for every position the engine can reach and kept in the model's dtype.
    """

    def __init__(self, config: ModelConfig, *, max_positions: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        self._half = config.head_dim // 2
        self._cos = torch.cat([cos, cos], dim=-1).to(dtype)
        # The sign that rotating halves brings is kept here, which saves a negation per call.
        self._sin = torch.cat([-sin, sin], dim=-1).to(dtype)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `rotate` needs for tokens at ``positions``; the same for every layer of a step."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def rotate(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``heads`` [tokens, heads, head_dim], rotated."""
        cos, sin = angles
        return (heads * cos).addcmul_(heads.roll(self._half, -1), sin)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair of a head."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "factors" and len(scaling.factors) == len(frequencies):
        return frequencies / torch.tensor(scaling.factors)
    raise CheckpointError(f"rope scaling {scaling.kind!r} is not supported or does not fit the model")


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 1 keeps a frequency (short waves), 0 divides it (waves too long for the trained context).
    keep = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies
