"""RMS normalisation."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm:
    """``x / rms(x) * weight`` of float32 numbers."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._shape = tuple(weight.shape)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self._shape, self._weight, self._eps)
