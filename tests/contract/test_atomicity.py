"""Every script, whatever is wrong around it: all or nothing, and a second time nothing (B2).

Each case is one script call on a state in which it would change much. It then meets keys of a wrong type,
a Redis that is full, one that was flushed, and its own repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from common.bus import handoffs, leases, rates
from common.bus.admission import admit
from common.bus.client import Bus, BusFullError, FencedError, NoGroupError
from common.bus.handoffs import Step, Text
from common.bus.holding import Hold, attach
from common.bus.keys import SCHEDULERS, TOKENIZERS
from common.bus.peers import claim_dead
from common.bus.scripts import Call
from common.errors import MillstreamError
from common.messages import OutEntry
from tests.helpers.bus import LEASE_MS, TTL_MS, Desk
from tests.helpers.redis_state import contents, copy_of, put_back, timeless

Case = Callable[[Desk], Call[Any]]


def _admit(desk: Desk) -> Call[Any]:
    desk.queued()
    desk.reader(desk.sched, SCHEDULERS, "scheduler-1")
    request = desk.request(idem="digest", digest="body", resume_ms=1_000)
    return admit(desk.keys, request, desk.limits(), stale=desk.request().uid)


def _tok_done(desk: Desk) -> Call[Any]:
    request = desk.queued(n=2)
    [entry] = desk.read_in()
    return handoffs.tok_done(desk.keys, request, entry.id, ((1, 2),), TTL_MS, echo="[]")


def _tok_end(desk: Desk) -> Call[Any]:
    request = desk.queued()
    [entry] = desk.read_in()
    end = OutEntry("", end="error", error="crashed", message="No.")
    return handoffs.tok_end(
        desk.keys, request, entry.id, end, ttl_ms=TTL_MS, worker="tokenizer-1", dead_reason="3 crashes"
    )


def _attempt(desk: Desk) -> Call[Any]:
    return handoffs.attempt(desk.keys, desk.queued().uid, "tokenizer-2")


def _start(desk: Desk) -> Call[Any]:
    _, [job] = desk.running()
    desk.generate(job, 1)
    desk.open("scheduler-2")
    return desk.start_call(job.entry, "scheduler-2", owner="scheduler-1")


def _start_alone(desk: Desk) -> Call[Any]:
    _, [job] = desk.running()
    desk.bus.run(leases.retire(desk.keys, desk.partition, "scheduler-1", drained=False))
    desk.open("scheduler-2")
    assert desk.start(job.entry, "scheduler-2").attempts == 1
    return desk.start_call(job.entry, "scheduler-2", alone=True)


def _emit(desk: Desk) -> Call[Any]:
    request, (first, second) = desk.running(n=2)
    desk.generate(first, 1)
    desk.bus.do("SADD", desk.keys.cancel(0), f"{request.uid}/0")
    desk.open_tok()
    desk.take_partition()
    desk.pub(finished=[desk.finished(request.uid, 1, 2, error="internal", message="No.")])
    rows = (desk.row(first, 5, "stop"), desk.row(second, 6, "stop"))
    ends = (desk.end(first, "bad"), desk.end(second))
    return desk.emit_call(Step(rows, ends, ((request.uid, 0, 3),)), 2)


def _drop(desk: Desk) -> Call[Any]:
    request = desk.waiting()
    [entry] = desk.read_sched()
    desk.cancel(request.uid)
    desk.bus.do("SADD", desk.keys.cancel(0), f"{request.uid}/0")
    return handoffs.drop(
        desk.keys, entry.uid, 0,
        stream=entry.stream, group=SCHEDULERS, entry=entry.id, model=desk.model, cls=desk.cls,
    )  # fmt: skip


def _pub(desk: Desk) -> Call[Any]:
    desk.open_tok()
    desk.take_partition()
    ending, [first] = desk.running()
    halted, (second, _) = desk.running(n=2)
    failed, [third] = desk.running()
    desk.generate(first, 1, "stop")
    desk.generate(second, 1)
    desk.generate(third, 1)
    ends = [
        desk.finished(ending.uid, n=1, text="x", finish="stop"),
        desk.finished(halted.uid, 0, 2, n=1, text="y", finish="stop", halt=True, logprobs="{}"),
        desk.finished(failed.uid, error="internal", message="No."),
    ]
    return desk.pub_call([Text(halted.uid, 1, 1, 0, "z", "{}", "{}")], ends)


def _cancel(desk: Desk) -> Call[Any]:
    uid = desk.waiting(n=2).uid
    return handoffs.cancel(
        desk.keys, uid, model=desk.model, cls=desk.cls, ttl_ms=TTL_MS, error="cancelled", message="Gone."
    )


def _cancel_running(desk: Desk) -> Call[Any]:
    uid = desk.running()[0].uid
    return handoffs.cancel(
        desk.keys, uid, model=desk.model, cls=desk.cls, ttl_ms=TTL_MS, error="cancelled", message="Gone."
    )


def _cancel_abandoned(desk: Desk) -> Call[Any]:
    request = desk.request(resume_ms=60_000)
    desk.admit(request)
    desk.bus.do("HSET", desk.keys.req(request.uid), "attached_until", 1)
    return handoffs.cancel(
        desk.keys, request.uid, model=desk.model, cls=desk.cls, ttl_ms=TTL_MS, error="cancelled",
        message="Gone.", abandoned=True,
    )  # fmt: skip


def _attach(desk: Desk) -> Call[Any]:
    running = desk.running(n=2)[0].uid
    held = desk.request(idem="digest", resume_ms=1_000)
    desk.admit(held)
    return attach(desk.keys, (Hold(running, 2), Hold(held.uid, 1, 5_000, "digest")), 3 * TTL_MS)


def _expire_call(desk: Desk, uid: str, owner: str) -> Call[Any]:
    desk.overdue(uid)
    return handoffs.expire(
        desk.keys, uid, model=desk.model, cls=desk.cls, owner=owner, ttl_ms=TTL_MS, lost_ms=LEASE_MS
    )


def _expire_waiting(desk: Desk) -> Call[Any]:
    return _expire_call(desk, desk.waiting().uid, "")


def _expire_owned(desk: Desk) -> Call[Any]:
    return _expire_call(desk, desk.running()[0].uid, "scheduler-1")


def _expire_orphan(desk: Desk) -> Call[Any]:
    uid = desk.running()[0].uid
    desk.bus.do("DEL", desk.keys.lease(0, "scheduler-1"))
    return _expire_call(desk, uid, "scheduler-1")


def _open(desk: Desk) -> Call[Any]:
    return leases.renew(desk.keys, desk.partition, "worker-1", LEASE_MS, opening=True)


def _renew(desk: Desk) -> Call[Any]:
    desk.open("worker-1")
    desk.expire_lease("worker-1")
    return leases.renew(desk.keys, desk.partition, "worker-1", LEASE_MS)


def _retire(desk: Desk) -> Call[Any]:
    desk.take_partition()
    return leases.retire(desk.keys, desk.partition, "detokenizer-1", drained=True)


def _claim_dead(desk: Desk) -> Call[Any]:
    desk.running(n=2)
    desk.open("scheduler-2")
    desk.expire_lease("scheduler-1")
    return claim_dead(
        desk.keys, 0, desk.sched, SCHEDULERS, me="scheduler-2", dead="scheduler-1", expired_ok=True
    )


def _take(desk: Desk) -> Call[Any]:
    desk.open("detokenizer-1")
    return leases.own_partition(desk.keys, 0, "detokenizer-1", LEASE_MS, take=True)


def _keep(desk: Desk) -> Call[Any]:
    desk.take_partition()
    desk.bus.do("HSET", desk.keys.detok_lease(0), "expiry", 0)
    return leases.own_partition(desk.keys, 0, "detokenizer-1", LEASE_MS, take=False)


def _release(desk: Desk) -> Call[Any]:
    desk.take_partition()
    return leases.release_partition(desk.keys, 0, "detokenizer-1")


def _charge(desk: Desk) -> Call[Any]:
    desk.bus.run(_charging(desk, desk.request().uid))
    return _charging(desk, desk.request().uid)


def _charging(desk: Desk, uid: str) -> Call[Any]:
    limits = {"requests_per_minute": 9, "tokens_per_minute": 90}
    return rates.charge(desk.keys, "key-1", uid, tokens=5, ttl_ms=TTL_MS, **limits)


def _settle(desk: Desk) -> Call[Any]:
    uid = desk.request().uid
    desk.bus.run(_charging(desk, uid))
    return rates.settle(desk.keys, "key-1", uid, tokens=7)


CASES: list[Case] = [
    _admit, _tok_done, _tok_end, _attempt, _start, _start_alone, _emit, _drop, _pub, _cancel, _cancel_running,
    _cancel_abandoned, _attach, _expire_waiting, _expire_owned, _expire_orphan,
    _open, _renew, _retire, _claim_dead, _take, _keep, _release, _charge, _settle,
]  # fmt: skip
#: Go through even when Redis is full: they free memory, or keep the living from looking dead.
WHEN_FULL: list[Case] = [_tok_done, _tok_end, _drop, _pub, _attach, _open, _renew, _retire, _keep, _release]
#: A second call moves a time on, and nothing else.
RENEWING: list[Case] = [_open, _renew, _take, _keep, _attach, _expire_owned]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))


@every_case
def test_a_case_changes_something(desk: Desk, case: Case) -> None:
    call = case(desk)
    before = contents(desk.bus)
    desk.bus.run(call)
    assert contents(desk.bus) != before


@every_case
def test_a_repeat_changes_nothing(desk: Desk, case: Case) -> None:
    call = case(desk)
    desk.bus.run(call)
    before = contents(desk.bus)
    for _ in range(2):
        desk.bus.run(call)
    after = contents(desk.bus)
    if case in RENEWING:
        before, after = timeless(before), timeless(after)
    if case is _claim_dead:  # the dead worker's name is given up once nothing is pending under it
        after = {key: value for key, value in after.items() if key != desk.sched.encode()}
        before = {key: value for key, value in before.items() if key != desk.sched.encode()}
    assert after == before


@every_case
def test_a_key_of_a_wrong_type(desk: Desk, case: Case) -> None:
    """Whichever key it is: the call fails and changes nothing, or it never needed that key."""
    call = case(desk)
    whole = copy_of(desk.bus)
    for key in dict.fromkeys(call.keys):
        put_back(desk.bus, whole)
        desk.bus.do("DEL", key)
        desk.bus.do("RPUSH", key, "not what it should be")
        broken = contents(desk.bus)
        try:
            desk.bus.run(call)
        except MillstreamError:
            assert contents(desk.bus) == broken, key
        else:
            ours = key.encode()
            if case is _tok_done and key.rpartition(":")[0].endswith(call.args[2]):
                continue  # a token log begins anew, whatever was there
            assert contents(desk.bus).get(ours, broken[ours])[0] == broken[ours][0], key


@every_case
def test_a_full_redis(desk: Desk, case: Case) -> None:
    call = case(desk)
    whole = copy_of(desk.bus)
    before = contents(desk.bus)
    desk.bus.do("CONFIG", "SET", "maxmemory", 1)
    try:
        desk.bus.run(call)
        through = True
    except BusFullError:
        through = False
    finally:
        desk.bus.do("CONFIG", "SET", "maxmemory", 0)
    assert through == (case in WHEN_FULL)
    after = contents(desk.bus)
    if not through:
        assert after == before
    put_back(desk.bus, whole)
    desk.bus.run(call)
    if through:
        assert timeless(contents(desk.bus)) == timeless(after)
    assert contents(desk.bus) != before


@every_case
def test_after_a_flush(desk: Desk, case: Case) -> None:
    """Nothing of what was lost comes back by halves."""
    call = case(desk)
    desk.bus.do("FLUSHALL")
    if case in (_admit, _open, _charge):
        desk.bus.run(call)
        return
    with contextlib.suppress(FencedError, NoGroupError):
        desk.bus.run(call)
    assert contents(desk.bus) == {}


@every_case
def test_everything_about_a_request_has_a_time_to_live(desk: Desk, case: Case) -> None:
    desk.bus.run(case(desk))
    lasting = {key for key, (_, ttl) in contents(desk.bus).items() if not ttl}
    shared = (
        desk.work_in, desk.sched, desk.inflight, desk.bytes, desk.tok,
        desk.keys.cancel(0), desk.keys.dead(0), desk.keys.detok_lease(0),
    )  # fmt: skip
    assert lasting <= {key.encode() for key in shared}


@every_case
def test_all_keys_are_of_one_slot(desk: Desk, case: Case) -> None:
    call = case(desk)
    home = desk.keys.rate("key-1") if case in (_charge, _settle) else desk.keys.base(desk.partition)
    assert [key for key in call.keys if not key.startswith(home)] == []


def test_a_script_runs_from_its_source_when_redis_has_forgotten_it(bus: Bus, desk: Desk) -> None:
    bus.do("SCRIPT", "FLUSH")
    desk.queued()
    [entry] = desk.reader(desk.work_in, TOKENIZERS, "tokenizer-1").read(5)
    assert entry.choice == 0
