"""What becomes of a reader that does not keep up: it slows its own request, and nobody else (P4).

Its entries stay in Redis. When it stays behind for a moment its rows are paused in the scheduler; when it
stays behind for long its connection is cut. Memory here is bounded by the socket's buffers and one read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from common.errors import MillstreamError

#: Behind for this long, and the generation is paused; in step for this long, and it goes on.
_PATIENCE_S = 0.5
_TRUST_S = 0.25


class SlowReaderError(MillstreamError):
    """The client did not read its reply in time."""


class Slowable(Protocol):
    """The reply whose reader is watched; `api.replies.Reply` is one."""

    def hold(self) -> None:
        """Take no more of its entries from Redis."""

    def release(self) -> None:
        """Go on."""

    def pause(self, *, on: bool) -> None:
        """Pause its generation, or let it go on."""

    def fail(self, error: Exception) -> None:
        """End it."""


class Pace:
    """Watches one reader; ``cut`` is called before the reply fails."""

    def __init__(self, reply: Slowable, *, limit_s: float, cut: Callable[[], None]) -> None:
        self._reply = reply
        self._limit_s = limit_s
        self._cut = cut
        self._paused = False
        self._next: asyncio.TimerHandle | None = None

    def behind(self) -> None:
        """The reader cannot take more now."""
        self._reply.hold()
        self._after(_PATIENCE_S, self._pause)

    def caught_up(self) -> None:
        """It can again."""
        self._reply.release()
        if self._paused:
            self._after(_TRUST_S, self._resume)
        else:
            self.close()

    def close(self) -> None:
        """Stops watching; idempotent."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self.close()
        self._next = asyncio.get_running_loop().call_later(seconds, call)

    def _pause(self) -> None:
        self._paused = True
        self._reply.pause(on=True)
        self._after(self._limit_s, self._give_up)

    def _resume(self) -> None:
        self._paused = False
        self._reply.pause(on=False)

    def _give_up(self) -> None:
        self._cut()
        self._reply.fail(SlowReaderError())
