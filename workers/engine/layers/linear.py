"""Matrix products with fixed weights, packed once for the CPU where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN keeps weights of ``dtype`` in its own layout here.

    Packing takes a third off the matrix products of a decode step in bfloat16, which functional.linear
    would reorder in every call. float32 stays with functional.linear: it is there to give transformers'
    numbers. The operators are the ones torch.compile emits; torch has no public name for them.
    """
    return (
        dtype is torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Linear:
    """``x @ weight.T + bias`` for x of shape [tokens, inputs], in the dtype of the weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._dtype = weight.dtype
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._dtype)
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)


def fused(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> Linear:
    """Several projections of one input as one product; their outputs lie side by side."""
    return Linear(torch.cat(list(weights)), torch.cat(list(biases)) if biases else None)


class Head:
    """Float32 scores of the vocabulary for float32 hidden states.

    Scores rounded to bfloat16 would tie or swap the best candidates of one position in a hundred. Where
    FBGEMM is there, a bfloat16 head is kept in float16 instead, which reads as much memory per step and
    adds up and answers in float32.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._half = _half_precision(weight) if weight.dtype is torch.bfloat16 else None
        self._linear = None if self._half is not None else Linear(weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._linear:
            return self._linear(hidden).float()
        scores: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(hidden, self._half)
        return scores


def _half_precision(weight: torch.Tensor) -> Any:
    """The weights as FBGEMM packs them, or None when it is missing or they exceed float16's range."""
    if float(weight.abs().max()) > torch.finfo(torch.float16).max:
        return None
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        torch.ops.quantized.linear_dynamic_fp16(torch.zeros(1, weight.shape[1]), packed)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # a build of torch, or a processor, without it
    return packed
