"""PeerWatch: who is taken for dead, and when; a clock of its own, so that nothing here waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.bus import leases
from common.bus.client import Bus, FencedError
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import SCHEDULERS
from common.bus.peers import OBSERVE_S, PeerWatch
from common.bus.steadiness import Steadiness
from common.errors import MillstreamError
from tests.helpers.bus import LEASE_MS, Desk, Steady
from tests.helpers.servers import BOTH, binary_of

LEASE_S = LEASE_MS / 1000


class Watcher:
    """One observer on a hand-driven clock."""

    def __init__(self, desk: Desk, me: str = "scheduler-2", steadiness: Steadiness | None = None) -> None:
        self.now = 100.0
        self.desk = desk
        desk.open(me)
        desk.reader(desk.sched, SCHEDULERS, me)
        self.watch = PeerWatch(
            desk.bus, desk.keys, 0, SCHEDULERS, me=me, lease_ms=LEASE_MS, steadiness=steadiness or Steady(),
            clock=lambda: self.now,
        )  # fmt: skip

    def scan(self, after: float = 0.0) -> list[tuple[str, int]]:
        self.now += after
        return [(entry.uid, entry.choice) for entry in self.watch.scan(self.desk.sched)]

    def settle(self) -> None:
        """A first look, and the time after which it may judge (the server has just begun)."""
        self.scan()
        self.now += LEASE_S


@pytest.fixture
def watcher(desk: Desk) -> Watcher:
    made = Watcher(desk)
    made.settle()
    return made


def test_an_expired_lease_must_be_seen_twice(desk: Desk, watcher: Watcher) -> None:
    request, _ = desk.running(n=2)
    desk.expire_lease("scheduler-1")
    assert watcher.scan() == []
    assert watcher.scan(OBSERVE_S * 0.9) == []
    assert watcher.scan(OBSERVE_S * 0.2) == [(request.uid, 0), (request.uid, 1)]
    assert watcher.scan(1.0) == []
    assert len(desk.bus.do("XINFO", "CONSUMERS", desk.sched, SCHEDULERS)) == 1


def test_a_lease_that_comes_back_begins_anew(desk: Desk, watcher: Watcher) -> None:
    desk.running()
    desk.expire_lease("scheduler-1")
    assert watcher.scan() == []
    desk.bus.run(leases.renew(desk.keys, 0, "scheduler-1", LEASE_MS))
    assert watcher.scan(OBSERVE_S) == []
    desk.expire_lease("scheduler-1")
    assert watcher.scan(OBSERVE_S) == []
    assert len(watcher.scan(OBSERVE_S)) == 1


def test_a_renewal_at_the_last_moment_counts(
    desk: Desk, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the second look and the claim: the script looks again."""
    desk.running()
    desk.expire_lease("scheduler-1")
    watcher.scan()
    run = desk.bus.run

    def late(call):
        if call.script == "claim_dead":
            run(leases.renew(desk.keys, 0, "scheduler-1", LEASE_MS))
        return run(call)

    monkeypatch.setattr(desk.bus, "run", late)
    assert watcher.scan(OBSERVE_S) == []
    run(leases.renew(desk.keys, 0, "scheduler-1", LEASE_MS))


def test_who_was_marked_dead_is_dead_at_once(desk: Desk) -> None:
    request, _ = desk.running()
    desk.bus.run(leases.retire(desk.keys, 0, "scheduler-1", drained=False))
    assert Watcher(desk).scan() == [(request.uid, 0)], "even by an observer that has just begun"


def test_a_living_peer_is_never_robbed(desk: Desk, watcher: Watcher) -> None:
    """However long its entries are pending, and however long it reads nothing."""
    desk.running()
    for _ in range(50):
        desk.bus.run(leases.renew(desk.keys, 0, "scheduler-1", LEASE_MS))
        assert watcher.scan(60.0) == []


def test_oneself_is_not_a_peer(desk: Desk, watcher: Watcher) -> None:
    desk.running(worker="scheduler-2")
    desk.expire_lease("scheduler-2")
    assert [watcher.scan(OBSERVE_S) for _ in range(5)] == [[]] * 5


def test_without_a_stream_there_is_nobody(desk: Desk, watcher: Watcher) -> None:
    desk.bus.do("DEL", desk.sched)
    assert watcher.scan(OBSERVE_S) == []


def test_a_fenced_observer_is_told(desk: Desk, watcher: Watcher) -> None:
    desk.running()
    for worker in ("scheduler-1", "scheduler-2"):
        desk.bus.run(leases.retire(desk.keys, 0, worker, drained=False))
    with pytest.raises(FencedError):
        watcher.scan()


def test_more_than_one_page_is_taken(desk: Desk, watcher: Watcher) -> None:
    desk.running(n=150)
    desk.expire_lease("scheduler-1")
    watcher.scan()
    taken = watcher.scan(OBSERVE_S)
    assert sorted(choice for _, choice in taken) == list(range(150))


def test_who_could_not_renew_its_own_lease_is_no_judge(desk: Desk) -> None:
    """A Redis that hung for a while answers again: whoever looks first finds everybody's lease expired."""
    watcher = Watcher(desk, steadiness=Steadiness(LEASE_MS, clock=lambda: watcher.now))
    desk.running()

    def looks(seconds: float, *, renewing: bool) -> list[list[tuple[str, int]]]:
        found = []
        for _ in range(round(seconds * 4 / LEASE_S)):
            if renewing:
                watcher.watch._steadiness.renewed()
            found.append(watcher.scan(LEASE_S / 4))
        return [entries for entries in found if entries]

    assert looks(2 * LEASE_S, renewing=True) == []
    desk.expire_lease("scheduler-1")
    assert looks(2 * LEASE_S, renewing=False) == []
    assert looks(LEASE_S, renewing=True) == [], "a full lease from its own first renewal"
    assert len(looks(LEASE_S + OBSERVE_S, renewing=True)) == 1, "it is dead, after all"


@pytest.fixture(params=BOTH)
def restartable(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=binary_of(request.param), appendfsync="always") as running:
        yield running


def test_an_observer_on_a_young_server_waits_a_lease(restartable: EmbeddedRedis) -> None:
    """All leases ran out while Redis was away; whoever begins now has seen nobody renew yet."""
    bus = Bus(restartable.url, name="test")
    desk = Desk(bus)
    desk.running()
    desk.expire_lease("scheduler-1")
    watcher = Watcher(desk)
    desk.bus.run(leases.renew(desk.keys, 0, "scheduler-2", 60_000))
    assert watcher.scan() == []
    assert watcher.scan(LEASE_S * 0.9) == []
    assert watcher.scan(LEASE_S * 0.2) == []
    assert len(watcher.scan(OBSERVE_S)) == 1
    bus.close()


def test_a_server_that_was_away_makes_nobody_dead(restartable: EmbeddedRedis) -> None:
    bus = Bus(restartable.url, name="test", timeout_s=1.0, retries=0)
    desk = Desk(bus)
    watcher = Watcher(desk)
    watcher.settle()
    desk.running()
    desk.expire_lease("scheduler-1")
    assert watcher.scan() == []
    restartable.kill()
    with pytest.raises(MillstreamError):
        watcher.scan(OBSERVE_S)
    restartable.start()
    desk.bus.run(leases.renew(desk.keys, 0, "scheduler-2", 60_000))
    assert watcher.scan(OBSERVE_S) == []
    assert watcher.scan(LEASE_S - 2 * OBSERVE_S) == [], "a full lease from the first look at the new server"
    assert watcher.scan(2 * OBSERVE_S) == []
    assert len(watcher.scan(OBSERVE_S)) == 1
    bus.close()


def test_a_restart_that_was_not_seen_is_noticed(restartable: EmbeddedRedis) -> None:
    """No command failed, but the server is another: its run id says so."""
    bus = Bus(restartable.url, name="test")
    desk = Desk(bus)
    watcher = Watcher(desk)
    watcher.settle()
    desk.running()
    desk.expire_lease("scheduler-1")
    watcher.scan()
    restartable.kill()
    restartable.start()
    desk.bus.run(leases.renew(desk.keys, 0, "scheduler-2", 60_000))
    assert watcher.scan(OBSERVE_S) == []
    assert watcher.scan(LEASE_S) == []
    assert len(watcher.scan(OBSERVE_S)) == 1
    bus.close()
