"""Matrix products with fixed weights, packed once for the CPU where that pays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN keeps weights of ``dtype`` in its own layout here.

    Packing takes a third off the matrix products of a decode step in bfloat16, which functional.linear would
    reorder in every call. float32 stays with functional.linear: it is there to give transformers' numbers.
    The operators are the ones torch.compile emits; torch has no public name for them.
    """
    return (
        dtype is torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Linear:
    """``x @ weight.T + bias`` for x of shape [tokens, inputs]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)


def fused(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> Linear:
    """Several projections of one input as one product; their outputs lie side by side."""
    return Linear(torch.cat(list(weights)), torch.cat(list(biases)) if biases else None)
