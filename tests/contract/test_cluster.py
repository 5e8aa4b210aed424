"""Redis Cluster: every script and every read of several keys stays within one slot.

One node that owns all slots is enough to have cross-slot commands refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.bus import leases, rates, registry
from common.bus.client import AsyncBus, Bus
from common.bus.embedded import EmbeddedRedis
from common.bus.handoffs import Gate, Text
from common.bus.holding import Hold
from common.bus.keys import SCHEDULERS, Keys
from common.bus.peers import PeerWatch
from common.bus.replies import Replies
from common.bus.server import wait_for_server
from common.bus.streams import Bell
from common.errors import MillstreamError
from common.messages import OutEntry
from tests.helpers.bus import LEASE_MS, Desk, Job, Steady
from tests.helpers.servers import BOTH, binary_of
from tests.helpers.waiting import until

PARTITIONS = 3


@pytest.fixture(scope="module", params=BOTH)
def cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=binary_of(request.param), cluster=True) as running:
        yield running


@pytest.fixture
def bus(cluster: EmbeddedRedis) -> Iterator[Bus]:
    connection = Bus(cluster.url, name="test")
    connection.do("FLUSHALL")
    yield connection
    connection.close()


def test_cross_slot_commands_are_refused_here(bus: Bus) -> None:
    with pytest.raises(MillstreamError, match="same slot"):
        bus.do("EVAL", "return 1", 2, Keys().tok(0), Keys().tok(1))


def test_a_worker_waits_for_a_cluster_that_answers_but_takes_no_keys(bus: Bus) -> None:
    """So it is for seconds after a node's restart: a worker that gave up would lose as many more."""
    bus.do("CLUSTER", "DELSLOTSRANGE", 0, 16383)
    with ThreadPoolExecutor() as pool:
        try:
            assert bus.do("PING") == b"PONG"
            waiting = pool.submit(wait_for_server, bus.url, Keys(), PARTITIONS, timeout_s=20.0)
            with pytest.raises(TimeoutError):
                waiting.result(0.5)
        finally:
            bus.do("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        waiting.result()


@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_a_whole_life(bus: Bus, partition: int) -> None:
    desk = Desk(bus, partition=partition)
    desk.open_tok()
    desk.take_partition()
    desk.open("scheduler-1", "scheduler-2")
    request = desk.request(n=2, idem="digest", resume_ms=1_000)
    assert desk.admit(request, stale=desk.request().uid).code == "OK"
    assert desk.attach(Hold(request.uid, 2, 1_000, "digest")) == 1
    [entry] = desk.read_in()
    assert desk.tok_done(request, entry) is Gate.OK
    jobs = [Job(work) for work in desk.read_sched()]
    assert [desk.start(job.entry).code for job in jobs] == ["OK", "OK"]
    desk.generate(jobs[0], 2, "stop")

    watch = PeerWatch(
        bus, desk.keys, partition, SCHEDULERS, me="scheduler-2", lease_ms=LEASE_MS, steadiness=Steady()
    )
    bus.run(leases.retire(desk.keys, partition, "scheduler-1", drained=False))
    [moved] = watch.scan(desk.sched)
    assert desk.start(moved, "scheduler-2").code == "OK"
    desk.generate(jobs[1], 1, worker="scheduler-2")

    ends = [desk.finished(request.uid, 0, 2, n=2, text="ab", finish="stop")]
    assert desk.pub([Text(request.uid, 1, 1, 0, "x")], ends).code == "OK"
    assert desk.cancel(request.uid) == "FLAGGED"
    assert desk.tick("scheduler-2").cancel == {request.uid}
    desk.generate(jobs[1], 0, error="cancelled", worker="scheduler-2")
    desk.pub(finished=[desk.finished(request.uid, 1, 2, error="cancelled", message="Gone.")])
    assert [e.end for e in desk.out(request.uid)] == ["", "", "", "error"]
    desk.assert_empty()

    late = desk.queued()
    desk.overdue(late.uid)
    assert desk.expire(late.uid) == "ENDED"
    [stale] = desk.read_in()
    assert desk.tok_end(late, stale, OutEntry("", answer="{}", end="done")) is Gate.ENDED
    dropped = desk.waiting()
    [work] = desk.read_sched("scheduler-2")
    desk.cancel(dropped.uid)
    assert desk.drop(work) == 1
    bus.run(leases.release_partition(desk.keys, partition, "detokenizer-1"))
    desk.assert_empty()

    limits = {"requests_per_minute": 9, "tokens_per_minute": 90}
    charge = rates.charge(desk.keys, f"key-{partition}", late.uid, tokens=5, ttl_ms=1_000, **limits)
    assert bus.run(charge).tokens.left == 85
    assert bus.run(rates.settle(desk.keys, f"key-{partition}", late.uid, tokens=7))


def test_readers_stay_within_a_slot(cluster: EmbeddedRedis, bus: Bus) -> None:
    desks = [Desk(bus, partition=p) for p in range(PARTITIONS)]
    rings: list[str] = []
    bells = [Bell(cluster.url, [desk.work_in, desk.sched], rings.append, name="bell") for desk in desks]
    streams = {stream for desk in desks for stream in (desk.work_in, desk.sched)}
    for bell in bells:
        bell.start()
    until(lambda: set(rings) == streams, "every bell listens")

    async def main() -> None:
        asynchronous = AsyncBus(cluster.url, name="api")
        replies = Replies(asynchronous, Keys(), PARTITIONS, name="api")
        replies.start()
        requests = [desk.waiting() for desk in desks for _ in range(3)]
        subs = [replies.subscribe(request.uid) for request in requests]
        async with asyncio.timeout(10):
            assert [[e.accepted for e in await sub.next(5.0)] for sub in subs] == [[3]] * len(subs)
        registry.announce(bus, Keys(), worker="w", role="api", model="", draining=False, stats={})
        view = registry.Registry(asynchronous, Keys())
        await view.poll()
        assert [worker.id for worker in view.view.workers] == ["w"]
        await replies.stop()
        await asynchronous.close()

    rings.clear()
    asyncio.run(main())
    until(lambda: set(rings) == streams, "every bell rings for every stream")
    for bell in bells:
        bell.stop()
    for desk in desks:
        bus.do("XADD", desk.sched, "*", "uid", "last")  # ends their reads
