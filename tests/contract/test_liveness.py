"""RENEW, RETIRE, OWN_PARTITION and CLAIM_DEAD: who is alive, who is fenced, who takes over."""

from __future__ import annotations

from typing import Any

import pytest

from common.bus import leases
from common.bus.client import FencedError, NoGroupError
from common.bus.keys import SCHEDULERS, TOKENIZERS
from common.bus.peers import claim_dead
from common.bus.streams import Entry
from tests.helpers.bus import LEASE_MS, Desk
from tests.helpers.redis_state import contents


def _renew(desk: Desk, worker: str, *, opening: bool = False) -> int:
    return desk.bus.run(leases.renew(desk.keys, 0, worker, LEASE_MS, opening=opening))


def _retire(desk: Desk, worker: str, *, drained: bool = False) -> None:
    desk.bus.run(leases.retire(desk.keys, 0, worker, drained=drained))


def _own(desk: Desk, worker: str, *, take: bool = True) -> tuple[int, bool]:
    held = desk.bus.run(leases.own_partition(desk.keys, 0, worker, LEASE_MS, take=take))
    return held.epoch, held.taken


def _lease(desk: Desk, worker: str) -> dict[bytes, bytes]:
    flat = desk.bus.do("HGETALL", desk.keys.lease(0, worker))
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _claim(
    desk: Desk, me: str, dead: str, *, expired_ok: bool = False, **at: Any
) -> tuple[list[Entry], bool]:
    stream, group = at.get("stream", desk.sched), at.get("group", SCHEDULERS)
    return desk.bus.run(claim_dead(desk.keys, 0, stream, group, me=me, dead=dead, expired_ok=expired_ok))


def _consumers(desk: Desk) -> set[bytes]:
    return {info[1] for info in desk.bus.do("XINFO", "CONSUMERS", desk.sched, SCHEDULERS)}


# -- RENEW and RETIRE ---------------------------------------------------------------------------------------


def test_a_lease_is_opened_once_and_renewed(desk: Desk) -> None:
    opened = _renew(desk, "w", opening=True)
    lease = _lease(desk, "w")
    assert (lease[b"owner"], lease[b"seq"], int(lease[b"expiry"])) == (b"w", b"0", opened + LEASE_MS)
    assert desk.bus.do("PTTL", desk.keys.lease(0, "w")) > LEASE_MS, "a silent worker's lease goes away"
    desk.bus.do("HSET", desk.keys.lease(0, "w"), "seq", 9)
    _renew(desk, "w", opening=True)
    assert _lease(desk, "w")[b"seq"] == b"9", "a repeated opening is no new beginning"
    desk.expire_lease("w")
    now = _renew(desk, "w")
    assert int(_lease(desk, "w")[b"expiry"]) == now + LEASE_MS


@pytest.mark.parametrize("how", ["never opened", "flushed", "dead"])
def test_no_renewal_without_a_live_lease(desk: Desk, how: str) -> None:
    if how != "never opened":
        _renew(desk, "w", opening=True)
    if how == "flushed":
        desk.bus.do("FLUSHALL")
    if how == "dead":
        _retire(desk, "w")
    before = contents(desk.bus)
    for opening in (False, True) if how == "dead" else (False,):
        with pytest.raises(FencedError):
            _renew(desk, "w", opening=opening)
    assert contents(desk.bus) == before


def test_a_drained_worker_stays_drained(desk: Desk) -> None:
    """Its supervisor reaps it afterwards, and reports a crash as far as it knows."""
    desk.open("w")
    _retire(desk, "w", drained=True)
    before = contents(desk.bus)
    _retire(desk, "w", drained=False)
    assert contents(desk.bus) == before
    assert (_lease(desk, "w")[b"dead"], _lease(desk, "w")[b"drained"]) == (b"1", b"1")
    assert desk.bus.do("PTTL", desk.keys.lease(0, "w")) > 0


def test_retiring_who_never_was_leaves_nothing(desk: Desk) -> None:
    _retire(desk, "w")
    assert contents(desk.bus) == {}


# -- OWN_PARTITION ------------------------------------------------------------------------------------------


def test_one_owner_at_a_time(desk: Desk) -> None:
    desk.open("a", "b")
    assert _own(desk, "a", take=False) == (0, False)
    assert _own(desk, "a") == (1, True)
    assert _own(desk, "a") == (1, False), "a repeat, whose first reply was lost"
    before = contents(desk.bus)
    assert _own(desk, "b") == _own(desk, "b", take=False) == (0, False)
    assert contents(desk.bus) == before


def test_a_late_owner_goes_on_until_somebody_takes_over(desk: Desk) -> None:
    desk.open("a", "b")
    _own(desk, "a")
    desk.bus.do("HSET", desk.keys.detok_lease(0), "expiry", 0)
    assert _own(desk, "a", take=False) == (1, False)
    desk.bus.do("HSET", desk.keys.detok_lease(0), "expiry", 0)
    assert _own(desk, "b", take=False) == (0, False)
    assert _own(desk, "b") == (2, True)
    assert _own(desk, "a", take=False) == (0, False)
    assert desk.bus.do("PTTL", desk.keys.detok_lease(0)) == -1


@pytest.mark.parametrize("how", ["release", "retire", "drain"])
def test_a_partition_given_up_is_free_at_once(desk: Desk, how: str) -> None:
    desk.open("a", "b")
    _own(desk, "a")
    if how == "release":
        for _ in range(2):
            desk.bus.run(leases.release_partition(desk.keys, 0, "a"))
        assert _own(desk, "a", take=False) == (0, False)
    else:
        _retire(desk, "a", drained=how == "drain")
        with pytest.raises(FencedError):
            _own(desk, "a", take=False)
    assert _own(desk, "b") == (2, True)
    desk.bus.run(leases.release_partition(desk.keys, 0, "b"))


def test_only_the_owner_releases(desk: Desk) -> None:
    desk.open("a", "b")
    _own(desk, "a")
    before = contents(desk.bus)
    desk.bus.run(leases.release_partition(desk.keys, 0, "b"))
    _retire(desk, "c")
    assert contents(desk.bus) == before


@pytest.mark.parametrize("how", ["dead", "flushed"])
def test_a_fenced_worker_owns_nothing(desk: Desk, how: str) -> None:
    desk.open("a")
    _own(desk, "a")
    if how == "dead":
        desk.bus.do("HSET", desk.keys.lease(0, "a"), "dead", 1)
    else:
        desk.bus.do("FLUSHALL")
    before = contents(desk.bus)
    with pytest.raises(FencedError):
        _own(desk, "a")
    with pytest.raises(FencedError):
        desk.bus.run(leases.release_partition(desk.keys, 0, "a"))
    assert contents(desk.bus) == before


# -- CLAIM_DEAD ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drained", [False, True])
def test_the_work_of_a_dead_worker_moves(desk: Desk, drained: bool) -> None:
    request, jobs = desk.running(n=2)
    desk.open("scheduler-2")
    _retire(desk, "scheduler-1", drained=drained)
    entries, was_dead = _claim(desk, "scheduler-2", "scheduler-1")
    assert was_dead
    assert [(e.id, e.uid, e.choice) for e in entries] == [
        (j.entry.id, request.uid, j.entry.choice) for j in jobs
    ]
    assert {(entry.claimed, entry.drained, entry.stream) for entry in entries} == {
        (True, drained, desk.sched)
    }
    rows = desk.bus.do("XPENDING", desk.sched, SCHEDULERS, "-", "+", 10)
    assert {row[1] for row in rows} == {b"scheduler-2"}

    assert _claim(desk, "scheduler-2", "scheduler-1") == ([], True)
    assert _consumers(desk) == {b"scheduler-2"}
    before = contents(desk.bus)
    assert _claim(desk, "scheduler-2", "scheduler-1") == ([], True)
    assert contents(desk.bus) == before


def test_tokenizer_jobs_move_too(desk: Desk) -> None:
    request = desk.queued()
    desk.read_in("tokenizer-1")
    desk.open("tokenizer-1", "tokenizer-2")
    _retire(desk, "tokenizer-1")
    [entry], _ = _claim(desk, "tokenizer-2", "tokenizer-1", stream=desk.work_in, group=TOKENIZERS)
    assert (entry.uid, entry.choice) == (request.uid, 0)


def test_entries_of_a_newer_version_are_taken_over_by_their_names(desk: Desk) -> None:
    """And what nobody of ours wrote is left to the search for stranded entries, which removes it."""
    request = desk.queued()
    desk.read_in("tokenizer-1")
    for fields in (("later", "x", "uid", request.uid), ("uid", request.uid, "later", "x"), ("other", "x")):
        desk.bus.do("XADD", desk.work_in, "*", *fields)
    command = "XREADGROUP", "GROUP", TOKENIZERS, "tokenizer-1", "STREAMS", desk.work_in, ">"
    desk.bus.do(*command)
    desk.open("tokenizer-1", "tokenizer-2")
    _retire(desk, "tokenizer-1")
    entries, _ = _claim(desk, "tokenizer-2", "tokenizer-1", stream=desk.work_in, group=TOKENIZERS)
    assert [(entry.uid, entry.choice) for entry in entries] == [(request.uid, 0)] * 3
    reader = desk.reader(desk.work_in, TOKENIZERS, "tokenizer-2")
    assert reader.stranded({(entry.stream, entry.id) for entry in entries}) == []
    assert desk.bus.do("XLEN", desk.work_in) == 3


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("expired_ok", [False, True])
def test_a_living_worker_keeps_its_work(desk: Desk, expired: bool, expired_ok: bool) -> None:
    desk.running()
    desk.open("scheduler-2")
    if expired:
        desk.expire_lease("scheduler-1")
    before = contents(desk.bus)
    entries, was_dead = _claim(desk, "scheduler-2", "scheduler-1", expired_ok=expired_ok)
    assert was_dead == bool(entries) == (expired and expired_ok)
    if not was_dead:
        assert contents(desk.bus) == before


def test_who_is_taken_for_dead_is_fenced_first(desk: Desk) -> None:
    _, [job] = desk.running()
    desk.open("scheduler-2")
    desk.expire_lease("scheduler-1")
    _claim(desk, "scheduler-2", "scheduler-1", expired_ok=True)
    assert _lease(desk, "scheduler-1")[b"dead"] == b"1"
    with pytest.raises(FencedError):
        desk.generate(job, 1)
    with pytest.raises(FencedError):
        _renew(desk, "scheduler-1")
    assert desk.gen(job.entry.uid) == ""


def test_who_could_not_renew_is_no_judge(desk: Desk) -> None:
    """When Redis was full or stuck, every lease ran out, also the observer's."""
    desk.running()
    desk.open("scheduler-2")
    for worker in ("scheduler-1", "scheduler-2"):
        desk.expire_lease(worker)
    before = contents(desk.bus)
    assert _claim(desk, "scheduler-2", "scheduler-1", expired_ok=True) == ([], False)
    assert contents(desk.bus) == before
    _retire(desk, "scheduler-1")
    entries, _ = _claim(desk, "scheduler-2", "scheduler-1")
    assert len(entries) == 1, "a death that somebody saw counts all the same"


def test_a_consumer_without_a_lease_is_dead(desk: Desk) -> None:
    """Somebody read with redis-cli, or the lease is an hour old."""
    desk.waiting()
    desk.read_sched("somebody")
    desk.open("scheduler-2")
    assert _claim(desk, "scheduler-2", "somebody") == ([], False)
    entries, _ = _claim(desk, "scheduler-2", "somebody", expired_ok=True)
    assert len(entries) == 1
    assert desk.bus.do("PTTL", desk.keys.lease(0, "somebody")) > 0


@pytest.mark.parametrize("how", ["dead", "flushed"])
def test_a_fenced_worker_claims_nothing(desk: Desk, how: str) -> None:
    desk.running()
    desk.open("scheduler-2")
    _retire(desk, "scheduler-1")
    if how == "dead":
        _retire(desk, "scheduler-2")
    else:
        desk.bus.do("DEL", desk.keys.lease(0, "scheduler-2"))
    before = contents(desk.bus)
    with pytest.raises(FencedError):
        _claim(desk, "scheduler-2", "scheduler-1", expired_ok=True)
    assert contents(desk.bus) == before


def test_without_a_group_nobody_is_judged(desk: Desk) -> None:
    desk.open("scheduler-1", "scheduler-2")
    desk.expire_lease("scheduler-1")
    before = contents(desk.bus)
    with pytest.raises(NoGroupError):
        _claim(desk, "scheduler-2", "scheduler-1", expired_ok=True)
    assert contents(desk.bus) == before


def test_entries_that_are_gone_do_not_come_back(desk: Desk) -> None:
    _, jobs = desk.running(n=3)
    desk.open("scheduler-2")
    _retire(desk, "scheduler-1")
    desk.bus.do("XDEL", desk.sched, jobs[1].entry.id)
    entries, _ = _claim(desk, "scheduler-2", "scheduler-1")
    assert [entry.choice for entry in entries] == [0, 2]
    assert desk.pending(desk.sched, SCHEDULERS) == 2
    assert _claim(desk, "scheduler-2", "scheduler-1") == ([], True)


def test_much_work_moves_in_parts(desk: Desk) -> None:
    desk.running(n=250)
    desk.open("scheduler-2")
    _retire(desk, "scheduler-1")
    parts = [len(_claim(desk, "scheduler-2", "scheduler-1")[0]) for _ in range(4)]
    assert parts == [100, 100, 50, 0]


def test_what_a_zombie_reads_late_moves_as_well(desk: Desk) -> None:
    desk.running()
    desk.open("scheduler-2")
    _retire(desk, "scheduler-1")
    for _ in range(2):
        _claim(desk, "scheduler-2", "scheduler-1")
    desk.waiting()
    [late] = desk.read_sched("scheduler-1")
    with pytest.raises(FencedError):
        desk.start(late, "scheduler-1")
    [moved], _ = _claim(desk, "scheduler-2", "scheduler-1")
    assert moved.id == late.id
    assert desk.start(moved, "scheduler-2").attempts == 0, "it had never begun"
