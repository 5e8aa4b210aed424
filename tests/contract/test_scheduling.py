"""START, EMIT and DROP: who runs a choice, what its token log holds, when its work ends."""

from __future__ import annotations

import pytest

from common.bus import handoffs, leases
from common.bus.client import FencedError
from common.bus.handoffs import EmitRow, Step
from common.bus.keys import SCHEDULERS
from common.messages import TokRecord, parse_records
from tests.helpers.bus import Desk, Job
from tests.helpers.redis_state import contents


def _retire(desk: Desk, worker: str, *, drained: bool = False) -> None:
    desk.bus.run(leases.retire(desk.keys, 0, worker, drained=drained))


# -- START ------------------------------------------------------------------------------------------------


def test_start_says_all_that_a_scheduler_needs(desk: Desk) -> None:
    request = desk.waiting(n=2)
    desk.open("scheduler-1")
    entry = desk.read_sched()[1]
    started = desk.start(entry)
    assert (started.code, started.attempts, started.output_ids, started.log_size) == ("OK", 0, (), 0)
    assert started.request is not None
    assert started.prompt_ids == (5, 6, 7)
    assert (started.request.n, started.request.choices, started.request.cls) == (2, 2, desk.cls)
    assert started.request.tenant == "tenant"
    req = desk.req(request.uid)
    assert (req["state"], req["owner:1"]) == ("running", "scheduler-1")
    assert desk.bus.do("ZSCORE", desk.inflight, request.uid) == req["deadline"].encode()


def test_each_choice_gets_its_own_prompt(desk: Desk) -> None:
    request = desk.queued(n=2)
    [entry] = desk.read_in()
    desk.tok_done(request, entry, ((1, 2), (3,), (40_000, 5, 6)))
    desk.open("scheduler-1")
    prompts = [desk.start(work).prompt_ids for work in desk.read_sched()]
    assert prompts == [(1, 2), (1, 2), (3,), (3,), (40_000, 5, 6), (40_000, 5, 6)]


def test_starting_again_changes_nothing(desk: Desk) -> None:
    _, [job] = desk.running()
    before = contents(desk.bus)
    assert desk.start(job.entry).code == "OK"
    assert desk.start(job.entry).attempts == 0
    assert contents(desk.bus) == before


def test_a_new_owner_goes_on_from_the_log(desk: Desk) -> None:
    _, [job] = desk.running()
    desk.generate(job, 3)
    desk.open("scheduler-2")
    started = desk.start(job.entry, "scheduler-2")
    assert started.output_ids == (100, 101, 102)
    assert started.log_size == len("100,101,102,")


@pytest.mark.parametrize("how", ["cancelled", "gone", "flushed", "log gone"])
def test_what_has_ended_is_not_started(desk: Desk, how: str) -> None:
    request = desk.waiting()
    [entry] = desk.read_sched()
    if how == "cancelled":
        desk.cancel(request.uid)
    elif how == "gone":
        desk.bus.do("DEL", desk.keys.req(request.uid))
    elif how == "flushed":
        desk.bus.do("FLUSHALL")
    else:
        desk.bus.do("DEL", desk.keys.gen(request.uid, 0))
    desk.open("scheduler-1")
    before = contents(desk.bus)
    assert desk.start(entry).code == "ENDED"
    assert contents(desk.bus) == before


def test_a_choice_that_ended_is_not_started(desk: Desk) -> None:
    _, [job] = desk.running()
    desk.generate(job, 2, "length")
    assert desk.start(job.entry).code == "ENDED"


@pytest.mark.parametrize("flag", ["{uid}", "{uid}/0", "{uid}/1"])
def test_a_flagged_choice_is_handed_out_as_cancelled(desk: Desk, flag: str) -> None:
    request = desk.waiting(n=2)
    desk.open("scheduler-1")
    entry = desk.read_sched()[0]
    desk.bus.do("SADD", desk.keys.cancel(0), flag.format(uid=request.uid))
    started = desk.start(entry)
    assert started.code == ("OK" if flag.endswith("/1") else "CANCELLED")
    assert desk.req(request.uid)["owner:0"] == "scheduler-1"


@pytest.mark.parametrize("lease", ["none", "dead"])
def test_a_fenced_worker_starts_nothing(desk: Desk, lease: str) -> None:
    desk.waiting()
    [entry] = desk.read_sched()
    if lease == "dead":
        desk.open("scheduler-1")
        _retire(desk, "scheduler-1")
    before = contents(desk.bus)
    with pytest.raises(FencedError):
        desk.start(entry)
    assert contents(desk.bus) == before


def test_an_expired_lease_alone_fences_nobody(desk: Desk) -> None:
    _, [job] = desk.running()
    desk.expire_lease("scheduler-1")
    assert desk.start(job.entry).code == "OK"
    desk.generate(job, 1)
    assert desk.gen(job.entry.uid) == "100,"


def test_every_choice_of_the_largest_request_starts(desk: Desk) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    desk.tok_done(request, entry, [[index] for index in range(1024)])
    desk.open("scheduler-1", "scheduler-2")
    entries = desk.read_sched(count=2000)
    for worker in ("scheduler-1", "scheduler-2"):
        started = [desk.start(work, worker) for work in entries]
        assert [(each.code, each.prompt_ids) for each in started] == [("OK", (i,)) for i in range(1024)]
    assert len(desk.req(request.uid)) > 3 * 1024


# -- EMIT -------------------------------------------------------------------------------------------------


def test_a_step_of_several_rows(desk: Desk) -> None:
    request, (first, second) = desk.running(n=2)
    desk.generate(first, 1)
    reply = desk.emit(Step((desk.row(first, 7), desk.row(second, 8))))
    assert (reply.code, reply.backlog, reply.refused) == ("OK", 2, ())
    assert desk.gen(request.uid, 0) == "100,7,"
    assert desk.gen(request.uid, 1) == "8,"
    assert desk.records() == [f"{request.uid} 0 0 100", f"{request.uid} 0 1 7", f"{request.uid} 1 0 8"]
    assert desk.bus.do("HGET", desk.keys.lease(0, "scheduler-1"), "seq") == b"2"
    assert desk.bus.do("PTTL", desk.keys.gen(request.uid, 1)) > 0


def test_an_error_travels_as_text(desk: Desk) -> None:
    _, [job] = desk.running()
    row = desk.row(job, None, "error", "internal")
    desk.emit(Step((row,), (desk.end(job),)))
    [text] = desk.records()
    assert parse_records(text) == [TokRecord(job.entry.uid, 0, 0, None, "error", "internal", "Why, 世界|.")]


def test_a_repeated_step_changes_nothing(desk: Desk) -> None:
    _, [job] = desk.running()
    step = Step((desk.row(job, 5),))
    desk.emit(step)
    before = contents(desk.bus)
    for _ in range(2):
        reply = desk.bus.run(desk.emit_call(step, 1))
        assert (reply.code, reply.backlog) == ("OK", 1)
    assert contents(desk.bus) == before
    desk.emit(Step((desk.row(job, 6),)))
    before = contents(desk.bus)
    assert desk.bus.run(desk.emit_call(step, 1)).code == "OK"
    assert contents(desk.bus) == before


def test_a_gap_is_refused_with_the_stored_number(desk: Desk) -> None:
    _, [job] = desk.running()
    steps = [Step((desk.row(job, token),)) for token in (5, 6, 7)]
    desk.emit(steps[0])
    before = contents(desk.bus)
    reply = desk.bus.run(desk.emit_call(steps[2], 3))
    assert (reply.code, reply.stored) == ("BEHIND", 1)
    assert contents(desk.bus) == before
    for seq in (2, 3):
        assert desk.bus.run(desk.emit_call(steps[seq - 1], seq)).code == "OK"
    assert desk.gen(job.entry.uid) == "5,6,7,"


@pytest.mark.parametrize("how", ["dead", "flushed"])
def test_a_fenced_worker_emits_nothing(desk: Desk, how: str) -> None:
    _, [job] = desk.running()
    if how == "dead":
        _retire(desk, "scheduler-1")
    else:
        desk.bus.do("FLUSHALL")
    before = contents(desk.bus)
    for seq in (0, 1, 5):
        with pytest.raises(FencedError):
            desk.bus.run(desk.emit_call(Step((desk.row(job, 5),)), seq))
    assert contents(desk.bus) == before


def test_the_tick_tells_who_is_to_stop_or_pause(desk: Desk) -> None:
    desk.open("scheduler-1")
    desk.bus.do("SADD", desk.keys.cancel(0), "a", "b/0")
    desk.bus.do("SADD", desk.keys.pause(0), "c")
    before = contents(desk.bus)
    reply = desk.tick()
    assert (reply.cancel, reply.pause) == (frozenset({"a", "b/0"}), frozenset({"c"}))
    assert contents(desk.bus) == before


def test_the_end_of_the_work_acks_the_entry(desk: Desk) -> None:
    request, (first, second) = desk.running(n=2)
    desk.bus.do("SADD", desk.keys.cancel(0), f"{request.uid}/0", f"{request.uid}/1")
    desk.generate(first, 2, "stop")
    assert [row.split(" ")[4:] for row in desk.records()] == [[], ["stop"]]
    assert desk.members(desk.keys.cancel(0)) == {f"{request.uid}/1"}
    assert desk.pending(desk.sched, SCHEDULERS) == desk.bus.do("XLEN", desk.sched) == 1
    assert desk.req(request.uid)["work"] == "1"
    desk.generate(second, 1, "length")
    assert desk.pending(desk.sched, SCHEDULERS) == desk.bus.do("XLEN", desk.sched) == 0
    assert desk.bus.do("ZCARD", desk.inflight) == 1, "its reply has not ended"


def test_the_work_on_a_choice_ends_once(desk: Desk) -> None:
    request, (first, _) = desk.running(n=2)
    for seq in (1, 2):
        row = desk.row(first, None, "error", "cancelled")
        desk.bus.run(desk.emit_call(Step((row,), (desk.end(first),)), seq))
    assert desk.req(request.uid)["work"] == "1"


def test_a_dead_letter_says_who_and_why(desk: Desk) -> None:
    _, [job] = desk.running()
    row = desk.row(job, None, "error", "crashed")
    desk.emit(Step((row,), (desk.end(job, "3 crashes"),)))
    [(_, fields)] = desk.bus.do("XRANGE", desk.keys.dead(0), "-", "+")
    said = dict(zip(fields[::2], fields[1::2], strict=True))
    assert said == {
        b"uid": job.entry.uid.encode(), b"choice": b"0", b"reason": b"3 crashes", b"worker": b"scheduler-1",
    }  # fmt: skip


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("last", [False, True])
def test_a_row_whose_log_is_gone_is_refused_whole(desk: Desk, tokens: int, last: bool) -> None:
    _, (gone, kept) = desk.running(n=2)
    desk.generate(gone, tokens)
    desk.bus.do("DEL", desk.keys.gen(gone.entry.uid, 0))
    ends = (desk.end(gone),) if last else ()
    reply = desk.emit(Step((desk.row(gone, 9, "stop" if last else ""), desk.row(kept, 8)), ends))
    assert reply.refused == ((gone.entry.uid, 0),)
    assert desk.gen(gone.entry.uid, 0) is None
    assert desk.gen(gone.entry.uid, 1) == "8,"
    assert desk.records()[-1] == f"{kept.entry.uid} 1 0 8"
    assert len(desk.records()) == tokens + 1
    assert desk.pending(desk.sched, SCHEDULERS) == 2, "its entry is found again, and dropped"


@pytest.mark.parametrize("end", ["", "stop", "error"])
@pytest.mark.parametrize("common", [0, 2])
def test_two_writers_of_one_log_do_not_mix(desk: Desk, common: int, end: str) -> None:
    """After Redis rolled back over a START, a second scheduler may get what the first still runs."""
    desk.open("scheduler-2")
    _, [mine] = desk.running()
    desk.generate(mine, common)
    other = Job(mine.entry, mine.log, mine.tokens)
    desk.generate(mine, 2)
    log, records = desk.gen(mine.entry.uid), desk.records()
    row = desk.row(other, None, "error", "cancelled") if end == "error" else desk.row(other, 77, end)
    reply = desk.emit(Step((row,), (desk.end(other),) if end else ()), "scheduler-2")
    assert reply.refused == ((mine.entry.uid, 0),)
    assert (desk.gen(mine.entry.uid), desk.records()) == (log, records)
    assert desk.bus.do("PTTL", desk.keys.gen(mine.entry.uid, 0)) > 0
    assert desk.pending(desk.sched, SCHEDULERS) == 1
    desk.generate(mine, 1, "stop")
    assert desk.gen(mine.entry.uid) == log + f"{100 + common + 2},"


def test_two_tokens_of_one_choice_in_one_step(desk: Desk) -> None:
    _, [job] = desk.running()
    reply = desk.emit(Step((desk.row(job, 1), desk.row(job, 2), desk.row(job, 3, "stop")), (desk.end(job),)))
    assert reply.refused == ()
    assert desk.gen(job.entry.uid) == "1,2,3,"
    assert desk.pending(desk.sched, SCHEDULERS) == 0


def test_cached_tokens_count_once_per_prompt(desk: Desk) -> None:
    request = desk.queued(n=2)
    [entry] = desk.read_in()
    desk.tok_done(request, entry, ((1, 2), (3, 4)))
    desk.open("scheduler-1", "scheduler-2")
    jobs = [Job(entry) for entry in desk.read_sched()]
    for job in jobs:
        desk.start(job.entry)
    notes = tuple((request.uid, choice, 10 + choice) for choice in range(4))
    desk.emit(Step(tuple(desk.row(job, 9) for job in jobs), cached=notes))
    assert desk.req(request.uid)["cached_tokens"] == str(10 + 12)
    desk.start(jobs[0].entry, "scheduler-2")
    desk.emit(Step((desk.row(jobs[0], 9),), cached=((request.uid, 0, 99),)), "scheduler-2")
    assert desk.req(request.uid)["cached_tokens"] == "22"


def test_a_note_on_a_request_that_is_gone_is_nothing(desk: Desk) -> None:
    desk.open("scheduler-1")
    desk.emit(Step(cached=((desk.request().uid, 0, 5),)))
    assert b"req" not in b"".join(contents(desk.bus))


def test_a_broken_log_takes_no_other_down(desk: Desk) -> None:
    _, (first, second) = desk.running(n=2)
    desk.bus.do("DEL", desk.keys.gen(first.entry.uid, 0))
    desk.bus.do("RPUSH", desk.keys.gen(first.entry.uid, 0), "x")
    reply = desk.emit(Step((desk.row(first, 1), desk.row(second, 2))))
    assert reply.refused == ((first.entry.uid, 0),)
    assert desk.gen(second.entry.uid, 1) == "2,"


def test_a_step_of_a_thousand_rows(desk: Desk) -> None:
    request = desk.queued()
    [entry] = desk.read_in()
    desk.tok_done(request, entry, [[1]] * 1024)
    desk.open("scheduler-1")
    jobs = [Job(work) for work in desk.read_sched(count=2000)]
    desk.emit(Step(tuple(desk.row(job, 5) for job in jobs)))
    desk.emit(Step(tuple(desk.row(job, 6, "stop") for job in jobs), tuple(desk.end(job) for job in jobs)))
    assert {desk.gen(request.uid, choice) for choice in range(1024)} == {"5,6,"}
    assert desk.pending(desk.sched, SCHEDULERS) == desk.bus.do("XLEN", desk.sched) == 0
    assert desk.req(request.uid)["work"] == "1024"


# -- DROP -------------------------------------------------------------------------------------------------


def test_drop_ends_the_work_on_a_choice_once(desk: Desk) -> None:
    request = desk.waiting(n=2)
    first, second = desk.read_sched()
    desk.cancel(request.uid)
    assert [desk.drop(first), desk.drop(first), desk.drop(second)] == [1, 0, 1]
    assert desk.req(request.uid)["work"] == "2"
    desk.assert_empty()


def test_a_dropped_log_lives_no_longer_than_its_request(desk: Desk) -> None:
    """A request cancelled while it waits leaves a log that was made to live longer than its deadline."""
    kept, gone = desk.waiting(n=2), desk.waiting()
    [first, second, third] = desk.read_sched()
    desk.cancel(kept.uid)
    desk.bus.do("PEXPIRE", desk.keys.req(kept.uid), 5_000)
    desk.bus.do("DEL", desk.keys.req(gone.uid))
    for entry in (first, second, third):
        assert desk.drop(entry) == 1
    for choice in (0, 1):
        assert 0 < desk.bus.do("PTTL", desk.keys.gen(kept.uid, choice)) <= 5_000
    assert not desk.bus.do("EXISTS", desk.keys.gen(gone.uid, 0))


def test_drop_of_what_is_gone(desk: Desk) -> None:
    request = desk.waiting()
    [entry] = desk.read_sched()
    desk.bus.do("SADD", desk.keys.cancel(0), request.uid, f"{request.uid}/0")
    desk.bus.do("DEL", desk.keys.req(request.uid))
    assert desk.drop(entry) == 1
    desk.assert_empty()
    desk.bus.do("FLUSHALL")
    assert desk.drop(entry) == 0
    assert contents(desk.bus) == {}


def test_a_row_is_fenced_by_its_place(desk: Desk) -> None:
    """The same bytes at another place are not the same row."""
    _, [job] = desk.running()
    desk.generate(job, 1)
    row = EmitRow(job.entry.uid, 0, f"{job.entry.uid} 0 0 100", "100,", 0)
    assert desk.emit(Step((row,))).refused == ((job.entry.uid, 0),)
    assert desk.gen(job.entry.uid) == "100,"


def test_the_tick_takes_no_number(desk: Desk) -> None:
    _, [job] = desk.running()
    desk.tick()
    desk.generate(job, 1)
    desk.tick()
    desk.generate(job, 1)
    assert desk.gen(job.entry.uid) == "100,101,"
    assert desk.bus.run(handoffs.emit(desk.keys, 0, "scheduler-1", 0, Step())).backlog == 2
