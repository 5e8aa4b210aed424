"""Choices that may have crashed a worker, and whose turn it is to prove that they did not (B8).

A suspect runs alone until its first token is committed: if it is the one that crashes workers, it takes
nobody with it. Between two trials the others run a step, so that no stream waits for more than one of them.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import count


class Suspects:
    """Whose turn it is. Decides only; the scheduler pauses, starts and watches."""

    def __init__(self) -> None:
        #: What each has crashed, and when it came: the least suspicious is tried first. Else those that a
        #: poison request took with it would wait behind it, and be killed again before they had a try.
        self._waiting: dict[str, tuple[int, int]] = {}
        self._arrivals = count()
        self._trial: tuple[str, tuple[int, int]] | None = None
        self._owed = False

    def __len__(self) -> int:
        return len(self._waiting) + (self._trial is not None)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting or key == self.on_trial

    @property
    def on_trial(self) -> str | None:
        """Who runs alone now, or is about to."""
        return self._trial[0] if self._trial else None

    def add(self, key: str, attempts: int) -> None:
        """A choice with ``attempts`` crashes came."""
        self._waiting[key] = attempts, next(self._arrivals)

    def discard(self, key: str) -> None:
        """It has committed a token, or ended: no suspect any more. Others are none to begin with."""
        self._waiting.pop(key, None)
        if key == self.on_trial:
            self._trial, self._owed = None, True

    def put_back(self) -> None:
        """Who is on trial cannot go on now: it keeps its place, for later."""
        if self._trial:
            key, rank = self._trial
            self._waiting[key] = rank
            self._trial, self._owed = None, True

    def others_ran(self) -> None:
        """A step without a trial was made."""
        self._owed = False

    def choose(self, blocked: Container[str], *, others: bool) -> None:
        """Puts the next one on trial, if it is time; ``others`` says that there are others who could run.

        Who is ``blocked`` could not commit anything, and is passed over.
        """
        if self._trial or (self._owed and others):
            return
        ready = {key: rank for key, rank in self._waiting.items() if key not in blocked}
        if ready:
            key = min(ready, key=ready.__getitem__)
            self._trial = key, self._waiting.pop(key)
