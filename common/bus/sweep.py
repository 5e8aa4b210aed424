"""The sweep: every API process looks each second for requests nobody else will end.

Overdue members of `inflight` (queue timeout, deadline), and cancel flags set by hand on requests that no
scheduler owns. Each case is one idempotent script, so any number of sweepers may run.
"""

from __future__ import annotations

import asyncio

from common.bus import handoffs
from common.bus.client import AsyncBus
from common.bus.keys import CLASSES, Keys
from common.bus.registry import Registry
from common.errors import CancelledError, MillstreamError, kind_of
from common.logging import Log

log = Log(__name__)

EVERY_S = 1.0
_PAGE = 100


class Sweeper:
    """Sweeps all partitions of all models that the registry knows."""

    def __init__(
        self, bus: AsyncBus, keys: Keys, registry: Registry, *, partitions: int, ttl_ms: int, lease_ms: int
    ) -> None:
        self._bus = bus
        self._keys = keys
        self._registry = registry
        self._partitions = partitions
        self._ttl_ms = ttl_ms
        self._lease_ms = lease_ms
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.sweep()
            except MillstreamError as error:
                log.warning("the sweep failed, trying again", error=error.message)

    async def sweep(self) -> None:
        """One pass; bounded, since what it does not reach is reached by the next."""
        seconds, micros = await self._bus.do("TIME")
        now = int(seconds) * 1000 + int(micros) // 1000
        for partition in range(self._partitions):
            for model in self._registry.view.models:
                for cls in CLASSES:
                    await self._overdue(partition, model, cls, now)
            await self._flagged(partition)

    async def _overdue(self, partition: int, model: str, cls: str, now: int) -> None:
        due = await self._bus.do(
            "ZRANGEBYSCORE", self._keys.inflight(partition, model, cls), "-inf", now, "LIMIT", 0, _PAGE
        )
        for member in due:
            uid = member.decode()
            call = handoffs.expire(
                self._keys,
                uid,
                model=model,
                cls=cls,
                owner=await self._owner(uid),
                ttl_ms=self._ttl_ms,
                lost_ms=2 * self._lease_ms,
            )
            outcome = await self._bus.run(call)
            log.info("swept an overdue request", uid=uid, outcome=outcome)

    async def _owner(self, uid: str) -> str:
        """The worker that runs a choice of the request which has not ended; empty when there is none."""
        reply = await self._bus.do("HGETALL", self._keys.req(uid))
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        for name, value in fields.items():
            role, _, choice = name.partition(b":")
            if role == b"owner" and b"ended:" + choice not in fields:
                return str(value.decode())
        return ""

    async def _flagged(self, partition: int) -> None:
        flags = self._keys.cancel(partition)
        for member in (await self._bus.do("SMEMBERS", flags))[:_PAGE]:
            uid = member.decode("utf-8", "replace").partition("/")[0]
            model, cls = await self._bus.do("HMGET", self._keys.req(uid), "model", "class")
            if model is None:
                await self._bus.do("SREM", flags, member)
                continue
            if b"/" in member:
                continue
            error = CancelledError()
            call = handoffs.cancel(
                self._keys,
                uid,
                model=model.decode(),
                cls=cls.decode(),
                ttl_ms=self._ttl_ms,
                error=kind_of(error),
                message=error.message,
            )
            await self._bus.run(call)
