"""Who may take others for dead: a process that has renewed its own lease without a gap for a whole lease.

Whatever makes everybody look dead (a Redis that was away, hung, or took no writes; a machine that stood
still) leaves a gap in one's own renewals as well. Pure, but for the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: A longer gap, as a share of the lease, breaks the series. Leases end when nobody could renew for three
#: quarters of one, since everybody renews every quarter.
_GAP = 2 / 3


class Steadiness:
    """The series of one process's renewals."""

    def __init__(self, lease_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_ms / 1000
        self._clock = clock
        self._since = self._last = float("-inf")

    def renewed(self) -> None:
        """The own lease has been renewed, just now."""
        now = self._clock()
        if now - self._last > self._lease_s * _GAP:
            self._since = now
        self._last = now

    def holds(self) -> bool:
        """Whether the series lasts, and has for a whole lease."""
        now = self._clock()
        return now - self._last <= self._lease_s * _GAP and now - self._since >= self._lease_s
