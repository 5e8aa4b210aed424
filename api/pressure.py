"""How many requests may queue, how fast they finish here, and when to try again. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

#: Time over which the rate is averaged.
_MEMORY_S = 10.0
_SHORTEST_S, _LONGEST_S = 1.0, 30.0
#: The advice while nothing has finished yet.
_UNKNOWN_S = 5.0
_SHORTEST_QUEUE = 16
#: Of work that may be late, and while it is not known how many requests can run at once.
LONGEST_QUEUE = 256


def queue_bound(rows: int, *, may_be_late: bool) -> int:
    """Most requests that may wait while ``rows`` run, so that what is admitted under overload is not late.

    A full engine works off as many as it runs in the time that one of them takes. So whoever waits behind
    half as many waits about half of that time, whatever the model and the machine.
    """
    return max(_SHORTEST_QUEUE, rows // 2) if rows and not may_be_late else LONGEST_QUEUE


class FinishRate:
    """Requests finished per second, as an exponentially weighted average."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = 0.0
        self._at = clock()

    def finished(self) -> None:
        """One more request has ended."""
        self._rate = self.per_second() + 1 / _MEMORY_S
        self._at = self._clock()

    def per_second(self) -> float:
        """The rate now."""
        return self._rate * math.exp((self._at - self._clock()) / _MEMORY_S)

    def retry_after(self, waiting: int) -> float:
        """Seconds until ``waiting`` requests should have been served, within sensible bounds."""
        rate = self.per_second()
        if rate < 1e-3:
            return _UNKNOWN_S
        return min(max(waiting / rate, _SHORTEST_S), _LONGEST_S)
