"""Which ids a row may choose from: top_k, then top_p of what is left, then min_p.

Filters keep the likeliest ids, equal ones in the order of their ids. Sorting a vocabulary is the slowest
thing a sampler can do, so they look at a few of the likeliest first, and go on to more only where those
do not settle the result. Knows nothing of seeds and noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from common.sampling import SamplingParams

#: How many of the likeliest ids are looked at first, and next; after that all are.
WIDTHS = (128, 1024)

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ids that are left, with their scores (float64)."""

    ids: Array
    scores: Array


def candidates(scores: torch.Tensor, params: Sequence[SamplingParams]) -> list[Candidates | None]:
    """What each row's filters leave, or None for a row without filters.

    ``scores`` [rows, vocabulary] are logits after temperature, relative to the likeliest id's.
    """
    kept: list[Candidates | None] = [None] * len(params)
    waiting = []
    for at, row in enumerate(params):
        if row.top_k or row.top_p < 1:
            waiting.append(at)
        elif row.min_p:
            values = scores[at].numpy()
            ids = np.flatnonzero(values >= math.log(row.min_p))
            kept[at] = Candidates(ids, values[ids].astype(np.float64))
    for width in (*WIDTHS, scores.shape[1]):
        if waiting:
            rows = scores if len(waiting) == len(scores) else scores[waiting]
            for at, found in zip(waiting, _ranked(rows, [params[at] for at in waiting], width), strict=True):
                kept[at] = found
            waiting = [at for at in waiting if kept[at] is None]
    return kept


def _ranked(scores: torch.Tensor, params: Sequence[SamplingParams], width: int) -> list[Candidates | None]:
    """What is left of each row, as far as its ``width`` likeliest ids can tell."""
    complete = width >= scores.shape[1]
    values, ids = scores.sort(descending=True, stable=True) if complete else scores.topk(width)
    shares = None
    if any(row.top_p < 1 and not row.top_k for row in params):
        # Softmax works row by row; a sum over the vocabulary would round differently in other batches.
        shares = scores.softmax(dim=-1).gather(1, ids).double().numpy()
    wide = values.double().numpy()
    return [
        _left(wide[at], ids[at].numpy(), None if shares is None else shares[at], row, complete=complete)
        for at, row in enumerate(params)
    ]


def _left(
    values: Array, ids: Array, shares: Array | None, params: SamplingParams, *, complete: bool
) -> Candidates | None:
    """The candidates among the likeliest ids, or None when ids past them may belong to them too.

    ``values`` descend; ``shares`` are the ids' probabilities among the whole vocabulary.
    """
    # A stable sort has equal ones in order already; topk has them in any.
    order = slice(None) if complete else np.lexsort((ids, -values))
    values, ids = values[order], ids[order]
    kept = min(params.top_k or len(ids), len(ids))
    if params.top_p < 1:
        if params.top_k > len(ids) and not complete:
            return None  # the top_k, whose sum top_p is a share of, are not all here
        if params.top_k:
            weights = np.exp(values[:kept])
            weights /= weights.sum()
        else:
            assert shares is not None, "top_p alone is measured against the whole vocabulary"
            weights = shares[order]
        # An id stays when those before it do not reach top_p; the first always does.
        kept = max(1, int(np.count_nonzero(weights.cumsum() - weights < params.top_p)))
    if params.min_p:
        kept = min(kept, max(1, int(np.count_nonzero(values >= math.log(params.min_p)))))
    if not complete and values[kept - 1] == values[-1]:
        return None  # the cut, or ids equal to the last one kept, may lie past what was looked at
    return Candidates(ids[:kept], values[:kept])
