"""Lease: the thread that keeps a worker alive, and what stops it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.bus import leases, registry
from common.bus.client import Bus, BusDownError
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys
from common.bus.leases import Lease, Progress
from tests.helpers.bus import Desk
from tests.helpers.redis_state import contents
from tests.helpers.servers import BOTH, binary_of
from tests.helpers.waiting import until

KEYS = Keys()
TTL_MS = 200
PARTITIONS = 2

Make = Callable[..., Lease]


def _make(
    url: str,
    worker: str = "w1",
    progress: Progress | None = None,
    stats: Callable[[], dict[str, Any]] = lambda: {"rows": 3},
    ttl_ms: int = TTL_MS,
) -> Lease:
    return Lease(
        url,
        KEYS,
        worker=worker,
        role=registry.DETOKENIZER,
        model="m",
        partitions=PARTITIONS,
        ttl_ms=ttl_ms,
        progress=progress or Progress(),
        stats=stats,
    )


@pytest.fixture
def make(server: EmbeddedRedis, bus: Bus) -> Iterator[Make]:
    opened: list[Lease] = []

    def lease(*args: Any, **options: Any) -> Lease:
        opened.append(_make(server.url, *args, **options))
        return opened[-1]

    yield lease
    for made in opened:
        made.close(drained=False)


def _lease(bus: Bus, worker: str = "w1", partition: int = 0) -> dict[bytes, bytes]:
    flat = bus.do("HGETALL", KEYS.lease(partition, worker))
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _expiry(bus: Bus, worker: str = "w1", partition: int = 0) -> int:
    return int(_lease(bus, worker, partition)[b"expiry"])


def _moves(bus: Bus, worker: str = "w1") -> None:
    """Waits until the lease was renewed on every partition, twice."""
    for _ in range(2):
        before = [_expiry(bus, worker, p) for p in range(PARTITIONS)]
        until(
            lambda was=before: all(_expiry(bus, worker, p) > was[p] for p in range(PARTITIONS)),
            "renewed", every=0.01,
        )  # fmt: skip


def test_a_lease_is_renewed_and_announced(make: Make, bus: Bus) -> None:
    lease = make()
    lease.open()
    _moves(bus)
    assert not lease.fenced.is_set()
    assert not bus.do("EXISTS", KEYS.worker("w1")), "it does not take work yet"
    lease.announce()
    assert b'"rows":3' in bus.do("GET", KEYS.worker("w1"))
    bus.do("DEL", KEYS.worker("w1"))
    until(lambda: bus.do("EXISTS", KEYS.worker("w1")), "the thread repeats the announcement")
    lease.close(drained=True)
    for partition in range(PARTITIONS):
        assert (_lease(bus, partition=partition)[b"dead"], _lease(bus)[b"drained"]) == (b"1", b"1")
    assert bus.do("EXISTS", KEYS.worker("w1")) == bus.do("SISMEMBER", KEYS.workers(), "w1") == 0
    still = contents(bus)
    time.sleep(TTL_MS / 1000)
    assert contents(bus) == still, "a closed lease writes nothing"


@pytest.mark.parametrize("how", ["marked dead", "marked dead on one partition", "flushed"])
def test_a_worker_that_was_declared_dead_is_fenced(make: Make, bus: Bus, how: str) -> None:
    lease = make()
    lease.open()
    if how == "flushed":
        bus.do("FLUSHALL")
    elif how == "marked dead":
        leases.mark_dead(bus, KEYS, PARTITIONS, "w1")
    else:
        bus.run(leases.retire(KEYS, 1, "w1", drained=False))
    assert lease.fenced.wait(5)


def test_a_wedged_loop_stops_the_renewal_and_a_beat_resumes_it(make: Make, bus: Bus) -> None:
    now = [0.0]
    progress = Progress(hang_s=5.0, clock=lambda: now[0])
    progress.beat("engine")
    progress.beat("emit-0")
    lease = make(progress=progress)
    lease.open()
    _moves(bus)
    now[0] = 4.0
    progress.beat("emit-0")
    now[0] = 6.0
    assert progress.wedged() == ["engine"]
    time.sleep(TTL_MS / 1000)
    stopped = _expiry(bus)
    time.sleep(TTL_MS / 1000)
    assert _expiry(bus) == stopped
    assert not lease.fenced.is_set()
    progress.beat("engine")
    _moves(bus)
    progress.end("engine")
    progress.end("emit-0")
    now[0] = 60.0
    _moves(bus)


def test_a_worker_that_was_robbed_while_it_hung_is_fenced(make: Make, bus: Bus) -> None:
    now = [0.0]
    progress = Progress(hang_s=5.0, clock=lambda: now[0])
    progress.beat("main")
    lease = make(progress=progress)
    lease.open()
    now[0] = 10.0
    time.sleep(TTL_MS / 1000)
    leases.mark_dead(bus, KEYS, PARTITIONS, "w1")
    progress.beat("main")
    assert lease.fenced.wait(5)


def test_partitions_are_kept_and_given_up(make: Make, bus: Bus) -> None:
    ttl_ms = 600  # long enough not to run out on a busy machine
    first, second = make("w1", ttl_ms=ttl_ms), make("w2", ttl_ms=ttl_ms)
    first.open()
    second.open()
    assert (first.take(0).epoch, second.take(0).epoch, second.take(1).epoch) == (1, 0, 1)
    time.sleep(1.5 * ttl_ms / 1000)
    assert second.take(0).epoch == 0, "the thread keeps it"
    first.give_up(0)
    assert second.take(0).epoch == 2
    time.sleep(ttl_ms / 2000)  # a renewal or two
    assert not first.fenced.is_set(), "to give a partition up is not to be robbed of it"
    second.close(drained=True)
    assert (first.take(0).epoch, first.take(1).epoch) == (3, 2)


def test_who_loses_a_partition_is_fenced(make: Make, bus: Bus) -> None:
    first, second = make("w1"), make("w2")
    first.open()
    first.take(0)
    second.open()
    bus.do("HSET", KEYS.detok_lease(0), "owner", "w2")
    assert first.fenced.wait(5)


def test_a_fault_in_a_reading_kills_nobody(make: Make, bus: Bus) -> None:
    lease = make(stats=lambda: {"rows": 1 // len(broken)})
    broken = [1]
    lease.open()
    lease.announce()
    broken.clear()
    _moves(bus)
    assert not lease.fenced.is_set()


def test_no_lease_without_redis(port: int) -> None:
    lease = _make(f"redis://127.0.0.1:{port}")
    with pytest.raises(BusDownError):
        lease.open()


def test_a_full_redis_kills_nobody(make: Make, bus: Bus) -> None:
    lease = make()
    lease.open()
    lease.take(0)
    bus.do("CONFIG", "SET", "maxmemory", 1)
    try:
        _moves(bus)
        owned = int(bus.do("HGET", KEYS.detok_lease(0), "expiry"))
        until(lambda: int(bus.do("HGET", KEYS.detok_lease(0), "expiry")) > owned, "the partition is kept")
    finally:
        bus.do("CONFIG", "SET", "maxmemory", 0)
    assert not lease.fenced.is_set()


@pytest.fixture(params=BOTH)
def restartable(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=binary_of(request.param), appendfsync="always") as running:
        yield running


def test_a_restart_of_redis_is_survived(restartable: EmbeddedRedis) -> None:
    bus = Bus(restartable.url, name="probe")
    lease = _make(restartable.url)
    lease.open()
    lease.take(1)
    restartable.kill()
    time.sleep(3 * TTL_MS / 1000)
    restartable.start()
    _moves(bus)
    assert not lease.fenced.is_set()
    assert lease.take(1).epoch == 1
    lease.close(drained=True)
    bus.close()


def test_a_reaped_worker_is_dead_everywhere(desk: Desk, bus: Bus) -> None:
    for partition in range(PARTITIONS):
        bus.run(leases.renew(KEYS, partition, "w1", TTL_MS, opening=True))
    registry.announce(bus, KEYS, worker="w1", role="scheduler", model="m", draining=False, stats={})
    for _ in range(2):
        leases.mark_dead(bus, KEYS, PARTITIONS, "w1")
    for partition in range(PARTITIONS):
        assert _lease(bus, partition=partition)[b"dead"] == b"1"
        assert b"drained" not in _lease(bus, partition=partition)
    assert bus.do("EXISTS", KEYS.worker("w1")) == 0
