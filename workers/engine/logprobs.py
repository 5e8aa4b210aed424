"""How likely tokens were, and which ids were the likeliest: of the raw distribution, before the sampler (E6).

Rows are independent: the same logits give the same numbers, whatever else is in the batch. Knows tensors, and
nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from math import isnan
from typing import Any, TypeAlias

import numpy as np
import torch

from workers.engine.plan import Targets
from workers.engine.types import LOWEST, TokenLogprobs

#: Positions of prompts whose logits exist at one time: enough to keep the head's product busy, and in a
#: vocabulary of 128k some 70 MB.
SLICE = 64

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Distributions:
    """What the logits of those rows that ask say, kept: the sampler may then change them in place."""

    def __init__(self, logits: torch.Tensor, tops: Sequence[int | None]) -> None:
        """``logits`` [rows, vocabulary] in float32; ``tops``: how many ids a row wants; None: it asks not."""
        self._asking = [(at, top) for at, top in enumerate(tops) if top is not None]
        if self._asking:
            asked = logits if len(self._asking) == len(tops) else logits[[at for at, _ in self._asking]]
            # Row by row; a sum over the vocabulary would round differently in other batches.
            self._logprobs = asked.log_softmax(dim=-1)
            self._ids = likeliest(asked, max(top for _, top in self._asking))

    def of(self, tokens: Sequence[int | None]) -> dict[int, TokenLogprobs]:
        """What each row that asks gets with its token. A row whose numbers are not finite gets nothing."""
        if not self._asking:
            return {}
        chosen = torch.tensor([[tokens[at] or 0] for at, _ in self._asking])
        values = self._logprobs.gather(1, torch.cat([chosen, torch.from_numpy(self._ids)], dim=1))
        reports = {}
        for (at, top), ids, (value, *best) in zip(
            self._asking, self._ids.tolist(), values.clamp_(min=LOWEST).tolist(), strict=True
        ):
            if not isnan(value):
                reports[at] = TokenLogprobs(value, tuple(zip(ids[:top], best[:top], strict=True)))
        return reports


def likeliest(logits: torch.Tensor, count: int) -> Ids:
    """Ids [rows, count] of the highest logits, best first, equal ones by id; all, if they are fewer."""
    if not count:
        return np.empty((len(logits), 0), np.int64)
    size = logits.shape[1]
    width = min(count, size)
    values, ids = logits.topk(min(width + 1, size))
    found, scores = ids.numpy(), values.numpy()
    # topk has equal ones in any order, and at the cut any of them.
    ranked = np.take_along_axis(found, np.lexsort((found, -scores)), axis=-1)[:, :width]
    if width < size:
        for at in np.flatnonzero(scores[:, width - 1] == scores[:, width]):
            ranked[at] = logits[at].sort(descending=True, stable=True).indices[:width].numpy()
    return ranked


def of_prompts(
    hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], rows: Sequence[tuple[int, Targets]]
) -> list[list[TokenLogprobs] | None]:
    """Logprobs of each row's targets, or None for a row of which one is not finite.

    ``hidden`` [tokens, size] are a step's hidden states, ``head`` makes logits of them, and a row is the
    place in them of what stands before its first target.
    """
    places = [first + at for first, targets in rows for at in range(len(targets.tokens))]
    tokens = [token for _, targets in rows for token in targets.tokens]
    tops = [targets.top for _, targets in rows for _ in targets.tokens]
    scored: list[TokenLogprobs | None] = []
    for start in range(0, len(places), SLICE):
        some = slice(start, start + SLICE)
        reports = Distributions(head(hidden[places[some]]), tops[some]).of(tokens[some])
        scored += [reports.get(at) for at in range(len(places[some]))]
    each = iter(scored)
    finite = [[one for one in islice(each, len(targets.tokens)) if one is not None] for _, targets in rows]
    return [
        stretch if len(stretch) == len(targets.tokens) else None
        for stretch, (_, targets) in zip(finite, rows, strict=True)
    ]
