"""One admitted request, as its connection sees it: entries in order, or the reason why there are no more.

A layer over `common.bus.replies` that knows of clients that leave and of a Redis that forgot the request.
Knows nothing of what the entries say, and runs no command of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from api.client import Client, ClientGoneError
from common.bus.replies import Subscription
from common.errors import DeadlineError, MillstreamError, QueueFullError, UnavailableError
from common.logging import Log
from common.messages import OutEntry, Request

log = Log(__name__)

#: A reply silent for this long is looked up: Redis may have lost the request.
_SILENCE_S = 3.0


class LostRequestError(MillstreamError):
    """The request was lost together with the data of Redis."""


class Home(Protocol):
    """What a reply needs from the process it lives in."""

    async def is_lost(self, request: Request) -> bool:
        """Whether Redis, being there, does not know the request."""

    async def readmit(self, request: Request, deadline: float) -> None:
        """Puts a lost request back.

        Raises `LostRequestError` when it is too late, and what ADMIT raises: then it can be tried again.
        """

    def pause(self, request: Request, *, on: bool) -> None:
        """Asks the scheduler to pause the request, or to go on with it."""

    def closed(self, reply: Reply, *, ended: bool) -> None:
        """Nobody follows the reply any more; it had its terminal entry, or not."""


class Reply:
    """A request in flight.

    ``deadline`` is on the loop's clock and later than the request's own: workers and sweeps come first. It is
    one timer, where a timeout around every wait would cost a short request a tenth of its time.
    """

    def __init__(
        self, home: Home, request: Request, subscription: Subscription, client: Client, deadline: float
    ) -> None:
        self.request = request
        self.deadline = deadline
        #: How often the request was put back after Redis had lost it; its text then starts anew.
        self.restarts = 0
        self._home = home
        self._subscription = subscription
        self._client = client
        self._failure: Exception | None = None
        self._was_put_back = False
        self._closed = False
        client.on_gone(lambda: self.fail(ClientGoneError()))
        self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)

    @property
    def uid(self) -> str:
        """The request's id."""
        return self.request.uid

    @property
    def last(self) -> OutEntry | None:
        """The last entry that was read."""
        return self._subscription.last

    def fail(self, error: Exception) -> None:
        """Ends the reply from outside: `next` raises ``error``."""
        self._failure = self._failure or error
        self._subscription.wake()

    async def next(self) -> list[OutEntry]:
        """The entries that have arrived, at least one.

        Raises `ClientGoneError`, `DeadlineError`, and `MillstreamError` for a reply that will not go on.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            entries = await self._subscription.next(_SILENCE_S)
            if entries:
                return entries
            if self._failure is None:
                await self._look_up()

    async def pour(self, take: Callable[[list[OutEntry]], bool]) -> None:
        """Hands all further entries to ``take`` the moment they arrive, until it returns True.

        Raises what `next` raises, and what ``take`` does.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if await self._subscription.pour(take, _SILENCE_S):
                return
            if self._failure is None:
                await self._look_up()

    def hold(self) -> None:
        """The reader cannot take more now: the rest stays in Redis until `release`."""
        self._subscription.hold()

    def release(self) -> None:
        """Ends `hold`."""
        self._subscription.release()

    def close(self) -> None:
        """Stops following; a request that has not ended is given up. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._subscription.close()
        self._client.close()
        last = self._subscription.last
        self._home.closed(self, ended=last is not None and bool(last.end))

    def pause(self, *, on: bool) -> None:
        """Pauses the generation, whose reader is behind, or lets it go on."""
        self._home.pause(self.request, on=on)

    def _expire(self) -> None:
        self.fail(DeadlineError())

    async def _look_up(self) -> None:
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._put_back()
        except TimeoutError:
            raise DeadlineError from None

    async def _put_back(self) -> None:
        """Puts the request back if Redis has lost it, unless a part of its text has been sent (B11)."""
        if not await self._home.is_lost(self.request):
            return
        last = self._subscription.last  # text comes after the accepted entry, so the last one tells
        sent = last is not None and last.choice >= 0 and self.request.reply.get("stream")
        if sent or self._was_put_back:
            raise LostRequestError
        self.restarts += 1  # whatever comes of it: without an answer it may have happened
        log.warning("Redis lost a request, admitting it again", uid=self.uid)
        try:
            await self._home.readmit(self.request, self.deadline)
        except (UnavailableError, QueueFullError) as error:
            log.warning("not admitted yet, trying again", uid=self.uid, reason=error.message)
            return
        self._was_put_back = True
