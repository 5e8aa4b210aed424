"""How a request ends: CANCEL and EXPIRE at every stage, and the two ends in either order."""

from __future__ import annotations

import itertools

import pytest

from common.bus import handoffs, leases
from common.bus.handoffs import Step
from common.bus.keys import SCHEDULERS
from tests.helpers.bus import Desk
from tests.helpers.redis_state import contents


@pytest.fixture(autouse=True)
def _partition(desk: Desk) -> None:
    desk.open_tok()
    desk.take_partition()


def _clear_away(desk: Desk) -> None:
    """What is left of the work is read by somebody, and dropped."""
    for entry in desk.read_sched("scheduler-9"):
        assert desk.start(entry, "scheduler-9").code == "ENDED"
        desk.drop(entry)


# -- CANCEL -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["queued", "waiting"])
def test_cancelling_what_nobody_owns_ends_it_at_once(desk: Desk, stage: str) -> None:
    desk.open("scheduler-9")
    request = desk.queued() if stage == "queued" else desk.waiting(n=3)
    desk.bus.do("SADD", desk.keys.cancel(0), request.uid)  # by hand, before
    assert desk.cancel(request.uid) == "ENDED"
    last = desk.out(request.uid)[-1]
    assert (last.end, last.error, last.message) == ("error", "cancelled", "Nobody waits.")
    assert desk.bus.do("ZCARD", desk.inflight) == 0
    assert desk.bus.do("SCARD", desk.keys.cancel(0)) == 0
    before = contents(desk.bus)
    assert desk.cancel(request.uid) == "NONE"
    assert contents(desk.bus) == before
    if stage == "queued":
        [entry] = desk.read_in()
        desk.tok_done(request, entry)
    _clear_away(desk)
    desk.assert_empty()
    assert len([entry for entry in desk.out(request.uid) if entry.end]) == 1


def test_a_running_request_is_flagged(desk: Desk) -> None:
    request, (first, second) = desk.running(n=2)
    desk.generate(first, 2)
    assert desk.cancel(request.uid) == "FLAGGED"
    before = contents(desk.bus)
    assert desk.cancel(request.uid) == "FLAGGED"
    assert contents(desk.bus) == before
    assert desk.tick().cancel == {request.uid}
    ends = (desk.end(first), desk.end(second))
    desk.emit(Step((desk.row(first, None, "error", "x"), desk.row(second, None, "error", "x")), ends))
    errors = [desk.finished(request.uid, c, 2, error="cancelled", message="Gone.") for c in (0, 1)]
    desk.pub(finished=errors)
    assert [entry.error for entry in desk.out(request.uid)] == ["", "cancelled"]
    desk.assert_empty()


def test_a_cancel_that_crosses_the_natural_end(desk: Desk) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1, "stop")
    assert desk.cancel(request.uid) == "FLAGGED"
    desk.pub(finished=[desk.finished(request.uid, n=1, text="x", finish="stop")])
    assert desk.out(request.uid)[-1].end == "done"
    assert desk.cancel(request.uid) == "NONE"
    desk.assert_empty()


def test_a_cancel_before_the_start_of_some_choices(desk: Desk) -> None:
    request = desk.waiting(n=3)
    desk.open("scheduler-1", "scheduler-9")
    [entry] = desk.read_sched(count=1)
    desk.start(entry)
    assert desk.cancel(request.uid) == "FLAGGED"
    late = desk.read_sched("scheduler-1", 1)[0]
    assert desk.start(late).code == "CANCELLED"
    desk.bus.do("XADD", desk.tok, "*", "v", "1", "r", "record")
    desk.pub(finished=[desk.finished(request.uid, 0, 3, error="cancelled", message="Gone.")])
    for mine in (entry, late):
        desk.drop(mine)
    assert desk.bus.do("ZCARD", desk.inflight) == 1
    _clear_away(desk)
    desk.assert_empty()


def test_cancelling_what_never_was(desk: Desk) -> None:
    before = contents(desk.bus)
    assert desk.cancel(desk.request().uid) == "NONE"
    assert contents(desk.bus) == before


# -- both ends, in either order ---------------------------------------------------------------------------

_STEPS = [
    order
    for order in itertools.permutations(["work 0", "work 1", "reply 0", "reply 1"])
    if order.index("reply 0") < order.index("reply 1")
]


@pytest.mark.parametrize("order", _STEPS, ids=",".join)
@pytest.mark.parametrize("how", ["stop string", "error"])
def test_the_place_is_free_when_both_ends_are_there(desk: Desk, order: tuple[str, ...], how: str) -> None:
    request, jobs = desk.running(n=2)
    reply_end = "reply 0" if how == "error" else "reply 1"
    needed = {"work 0", "work 1", reply_end}
    for index, step in enumerate(order):
        freed = needed <= set(order[:index])
        assert desk.bus.do("ZCARD", desk.inflight) == (0 if freed else 1), step
        what, choice = step.split(" ")
        job = jobs[int(choice)]
        if what == "work":
            desk.generate(job, 1, "length")
        elif how == "error":
            desk.bus.do("XADD", desk.tok, "*", "v", "1", "r", str(index))
            desk.pub(finished=[desk.finished(request.uid, int(choice), 2, error="internal", message="No.")])
        else:
            desk.bus.do("XADD", desk.tok, "*", "v", "1", "r", str(index))
            end = desk.finished(request.uid, int(choice), 2, n=1, finish="stop", halt=True)
            desk.pub(finished=[end])
    desk.assert_empty()
    assert len([entry for entry in desk.out(request.uid) if entry.end]) == 1


def test_a_wide_request_ends_in_one_step_and_one_commit(desk: Desk) -> None:
    request, jobs = desk.running(n=128)
    desk.emit(Step(tuple(desk.row(job, 5, "stop") for job in jobs), tuple(desk.end(job) for job in jobs)))
    ends = [desk.finished(request.uid, c, 128, n=1, text=str(c), finish="stop") for c in range(128)]
    desk.pub(finished=ends)
    out = desk.out(request.uid)
    assert [entry.text for entry in out[1:]] == [str(c) for c in range(128)]
    assert [entry.end for entry in out] == [""] * 128 + ["done"]
    assert out[-1].usage.completion_tokens == 128
    desk.assert_empty()


def test_a_wide_request_is_cancelled_together(desk: Desk) -> None:
    request, jobs = desk.running(n=128)
    desk.cancel(request.uid)
    rows = tuple(desk.row(job, None, "error", "cancelled") for job in jobs)
    desk.emit(Step(rows, tuple(desk.end(job) for job in jobs)))
    errors = [desk.finished(request.uid, c, 128, error="cancelled", message="Gone.") for c in range(128)]
    desk.pub(finished=errors)
    assert [entry.end for entry in desk.out(request.uid)] == ["", "error"]
    desk.assert_empty()


# -- EXPIRE -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["queued", "waiting"])
def test_what_waited_too_long_is_turned_away(desk: Desk, stage: str) -> None:
    desk.open("scheduler-9")
    request = desk.queued() if stage == "queued" else desk.waiting(n=2)
    before = contents(desk.bus)
    assert desk.expire(request.uid) == "LATER"
    assert contents(desk.bus) == before
    desk.overdue(request.uid)
    assert desk.expire(request.uid) == "ENDED"
    assert desk.out(request.uid)[-1].error == "unavailable"
    before = contents(desk.bus)
    assert desk.expire(request.uid) == "NONE"
    assert contents(desk.bus) == before
    if stage == "queued":
        [entry] = desk.read_in()
        desk.tok_done(request, entry)
    _clear_away(desk)
    desk.assert_empty()


def test_a_started_request_has_until_its_deadline(desk: Desk) -> None:
    request, _ = desk.running()
    desk.bus.do("HSET", desk.keys.req(request.uid), "queue_deadline", 1)
    desk.bus.do("ZADD", desk.inflight, 1, request.uid)
    assert desk.expire(request.uid, "scheduler-1") == "LATER"
    deadline = desk.req(request.uid)["deadline"]
    assert desk.bus.do("ZSCORE", desk.inflight, request.uid) == deadline.encode()


def test_a_live_owner_is_asked_to_stop(desk: Desk) -> None:
    request, [job] = desk.running()
    desk.overdue(request.uid)
    assert desk.expire(request.uid, "scheduler-1") == "FLAGGED"
    assert desk.tick().cancel == {request.uid}
    assert "expired" in desk.req(request.uid)
    assert desk.expire(request.uid, "scheduler-1") == "FLAGGED"
    assert [entry.end for entry in desk.out(request.uid)] == [""]
    desk.generate(job, 0, error="cancelled")
    desk.pub(finished=[desk.finished(request.uid, error="deadline", message="Late.")])
    assert desk.expire(request.uid, "scheduler-1") == "NONE"
    desk.assert_empty()


def _lose(desk: Desk, how: str) -> str:
    """Takes scheduler-1 away; returns the owner as a sweep would read it."""
    key = desk.keys.lease(0, "scheduler-1")
    if how == "dead":
        desk.bus.run(leases.retire(desk.keys, 0, "scheduler-1", drained=False))
    elif how == "expired":
        desk.bus.do("HSET", key, "expiry", 1)
    elif how == "missing":
        desk.bus.do("DEL", key)
    return "" if how == "unknown" else "scheduler-1"


@pytest.mark.parametrize("how", ["dead", "expired", "missing", "unknown"])
def test_an_orphan_is_ended_by_the_sweep(desk: Desk, how: str) -> None:
    desk.open("scheduler-9")
    request, [job, other] = desk.running(n=2)
    desk.generate(job, 2)
    desk.pub()
    owner = _lose(desk, how)
    desk.overdue(request.uid)
    assert desk.expire(request.uid, owner) == "ENDED"
    assert desk.out(request.uid)[-1].error == "deadline"
    assert desk.expire(request.uid, owner) == "NONE"
    ids = [row[0] for row in desk.bus.do("XPENDING", desk.sched, SCHEDULERS, "-", "+", 10)]
    assert desk.members(desk.keys.cancel(0)) == {request.uid}, "whoever still runs a choice is to stop"
    desk.bus.do("XCLAIM", desk.sched, SCHEDULERS, "scheduler-9", 0, *ids)
    for entry in (job.entry, other.entry):
        assert desk.start(entry, "scheduler-9").code == "ENDED"
        desk.drop(entry)
    desk.assert_empty()


def test_a_short_pause_of_the_owner_is_not_its_end(desk: Desk) -> None:
    request, _ = desk.running()
    seconds, _micros = desk.bus.do("TIME")
    desk.bus.do("HSET", desk.keys.lease(0, "scheduler-1"), "expiry", int(seconds) * 1000 - 1_000)
    desk.overdue(request.uid)
    assert desk.expire(request.uid, "scheduler-1") == "FLAGGED"


def test_a_reply_that_nobody_writes_any_more_frees_its_place(desk: Desk) -> None:
    """All work has ended and no detokenizer comes: the sweep ends the reply, and everything is free."""
    request, [job] = desk.running()
    desk.generate(job, 1, "stop")
    desk.overdue(request.uid)
    assert desk.expire(request.uid) == "ENDED"
    desk.assert_empty()
    desk.pub(finished=[desk.finished(request.uid, n=1, text="x", finish="stop")])
    assert [entry.end for entry in desk.out(request.uid)] == ["", "error"]
    desk.assert_empty()


@pytest.mark.parametrize("alive", [True, False])
def test_an_ended_reply_with_work_left(desk: Desk, alive: bool) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1)
    desk.pub(finished=[desk.finished(request.uid, n=1, finish="stop", halt=True)])
    desk.overdue(request.uid)
    owner = "scheduler-1" if alive else _lose(desk, "dead")
    assert desk.expire(request.uid, owner) == ("FLAGGED" if alive else "ENDED")
    assert desk.bus.do("ZCARD", desk.inflight) == (1 if alive else 0)
    assert [entry.end for entry in desk.out(request.uid)] == ["", "done"]
    if alive:
        desk.generate(job, 0, error="cancelled")
    else:
        desk.drop(job.entry)
    desk.assert_empty()


@pytest.mark.parametrize("gone", ["request", "everything"])
def test_the_sweep_frees_what_is_gone(desk: Desk, gone: str) -> None:
    request = desk.queued()
    desk.read_in()
    if gone == "everything":
        desk.bus.do("FLUSHALL")
        assert desk.expire(request.uid) == "NONE"
        assert contents(desk.bus) == {}
        return
    desk.bus.do("DEL", desk.keys.req(request.uid))
    desk.bus.do("SADD", desk.keys.pause(0), request.uid)
    assert desk.expire(request.uid) == "FREED"
    assert desk.bus.do("ZCARD", desk.inflight) == desk.bus.do("SCARD", desk.keys.pause(0)) == 0
    assert desk.bus.do("HGETALL", desk.bytes) == [b"total", b"0"]


# -- PAUSE ------------------------------------------------------------------------------------------------


def test_only_what_lives_can_be_paused(desk: Desk) -> None:
    request, [job] = desk.running()
    flags = desk.keys.pause(0)
    for on in (True, True, False, False, True):
        assert desk.bus.run(handoffs.pause(desk.keys, request.uid, on=on)) is on
        assert desk.tick().pause == ({request.uid} if on else set())
    desk.generate(job, 1, "stop")
    desk.pub(finished=[desk.finished(request.uid, n=1, text="x", finish="stop")])
    desk.assert_empty()
    for uid in (request.uid, desk.request().uid):
        assert desk.bus.run(handoffs.pause(desk.keys, uid, on=True)) is False
    assert desk.bus.do("SCARD", flags) == 0
