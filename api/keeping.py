"""What is being read here is kept: about once a second Redis is told, for all of it together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence

from api.orphans import GONE_S
from api.service import Service
from common.bus.holding import Hold, attach
from common.bus.keys import partition_of
from common.errors import MillstreamError
from common.logging import Log
from common.messages import Request

log = Log(__name__)

_EVERY_S = 1.0
#: A hold is at least this long while there is a reader: a process may be late by a few rounds.
_LEAST_MS = 5000
#: Rounds after which the keys of requests that need no hold are renewed.
_SLOW_ROUNDS = 10
#: Most keys that one call names.
_KEYS = 1000


class Keeping:
    """The background task."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    def start(self) -> None:
        """One round every second."""
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.round()
            except MillstreamError as error:
                log.debug("keeping waits for Redis", error=error.message)
            except Exception:
                log.exception("a round of keeping failed")

    async def round(self) -> None:
        """Renews the holds and the lives of all that is read here."""
        service, ttl_ms = self._service, int(self._service.settings.reply_ttl * 1000)
        everything = self._number % _SLOW_ROUNDS == 0
        self._number += 1
        holds: dict[int, list[Hold]] = defaultdict(list)
        for request in {reply.uid: reply.request for reply in service.live}.values():
            hold_ms = self._hold_ms(request)
            if everything or hold_ms is not None:
                hold = Hold(request.uid, request.choices, hold_ms, request.idem)
                holds[partition_of(request.uid)].append(hold)
        for some in holds.values():
            for page in _pages(some):
                await service.bus.run(attach(service.keys, page, ttl_ms))

    def _hold_ms(self, request: Request) -> int | None:
        """None for a request that lives and ends with its own connection, which is here."""
        if request.resume_ms:
            return max(request.resume_ms, _LEAST_MS)
        return None if request.api == self._service.id else int(GONE_S * 1000)


def _pages(holds: Sequence[Hold]) -> Iterator[list[Hold]]:
    """``holds`` in pieces of about `_KEYS` keys."""
    page: list[Hold] = []
    size = 0
    for hold in holds:
        if page and size + hold.choices > _KEYS:
            yield page
            page, size = [], 0
        page.append(hold)
        size += hold.choices + 3
    if page:
        yield page
