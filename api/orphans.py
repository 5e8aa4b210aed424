"""Requests that nobody waits for: their API process is gone, or their reader did not come back in time.

Every process looks; the script that ends them makes sure that nobody has come back meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from api.service import Service
from common.bus import registry
from common.logging import Log

log = Log(__name__)

#: An API process without a sign of life for this long is gone, and with it the connections of its requests.
GONE_S = 10.0
#: Nobody is given up within this time after Redis was away: readers must be able to say that they are there.
_CALM_S = 5.0
_PAGE = 500
_ORPHANED = "The API process that held the connection is gone."
_ABANDONED = "Nobody came back for the request in time."


@dataclass(slots=True)
class _Member:
    """What is known of a request in flight; it never changes, but for the times."""

    api: str
    resumes: bool
    #: Until when it is held, as last seen (server's clock, ms).
    held_until: int = 0
    #: Seen once after that.
    lapsed: bool = False
    #: Its end is on its way, and in the log.
    told: bool = False


class Orphans:
    """The search. ``clock`` is monotonic, in seconds."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._members: dict[str, _Member] = {}
        #: When an API process that has requests in flight last gave a sign of life.
        self._signs: dict[str, float] = {}
        #: The first round since Redis was away, or since this process began.
        self._calm_since: float | None = None

    def forget(self) -> None:
        """Redis was away. Nobody could be seen, which says nothing about them."""
        self._signs.clear()
        self._calm_since = None
        for member in self._members.values():
            member.lapsed = False

    async def round(self, queues: AsyncIterator[tuple[str, str, str]]) -> None:
        """CANCEL for what nobody waits for, in ``queues``: (model, class, key of `inflight`)."""
        seconds, micros = await self._service.bus.do("TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        if self._calm_since is None:
            self._calm_since = self._clock()
        is_calm = self._clock() - self._calm_since >= _CALM_S
        members: dict[str, _Member] = {}
        gone: dict[str, bool] = {"": False}
        async for model, cls, inflight in queues:
            async for uid in self._pages(inflight):
                member = self._members.get(uid) or await self._look(uid)
                if member is None:
                    continue
                members[uid] = member
                if member.resumes:
                    if await self._has_lapsed(uid, member, now_ms) and is_calm:
                        await self._cancel(uid, member, model, cls, _ABANDONED)
                    continue
                if member.api not in gone:
                    gone[member.api] = await self._is_gone(member.api)
                if gone[member.api]:
                    await self._cancel(uid, member, model, cls, _ORPHANED)
        self._members = members
        self._signs = {api: sign for api, sign in self._signs.items() if api in gone}

    async def _pages(self, inflight: str) -> AsyncIterator[str]:
        """All members. One that moves while others leave is met in the next round."""
        start = 0
        while True:
            page = await self._service.bus.do("ZRANGE", inflight, start, start + _PAGE - 1)
            for raw in page:
                yield raw.decode()
            if len(page) < _PAGE:
                return
            start += _PAGE

    async def _look(self, uid: str) -> _Member | None:
        names = ("api", "resume", "attached_until")
        api, resume, until = await self._service.bus.do("HMGET", self._service.keys.req(uid), *names)
        return None if api is None else _Member(api.decode(), resume is not None, int(until or 0))

    async def _has_lapsed(self, uid: str, member: _Member, now_ms: int) -> bool:
        """Seen past its time in two rounds: whoever reads it had the time to say so."""
        if now_ms < member.held_until:
            return False
        until = await self._service.bus.do("HGET", self._service.keys.req(uid), "attached_until")
        member.held_until = int(until or 0)
        was_lapsed, member.lapsed = member.lapsed, now_ms >= member.held_until
        return was_lapsed and member.lapsed

    async def _is_gone(self, api: str) -> bool:
        """Its announcement says when it was made: it lives for a known time, and a little is left of it."""
        now, life_s = self._clock(), registry.WORKER_TTL_MS / 1000
        left_ms = await self._service.bus.do("PTTL", self._service.keys.worker(api))
        if left_ms >= 0:
            self._signs[api] = now - (life_s - left_ms / 1000)
        return now - self._signs.setdefault(api, now - life_s) >= GONE_S

    async def _cancel(self, uid: str, member: _Member, model: str, cls: str, message: str) -> None:
        call = self._service.cancelling(uid, model=model, cls=cls, message=message, abandoned=True)
        code = await self._service.bus.run(call)
        if code in ("ENDED", "FLAGGED") and not member.told:
            member.told = True
            log.info("cancelled", uid=uid, why=message, outcome=code)
