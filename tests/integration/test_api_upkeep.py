"""What every API process does for all of them: signs of life, overdue requests, orphans."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

import pytest

from api.client import Client
from api.service import Service
from api.submit import submit
from api.upkeep import Upkeep
from common.bus.client import AsyncBus
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys
from common.bus.registry import Registry
from common.bus.replies import Replies
from common.messages import Kind, Request
from common.sampling import SamplingParams
from common.settings import Settings
from tests.helpers.fake_workers import MODEL, FakeWorkers

KEYS = Keys()


@dataclass
class Bench:
    """A service inside this process, with a clock of our own for its upkeep."""

    service: Service
    upkeep: Upkeep
    now: float = 0.0

    async def admit(self, api: str = "") -> str:
        """Admits a request as the process ``api`` (this one by default); returns its uid."""
        service = self.service
        if api:
            service = Service(
                replace(service.settings, worker_id=api), KEYS, service.bus, service.replies, service.registry
            )
        request = Request("", Kind.COMPLETION, MODEL, SamplingParams(), {"prompt": ["x"]}, {"stream": True})
        client = Client(_never)
        reply = await submit(service, request, client)
        client.close()
        return reply.uid

    async def search(self) -> None:
        """One search for what nobody waits for."""
        await self.upkeep._orphans.round(self.upkeep._queues())

    async def state(self, uid: str) -> str:
        state = await self.service.bus.do("HGET", KEYS.req(uid), "state")
        return str(state.decode())


async def _never() -> dict[str, str]:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


def on_a_bench(
    redis: EmbeddedRedis, test: Callable[[Bench], Coroutine[None, None, None]], **settings: float
) -> None:
    async def run() -> None:
        bus = AsyncBus(redis.url, name="bench")
        replies = Replies(bus, KEYS, 2, name="bench")
        registry = Registry(bus, KEYS)
        await registry.poll()
        service = Service(
            Settings(redis_url=redis.url, worker_id="api-here", **settings), KEYS, bus, replies, registry
        )
        bench = Bench(service, Upkeep(service, lambda: bench.now))
        try:
            await test(bench)
        finally:
            await bus.close()

    with FakeWorkers(redis.url, working=False):
        asyncio.run(run())


@pytest.fixture(scope="module")
def redis() -> object:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(autouse=True)
def _empty(redis: EmbeddedRedis) -> None:
    with FakeWorkers(redis.url, working=False) as workers:
        workers.bus.do("FLUSHALL")


def test_a_sign_of_life(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        await bench.upkeep.start()
        key = KEYS.worker("api-here")
        text = json.loads(await bench.service.bus.do("GET", key))
        assert (text["role"], text["draining"], text["stats"]["live"]) == ("api", False, 0)
        assert 0 < await bench.service.bus.do("PTTL", key) <= 5000
        assert await bench.service.bus.do("SISMEMBER", KEYS.workers(), "api-here")
        await bench.upkeep.stop()
        assert not await bench.service.bus.do("EXISTS", key)

    on_a_bench(redis, test)


def test_announcements_that_cannot_be_read_hide_no_others(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        bus, registry = bench.service.bus, bench.service.registry
        before = registry.view
        for number, text in enumerate(("{}", "[]", "5", "not JSON")):
            await bus.do("HSET", KEYS.models(), f"junk-{number}", text)
            await bus.do("SET", KEYS.worker(f"junk-{number}"), text)
            await bus.do("SADD", KEYS.workers(), f"junk-{number}")
        await registry.poll()
        assert registry.view.at > before.at
        assert (registry.view.models, registry.view.workers) == (before.models, before.workers)

    on_a_bench(redis, test)


def test_orphans_are_cancelled_after_a_while(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        await bench.upkeep._announce()
        mine, orphan = await bench.admit(), await bench.admit("api-gone")
        await bench.service.registry.poll()
        for bench.now in (0.0, 3.0, 4.9):  # nobody knows of a sign of life for five seconds already
            await bench.search()
            assert await bench.state(orphan) == "queued"
        bench.now = 5.0
        await bench.search()
        assert await bench.state(orphan) == "ended"
        assert await bench.state(mine) == "queued"

    on_a_bench(redis, test)


def test_a_process_that_is_seen_again_keeps_its_requests(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        uid, bus = await bench.admit("api-slow"), bench.service.bus
        for bench.now, seen in ((0.0, False), (4.0, True), (8.0, False), (13.9, False)):
            if seen:
                text = json.dumps({"role": "api", "model": ""})
                await bus.do("SET", KEYS.worker("api-slow"), text, "PX", 5000)
                await bus.do("SADD", KEYS.workers(), "api-slow")
            else:
                await bus.do("DEL", KEYS.worker("api-slow"))
            await bench.search()
        assert await bench.state(uid) == "queued"
        bench.now = 14.1
        await bench.search()
        assert await bench.state(uid) == "ended"

    on_a_bench(redis, test)


def test_an_outage_starts_the_waiting_anew(redis: EmbeddedRedis) -> None:
    """While Redis is away nobody can be seen, which says nothing about them."""

    async def test(bench: Bench) -> None:
        uid = await bench.admit("api-gone")
        await bench.upkeep._round()
        redis.kill()
        await bench.upkeep._round()
        await asyncio.to_thread(redis.start)
        bench.now = 11.0
        await bench.upkeep._round()
        assert await bench.state(uid) == "queued"
        bench.now = 16.0
        await bench.upkeep._round()
        assert await bench.state(uid) == "ended"

    on_a_bench(redis, test)


def test_overdue_requests_are_ended(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        uid, bus = await bench.admit(), bench.service.bus
        await bench.upkeep._end_overdue()
        assert await bench.state(uid) == "queued"
        await asyncio.sleep(0.3)
        await bench.upkeep._end_overdue()
        assert await bench.state(uid) == "ended"
        inflight = KEYS.inflight(int(uid[0]), MODEL, "interactive")
        assert not await bus.do("ZSCORE", inflight, uid)

    on_a_bench(redis, test, queue_timeout=0.2)


def test_flags_of_requests_that_are_gone_go_too(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        uid, bus = await bench.admit(), bench.service.bus
        flags = KEYS.cancel(int(uid[0]))
        await bus.do("SADD", flags, uid, "0-unknown", b"\xff")
        await bench.upkeep._end_flagged()
        assert await bench.state(uid) == "ended"
        assert await bus.do("SCARD", flags) == 0

    on_a_bench(redis, test)
