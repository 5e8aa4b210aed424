"""What changes a row's logits before anything is chosen: masked ids, biases, penalties.

Works on one row of float32 numbers in place. Knows nothing of temperature, filters or noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from common.sampling import SamplingParams
from workers.engine.plan import RowStart

Logits: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class Penalties:
    """Repetition, presence and frequency penalties over the ids seen so far, kept up token by token.

    Sparse: a step costs the number of distinct ids seen, not the vocabulary.
    """

    def __init__(self, start: RowStart) -> None:
        params = start.params
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        counts = Counter(start.output_ids)
        if self._repetition != 1.0:
            counts.update(dict.fromkeys(start.prompt_ids, 0))
        self._place = {token: place for place, token in enumerate(counts)}
        self._ids = np.fromiter(counts, np.int64, len(counts))
        #: How often each id was generated; 0 for ids of the prompt alone.
        self._counts = np.fromiter(counts.values(), np.float32, len(counts))

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether the parameters ask for any penalty."""
        return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            room = max(64, place)  # doubling, so that growing costs little per token
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    def apply(self, logits: Logits) -> None:
        """Penalise the ids seen."""
        seen = len(self._place)
        ids, counts = self._ids[:seen], self._counts[:seen]
        values = logits[ids]
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0)
        logits[ids] = values


class Adjustment:
    """All that `apply` does for one request."""

    def __init__(self, start: RowStart, vocab_size: int) -> None:
        params = start.params
        bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocab_size]
        self._bias_ids = np.array([token for token, _ in bias], np.int64)
        self._bias = np.array([value for _, value in bias], np.float32)
        self._penalties = Penalties(start) if Penalties.needed(params) else None
        #: Whether every step needs `apply`, masked ids or not.
        self.always = bool(bias) or self._penalties is not None

    def apply(self, logits: Logits, masked: Sequence[int]) -> None:
        """Masked ids and biases on the raw logits, then penalties."""
        if len(self._bias_ids):
            np.add.at(logits, self._bias_ids, self._bias)
        if masked:
            logits[list(masked)] = -np.inf
        if self._penalties:
            self._penalties.apply(logits)

    def add(self, token: int) -> None:
        """Count a generated token."""
        if self._penalties:
            self._penalties.add(token)
