"""Chooses the next token of each row: adjust, temperature, filter, then Gumbel noise (E6).

Every row is decided by its own logits, parameters, seed and position; batching only shares the passes over
the vocabulary. What is cut short for speed is cut only where the result is proved the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.sampling import SamplingParams
from workers.engine import noise
from workers.engine.adjust import Adjustment
from workers.engine.filters import Array, candidates
from workers.engine.plan import RowStart

#: Ids with bits from here on (one in 256) are so few that they are looked at whatever their logits.
RARE = np.uint32(0xFF000000)
#: No other id has more noise than this.
COMMON_NOISE = float(noise.gumbel(np.array([RARE]))[0])
#: What is wrong with a row whose numbers broke.
NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose: for which row, at which absolute position, without which ids."""

    row: int
    position: int
    masked: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Row:
    params: SamplingParams
    seed: int
    adjustment: Adjustment


class Sampler:
    """Samples for up to ``max_num_seqs`` rows. A row's only state is what its penalties count."""

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._spread = noise.spread(np.arange(vocab_size))

    def start(self, start: RowStart) -> None:
        """A request takes a row, whatever was there before."""
        self._rows[start.row] = _Row(start.params, start.seed, Adjustment(start, self._vocab_size))

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int | None], dict[int, str]]:
        """A token per draw from logits [draws, vocabulary] (float32, changed in place).

        A draw that fails has None for a token, and its place and the reason in the second value.
        """
        rows = [self._row(draw) for draw in draws]
        errors: dict[int, str] = {}
        chosen = self._likeliest(logits, draws, rows, errors)
        random = [at for at, row in enumerate(rows) if row.params.temperature > 0 and at not in errors]
        if random:
            scores = _scores(logits, random, chosen, [rows[at].params.temperature for at in random])
            kept = candidates(scores, [rows[at].params for at in random])
            for place, at in enumerate(random):
                key = noise.key(rows[at].seed, draws[at].position)
                found = kept[place]
                if found is None:
                    chosen[at] = self._from_all(scores[place].numpy(), chosen[at], key)
                else:
                    random_bits = noise.bits(key, self._spread[found.ids])
                    chosen[at] = int(found.ids[(found.scores + noise.gumbel(random_bits)).argmax()])
        tokens: list[int | None] = [None if at in errors else token for at, token in enumerate(chosen)]
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.adjustment.add(token)
        return tokens, errors

    def _row(self, draw: Draw) -> _Row:
        row = self._rows[draw.row]
        assert row is not None, f"row {draw.row} was not started"
        return row

    @staticmethod
    def _likeliest(
        logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[_Row], errors: dict[int, str]
    ) -> list[int]:
        """The likeliest id of each row once its logits are adjusted; the lowest among equals."""
        # One pass finds it and, since max hands NaN on, also the rows that are not finite.
        tops, bests = logits.max(dim=-1)
        likeliest: list[int] = bests.tolist()
        for at, top in enumerate(tops.tolist()):
            if not math.isfinite(top):
                errors[at] = NOT_FINITE
            elif rows[at].adjustment.always or draws[at].masked:
                values = logits[at].numpy()
                rows[at].adjustment.apply(values, draws[at].masked)
                likeliest[at] = int(values.argmax())
                if not math.isfinite(values[likeliest[at]]):
                    errors[at] = "biases and masks leave no token to choose"
        return likeliest

    def _from_all(self, scores: Array, likeliest: int, key: noise.Key) -> int:
        """A draw from the whole vocabulary, with logarithms taken only for ids that can win.

        The likeliest id, whose score is 0, sets the mark. Another one passes it either with rare noise, or
        from no further below it than common noise can carry.
        """
        random = noise.bits(key, self._spread)
        mark = float(noise.gumbel(random[likeliest : likeliest + 1])[0])
        ids = np.flatnonzero((random >= RARE) | (scores > mark - COMMON_NOISE))
        return int(ids[(scores[ids] + noise.gumbel(random[ids])).argmax()])


def _scores(
    logits: torch.Tensor, places: Sequence[int], likeliest: Sequence[int], temperatures: Sequence[float]
) -> torch.Tensor:
    """Logits of some rows after temperature, relative to the likeliest id's."""
    rows = logits if len(places) == len(logits) else logits[list(places)]
    tops = rows.gather(1, torch.tensor([[likeliest[at]] for at in places]))
    # Relative first: divided by a temperature next to zero, they then go to -inf and never to NaN.
    return rows.sub_(tops).div_(torch.tensor(temperatures).unsqueeze(1))
