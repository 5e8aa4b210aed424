"""TOK_DONE, TOK_END, ATTEMPT and DROP as tokenizers use them."""

from __future__ import annotations

import time

import pytest

from common.bus import handoffs
from common.bus.handoffs import Gate
from common.bus.keys import TOKENIZERS
from common.messages import OutEntry, parse_prompts
from tests.helpers.bus import Desk
from tests.helpers.redis_state import contents

PROMPTS = ((1, 2, 3), (40_000,), (5, 6))
ANSWER = OutEntry("", answer='{"tokens":[1,2]}', end="done")
ERROR = OutEntry("", end="error", error="context", message="Too long: 世界.", param="prompt")


def test_the_hand_off(desk: Desk) -> None:
    request = desk.queued(n=2)
    [entry] = desk.read_in()
    assert desk.tok_done(request, entry, PROMPTS) is Gate.OK

    req = desk.req(request.uid)
    assert (req["state"], req["choices"], req["prompt_tokens"]) == ("waiting", "6", "6")
    assert parse_prompts(req["ids"].encode()) == PROMPTS
    assert "payload" not in req
    assert desk.bus.do("XLEN", desk.work_in) == 0
    assert desk.pending(desk.work_in, TOKENIZERS) == 0
    assert [(e.uid, e.choice) for e in desk.read_sched()] == [(request.uid, c) for c in range(6)]
    assert [entry.accepted for entry in desk.out(request.uid)] == [6]
    for key in (desk.keys.out(request.uid), *(desk.keys.gen(request.uid, c) for c in range(6))):
        assert desk.bus.do("PTTL", key) > 0
    assert desk.gen(request.uid, 5) == ""


def test_the_first_finisher_wins(desk: Desk) -> None:
    request = desk.queued()
    [entry] = desk.read_in("tokenizer-1")
    assert desk.tok_done(request, entry) is Gate.OK
    before = contents(desk.bus)
    assert desk.tok_done(request, entry) is Gate.DUP
    assert desk.tok_end(request, entry, ERROR) is Gate.DUP
    assert contents(desk.bus) == before


def test_a_repeat_does_not_restart_what_runs_or_has_ended(desk: Desk) -> None:
    desk.open_tok()
    desk.take_partition()
    request = desk.queued()
    [entry] = desk.read_in()
    desk.tok_done(request, entry)
    desk.open("scheduler-1")
    [work] = desk.read_sched()
    desk.start(work)
    before = contents(desk.bus)
    assert desk.tok_done(request, entry) is Gate.DUP
    assert contents(desk.bus) == before


@pytest.mark.parametrize("late", ["done", "end"])
def test_a_second_entry_of_a_request_hands_nothing_off(desk: Desk, late: str) -> None:
    """As after a hash that was lost alone, and admitted again while the first entry still waited."""
    request = desk.queued()
    desk.bus.do("DEL", desk.keys.req(request.uid))
    desk.admit(request)
    first, second = desk.read_in(count=2)
    assert desk.tok_done(request, first) is Gate.OK
    gate = desk.tok_done(request, second) if late == "done" else desk.tok_end(request, second, ERROR)
    assert gate is Gate.DUP
    assert desk.bus.do("XLEN", desk.sched) == 1
    assert desk.req(request.uid)["state"] == "waiting"
    assert desk.pending(desk.work_in, TOKENIZERS) == desk.bus.do("XLEN", desk.work_in) == 0


@pytest.mark.parametrize("how", ["done", "end", "drop"])
def test_a_cancelled_request_is_not_handed_off(desk: Desk, how: str) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    assert desk.cancel(request.uid) == "ENDED"
    if how == "drop":
        assert desk.drop(entry, TOKENIZERS) == 1
    else:
        gate = desk.tok_done(request, entry) if how == "done" else desk.tok_end(request, entry, ANSWER)
        assert gate is Gate.ENDED
    assert [entry.error for entry in desk.out(request.uid)] == ["cancelled"]
    assert desk.bus.do("XLEN", desk.sched) == 0
    desk.assert_empty()


@pytest.mark.parametrize("how", ["done", "end"])
def test_a_request_that_is_gone_is_not_handed_off(desk: Desk, how: str) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    desk.bus.do("DEL", desk.keys.req(request.uid))
    gate = desk.tok_done(request, entry) if how == "done" else desk.tok_end(request, entry, ANSWER)
    assert gate is Gate.ENDED
    assert not desk.bus.do("EXISTS", desk.keys.req(request.uid), desk.keys.out(request.uid))
    desk.overdue(request.uid)
    assert desk.expire(request.uid) == "FREED"
    desk.assert_empty()


@pytest.mark.parametrize("end", [ANSWER, ERROR])
def test_a_tokenizer_ends_a_request_itself(desk: Desk, end: OutEntry) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    assert desk.tok_end(request, entry, end) is Gate.OK
    [said] = desk.out(request.uid)
    assert (said.end, said.answer, said.error, said.message, said.param) == (
        end.end, end.answer, end.error, end.message, end.param,
    )  # fmt: skip
    assert said.usage is not None
    assert desk.req(request.uid)["terminal"] == end.end
    assert desk.bus.do("PTTL", desk.keys.out(request.uid)) > 0
    assert not desk.bus.do("EXISTS", desk.keys.dead(0))
    desk.assert_empty()
    before = contents(desk.bus)
    assert desk.tok_end(request, entry, end) is Gate.DUP
    assert contents(desk.bus) == before


def test_a_poisonous_job_leaves_a_trace(desk: Desk) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    desk.tok_end(request, entry, ERROR, dead_reason="it crashed 3 workers")
    [(_, fields)] = desk.bus.do("XRANGE", desk.keys.dead(0), "-", "+")
    assert fields == [
        b"uid",
        request.uid.encode(),
        b"reason",
        b"it crashed 3 workers",
        b"worker",
        b"tokenizer-1",
    ]


def test_attempts_count_once_per_worker(desk: Desk) -> None:
    request = desk.queued()

    def attempt(worker: str) -> int:
        return desk.bus.run(handoffs.attempt(desk.keys, request.uid, worker))

    assert [attempt(worker) for worker in ("b", "b", "c", "c", "b")] == [2, 2, 3, 3, 4]
    desk.cancel(request.uid)
    before = contents(desk.bus)
    assert attempt("d") == 0
    assert contents(desk.bus) == before
    desk.bus.do("FLUSHALL")
    assert attempt("d") == 0
    assert contents(desk.bus) == {}


def test_a_job_that_a_dead_tokenizer_had_is_done_once(desk: Desk) -> None:
    request = desk.queued()
    [entry] = desk.read_in("tokenizer-1")
    desk.bus.do("XCLAIM", desk.work_in, TOKENIZERS, "tokenizer-2", 0, entry.id)
    gates = [desk.tok_done(request, entry), desk.tok_done(request, entry)]
    assert gates == [Gate.OK, Gate.DUP]
    assert len(desk.read_sched()) == 1


def test_a_stale_entry_of_a_tokenizer_does_not_end_work(desk: Desk) -> None:
    """Who lost a job to a peer, and finds the request ended later, must not count as its scheduler."""
    desk.open_tok()
    desk.take_partition()
    request = desk.queued(n=2)
    [entry] = desk.read_in()
    desk.tok_done(request, entry, ((1, 2),))
    desk.open("scheduler-1")
    for work in desk.read_sched():
        desk.start(work)
    desk.bus.do("XADD", desk.tok, "*", "v", "1", "r", "record")
    desk.pub(finished=[desk.finished(request.uid, choices=2, error="internal", message="Broken.")])
    before = contents(desk.bus)
    assert desk.drop(entry, TOKENIZERS) == 0
    assert contents(desk.bus) == before


def test_after_a_flush_nothing_is_handed_off(desk: Desk) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    desk.bus.do("FLUSHALL")
    time.sleep(0.002)  # names of entries are milliseconds
    desk.admit(request)
    [again] = desk.read_in()
    assert desk.tok_done(request, entry) is Gate.DUP
    assert desk.tok_done(request, again) is Gate.OK
    assert len(desk.read_sched()) == 1


def test_a_large_request(desk: Desk) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    assert desk.tok_done(request, entry, [[1, 2, 3]] * 1024) is Gate.OK
    assert [work.choice for work in desk.read_sched(count=2000)] == list(range(1024))
