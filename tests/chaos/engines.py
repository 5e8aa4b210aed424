"""Null engines with a fault in them: a request that kills whoever computes it, and a step that hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from common.bus import leases
from workers.engine import null

#: How long a loop may stand still in a process that is to hang.
HANG_S = 2.0
#: Tokens after which the step hangs.
_TOKENS = 20


def poison(seeds: Collection[int]) -> None:
    """From now on a step with a request of one of these seeds in it is this process's last."""
    starts = {null._start(seed) for seed in seeds}
    pace = null.NullEngine._pace

    def deadly(self: null.NullEngine) -> None:
        if any(one.start in starts for one in self._running.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        pace(self)

    null.NullEngine._pace = deadly


@dataclass(frozen=True, slots=True)
class Hang:
    """The step that follows a request's twentieth token hangs; ``wedged_s`` later there is no help."""

    seed: int
    seconds: float
    wedged_s: float

    @classmethod
    def parse(cls, text: str) -> Self:
        seed, seconds, wedged_s = text.split(":")
        return cls(int(seed), float(seconds), float(wedged_s))


def hang(how: Hang, marker: Path) -> None:
    """It happens once, in the first process that finds no ``marker``, which then says which one it was."""
    leases.Progress.__init__.__kwdefaults__["hang_s"] = HANG_S
    leases._WEDGED_S = how.wedged_s
    start, pace = null._start(how.seed), null.NullEngine._pace

    def sleepy(self: null.NullEngine) -> None:
        there = any(one.start == start and one.generated >= _TOKENS for one in self._running.values())
        if there and not marker.exists():
            marker.write_text(str(os.getpid()))
            time.sleep(how.seconds)
        pace(self)

    null.NullEngine._pace = sleepy
