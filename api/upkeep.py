"""What every API process does once a second: says that it lives, and ends what is overdue or orphaned.

All processes do the same work; the scripts are idempotent, so none of them is special (P3).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from api.orphans import Orphans
from api.service import Phase, Service
from common.bus import handoffs, registry
from common.bus.keys import CLASSES, INTERACTIVE
from common.errors import CancelledError, MillstreamError
from common.logging import Log

log = Log(__name__)

_EVERY_S = 1.0
#: Most requests looked at per queue and round; the rest is for the next one.
_PAGE = 500


class Upkeep:
    """The background task."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._orphans = Orphans(service, clock)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """One round now, then one every second."""
        await self._round()
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        """Ends the task and takes this process's sign of life back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        service = self._service
        try:
            await service.bus.do("DEL", service.keys.worker(service.id))
            await service.bus.do("SREM", service.keys.workers(), service.id)
        except MillstreamError as error:
            log.warning("could not sign off", error=error.message)

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._round()

    async def _round(self) -> None:
        """Never raises: Redis may be away, and comes back."""
        try:
            await self._announce()
            await self._end_overdue()
            await self._end_flagged()
            await self._orphans.round(self._queues())
        except MillstreamError as error:
            self._orphans.forget()
            log.debug("upkeep waits for Redis", error=error.message)
        except Exception:
            log.exception("a round of upkeep failed")

    async def _announce(self) -> None:
        service = self._service
        commands = registry.announcement(
            service.keys,
            worker=service.id,
            role=registry.API,
            model="",
            draining=service.phase is not Phase.SERVING,
            stats={"live": len(service.live), "finished_per_s": round(service.rate.per_second(), 2)},
        )
        for command in commands:
            await service.bus.do(*command)

    async def _end_overdue(self) -> None:
        """EXPIRE for every member of `inflight` whose time has passed, on the server's clock."""
        bus = self._service.bus
        seconds, micros = await bus.do("TIME")
        now = int(seconds) * 1000 + int(micros) // 1000
        async for model, cls, inflight in self._queues():
            for uid in await bus.do("ZRANGEBYSCORE", inflight, "-inf", now, "LIMIT", 0, _PAGE):
                await self._expire(uid.decode(), model, cls)

    async def _expire(self, uid: str, model: str, cls: str) -> None:
        settings = self._service.settings
        call = handoffs.expire(
            self._service.keys,
            uid,
            model=model,
            cls=cls,
            owner=await self._worker_of(uid),
            ttl_ms=int(settings.reply_ttl * 1000),
            lost_ms=2 * settings.lease_ms,
        )
        code = await self._service.bus.run(call)
        log.info("a request was overdue", uid=uid, outcome=code)

    async def _worker_of(self, uid: str) -> str:
        """The scheduler that runs a choice of the request which has not ended; empty when there is none."""
        reply = await self._service.bus.do("HGETALL", self._service.keys.req(uid))
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        for name, value in fields.items():
            role, _, choice = name.partition(b":")
            if role == b"owner" and b"ended:" + choice not in fields:
                return str(value.decode())
        return ""

    async def _end_flagged(self) -> None:
        """CANCEL for what somebody flagged by hand and no scheduler owns; flags of nothing are removed."""
        bus, keys = self._service.bus, self._service.keys
        for partition in range(self._service.settings.partitions):
            flags = keys.cancel(partition)
            for member in (await bus.do("SMEMBERS", flags))[:_PAGE]:
                uid = member.decode("utf-8", "replace").partition("/")[0]
                model, cls = await bus.do("HMGET", keys.req(uid), "model", "class")
                if model is None:
                    await bus.do("SREM", flags, member)
                elif b"/" not in member:
                    named = (cls or INTERACTIVE.encode()).decode()
                    await self._cancel(uid, model.decode(), named, CancelledError().message)
            for member in (await bus.do("SMEMBERS", keys.pause(partition)))[:_PAGE]:
                if not await bus.do("EXISTS", keys.req(member.decode("utf-8", "replace"))):
                    await bus.do("SREM", keys.pause(partition), member)

    async def _cancel(self, uid: str, model: str, cls: str, message: str) -> None:
        call = self._service.cancelling(uid, model=model, cls=cls, message=message)
        code = await self._service.bus.run(call)
        if code == "ENDED":
            log.info("cancelled", uid=uid, why=message)

    async def _queues(self) -> AsyncIterator[tuple[str, str, str]]:
        """(model, class, its `inflight` key) of every queue there is."""
        for model in self._service.registry.view.models:
            for cls in CLASSES:
                for partition in range(self._service.settings.partitions):
                    yield model, cls, self._service.keys.inflight(partition, model, cls)
