"""Detokenizers share the partitions with peers that are there, and with no others."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.bus import registry
from common.bus.client import Bus
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys
from common.bus.leases import Lease, Progress, mark_dead, own_partition, renew
from common.bus.peers import OBSERVE_S
from tests.helpers.text import bundled_codec
from tests.helpers.waiting import until
from workers.detokenizer.choices import Choices
from workers.detokenizer.worker import DetokenizerWorker
from workers.text.stream import TextStreams

KEYS = Keys()
PARTITIONS = 2
LEASE_MS = 400
PEER = "detokenizer-peer"


@contextmanager
def detokenizer(bus: Bus, name: str, lease_ms: int = LEASE_MS) -> Iterator[tuple[DetokenizerWorker, Lease]]:
    """A detokenizer whose loop the test turns."""
    progress = Progress()
    lease = Lease(
        bus.url, KEYS, worker=name, role=registry.DETOKENIZER, model="m", partitions=PARTITIONS,
        ttl_ms=lease_ms, progress=progress, stats=dict,
    )  # fmt: skip
    streams = TextStreams(bundled_codec())
    made = DetokenizerWorker(
        bus, KEYS, lease, lambda: lambda _: Choices(bus, KEYS, streams), partitions=PARTITIONS, ttl_ms=60_000,
        progress=progress,
    )  # fmt: skip
    lease.open()
    made.startup()
    lease.announce()
    yield made, lease
    made.shutdown()
    lease.close(drained=True)


@pytest.fixture
def pair(bus: Bus) -> Iterator[tuple[DetokenizerWorker, Lease]]:
    with detokenizer(bus, "detokenizer-me") as pair:
        yield pair


@pytest.fixture
def worker(pair: tuple[DetokenizerWorker, Lease]) -> DetokenizerWorker:
    return pair[0]


def peer_comes(bus: Bus, lease_ms: int) -> None:
    """A peer that announces itself, and renews its lease once."""
    for partition in range(PARTITIONS):
        bus.run(renew(KEYS, partition, PEER, lease_ms, opening=True))
    registry.announce(bus, KEYS, worker=PEER, role=registry.DETOKENIZER, model="m", draining=False, stats={})


def held(worker: DetokenizerWorker) -> int:
    return len(worker.stats()["partitions"])


def turn(worker: DetokenizerWorker, wanted: int) -> bool:
    worker.step()
    return held(worker) == wanted


def test_a_live_peer_gets_its_share(bus: Bus, worker: DetokenizerWorker) -> None:
    until(lambda: turn(worker, PARTITIONS), "all partitions, alone", every=0)
    peer_comes(bus, 60_000)
    until(lambda: turn(worker, PARTITIONS - 1), "one given up", every=0)


@pytest.mark.parametrize("reported", [True, False], ids=["reported dead", "silent"])
def test_nothing_is_given_up_for_a_peer_that_died(
    bus: Bus, worker: DetokenizerWorker, reported: bool
) -> None:
    """What announced it stays for seconds, in which the partition would be down every other moment."""
    until(lambda: turn(worker, PARTITIONS), "all partitions, alone", every=0)
    peer_comes(bus, 60_000 if reported else 1)
    if reported:
        mark_dead(bus, KEYS, PARTITIONS, PEER)
        bus.do("SET", KEYS.worker(PEER), "{}", "PX", registry.WORKER_TTL_MS)  # its last sign of life, late
        bus.do("SADD", KEYS.workers(), PEER)
    time.sleep(0.01)
    epochs = [bus.do("HGET", KEYS.detok_lease(p), "epoch") for p in range(PARTITIONS)]
    for _ in range(6):
        worker.step()
        assert held(worker) == PARTITIONS
    assert [bus.do("HGET", KEYS.detok_lease(p), "epoch") for p in range(PARTITIONS)] == epochs


def seconds_of(worker: DetokenizerWorker) -> float:
    start = time.monotonic()
    worker.step()
    return time.monotonic() - start


@pytest.mark.parametrize("drains", [False, True], ids=["has too many", "drains"])
def test_whoever_waits_for_a_partition_looks_often(
    bus: Bus, pair: tuple[DetokenizerWorker, Lease], drains: bool
) -> None:
    """Nothing of the partition is decoded between its two owners."""
    worker, lease = pair
    until(lambda: turn(worker, PARTITIONS), "all partitions, alone", every=0)
    with detokenizer(bus, "detokenizer-peer") as (peer, _):
        if drains:
            until(lambda: turn(worker, PARTITIONS - 1), "one given up", every=0)
            until(lambda: turn(peer, 1), "one taken", every=0)
            lease.draining = True
            lease.announce()
        peer.step()
        assert seconds_of(peer) < 0.1
        if drains:
            worker.begin_drain()
        until(lambda: turn(worker, 0 if drains else 1), "given up", every=0)
        until(lambda: turn(peer, PARTITIONS if drains else 1), "taken", every=0)
        assert not peer._expecting


def test_an_idle_partition_is_given_up_at_once(bus: Bus, worker: DetokenizerWorker) -> None:
    """Its read waits for news, which may be long in coming: nobody is to wait for that."""
    until(lambda: turn(worker, PARTITIONS), "all partitions, alone", every=0)
    time.sleep(0.1)  # the reads wait now
    worker.begin_drain()
    begun = time.monotonic()
    until(lambda: turn(worker, 0), "all are given up", every=0)
    assert time.monotonic() - begun < 0.5
    assert {bus.do("HGET", KEYS.detok_lease(number), "owner") for number in range(PARTITIONS)} == {b""}


def test_a_redis_that_hung_costs_nobody_a_partition(server: EmbeddedRedis, bus: Bus) -> None:
    """All leases are over when it answers again; whoever is first to ask must not think the others dead."""
    lease_s = 1.0
    with detokenizer(bus, "detokenizer-me", int(lease_s * 1000)) as (worker, _):
        until(lambda: turn(worker, PARTITIONS), "all partitions, alone", every=0)
        peer_comes(bus, 60_000)
        until(lambda: turn(worker, 1), "one given up", every=0)
        [free] = set(range(PARTITIONS)) - set(worker.stats()["partitions"])
        assert bus.run(own_partition(KEYS, free, PEER, 100, take=True)).epoch
        server.signal(signal.SIGSTOP)
        time.sleep(1.5 * lease_s)
        server.signal(signal.SIGCONT)
        back, now = time.monotonic(), 0.0
        while now < back + lease_s + OBSERVE_S * 0.8:
            worker.step()
            now = time.monotonic()
            assert held(worker) == 1 or now > back + lease_s + OBSERVE_S
        until(lambda: turn(worker, PARTITIONS), "it is taken from a peer that is really dead", every=0)
