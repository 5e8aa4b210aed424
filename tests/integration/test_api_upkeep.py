"""What every API process does for all of them: signs of life, overdue requests, orphans."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from api import orphans
from api.client import Client
from api.following import attach
from api.keeping import Keeping
from api.replies import Reply
from api.service import Service
from api.submit import submit
from api.upkeep import Upkeep
from common.bus.client import AsyncBus
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys, new_uid
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

    async def admit(self, api: str = "", **more: Any) -> str:
        """Admits a request as the process ``api`` (this one by default); returns its uid."""
        service = self.service
        if api:
            service = Service(
                replace(service.settings, worker_id=api), KEYS, service.bus, service.replies, service.registry
            )
        request = Request(
            new_uid(0), Kind.COMPLETION, MODEL, SamplingParams(), {"prompt": ["x"]}, {"stream": True}, **more
        )
        client = Client(SimpleNamespace(gone=False, on_gone=None))
        reply = await submit(service, request, client)
        client.close()
        return reply.uid

    async def read(self, uid: str) -> Reply:
        """Follows a request, as a client that came back would."""
        flat = await self.service.bus.do("HGETALL", KEYS.req(uid))
        request = Request.from_fields(uid, dict(zip(flat[::2], flat[1::2], strict=True)))
        return attach(self.service, request, Client(SimpleNamespace(gone=False, on_gone=None)))

    async def search(self) -> None:
        """One search for what nobody waits for."""
        await self.upkeep._orphans.round(self.upkeep._queues())

    async def state(self, uid: str) -> str:
        state = await self.service.bus.do("HGET", KEYS.req(uid), "state")
        return str(state.decode())


def on_a_bench(
    redis: EmbeddedRedis, test: Callable[[Bench], Coroutine[None, None, None]], **settings: float
) -> None:
    async def run() -> None:
        bus = AsyncBus(redis.url, name="bench")
        replies = Replies(bus, KEYS, 2, name="bench")
        registry = Registry(bus, KEYS)
        await registry.poll()
        service = Service(
            Settings(redis_url=redis.url, partitions=2, worker_id="api-here", **settings),
            KEYS,
            bus,
            replies,
            registry,
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


def test_more_orphans_than_fit_one_page(redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "_PAGE", 3)

    async def test(bench: Bench) -> None:
        uids = [await bench.admit("api-gone") for _ in range(20)]
        for bench.now in (0.0, 5.0):
            await bench.search()
        for bench.now in (6.0, 7.0):  # while members leave, some move to a page that was read already
            await bench.search()
        assert {await bench.state(uid) for uid in uids} == {"ended"}

    on_a_bench(redis, test)


def test_a_reader_keeps_the_request_of_a_dead_process(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        uid, keeping = await bench.admit("api-gone"), Keeping(bench.service)
        reply = await bench.read(uid)
        await keeping.round()
        for bench.now in (0.0, 5.0, 10.0):
            await bench.search()
        assert await bench.state(uid) == "queued"
        reply.close()
        await bench.service.settle(5.0)
        assert await bench.state(uid) == "ended"

    on_a_bench(redis, test)


def test_of_two_readers_the_one_that_stays_keeps_it(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        uid = await bench.admit("api-gone")
        service = bench.service
        other = Service(
            replace(service.settings, worker_id="api-other"),
            KEYS,
            service.bus,
            service.replies,
            service.registry,
        )
        here, there = await bench.read(uid), await Bench(other, bench.upkeep).read(uid)
        keeping = Keeping(other)
        keeping.start()
        here.close()
        await service.settle(5.0)
        assert await bench.state(uid) == "queued"
        await keeping.stop()
        there.close()
        await other.settle(5.0)
        assert await bench.state(uid) == "ended"

    on_a_bench(redis, test)


def test_nobody_came_back_in_time(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        held, left = await bench.admit(resume_ms=60_000), await bench.admit(resume_ms=1)
        plain = await bench.admit()
        await bench.upkeep._announce()
        await asyncio.sleep(0.01)
        for bench.now in (0.0, 1.0, 4.9):  # Redis may have been away until a moment ago
            await bench.search()
            assert await bench.state(left) == "queued"
        bench.now = 5.0
        await bench.search()
        assert await bench.state(left) == "ended"
        assert [await bench.state(uid) for uid in (held, plain)] == ["queued", "queued"]

    on_a_bench(redis, test)


def test_a_reader_that_could_not_say_so_gets_the_time_to(redis: EmbeddedRedis) -> None:
    """Its hold ran out while Redis was away."""

    async def test(bench: Bench) -> None:
        uid, keeping = await bench.admit(resume_ms=1), Keeping(bench.service)
        await bench.read(uid)
        for bench.now in (0.0, 10.0):
            await bench.upkeep._round()
            assert await bench.state(uid) == "queued", "seen past its time once only, or not after a calm"
            redis.kill()
            await bench.upkeep._round()
            await asyncio.to_thread(redis.start)
        await keeping.round()
        for bench.now in (20.0, 26.0, 27.0):
            await bench.upkeep._round()
        assert await bench.state(uid) == "queued"

    on_a_bench(redis, test)


def test_a_reader_that_is_late_once_keeps_its_request(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        await bench.search()
        bench.now, keeping = 10.0, Keeping(bench.service)
        uid = await bench.admit(resume_ms=1)
        await bench.read(uid)
        await asyncio.sleep(0.01)
        await bench.search()
        assert await bench.state(uid) == "queued", "it was seen past its time once only"
        await keeping.round()
        await bench.search()
        assert await bench.state(uid) == "queued"

    on_a_bench(redis, test)


def test_what_is_read_outlives_its_time(redis: EmbeddedRedis) -> None:
    async def test(bench: Bench) -> None:
        bus, keeping = bench.service.bus, Keeping(bench.service)
        uid = await bench.admit(resume_ms=60_000)
        await bus.do("HSET", KEYS.req(uid), "state", "ended", "terminal", "done")
        await bus.do("XADD", KEYS.out(uid), "*", "end", "done")
        await bench.read(uid)
        for key in (KEYS.req(uid), KEYS.out(uid)):
            await bus.do("PEXPIRE", key, 500)
        await keeping.round()
        assert await bus.do("PTTL", KEYS.req(uid)) > 250_000
        assert await bus.do("PTTL", KEYS.out(uid)) > 250_000

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
