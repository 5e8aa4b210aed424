"""The scheduler's own decisions, step by step on a real server: whom it tries alone, what it keeps, reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import redis

from common.bus import client, intake, leases
from common.bus.scripts import sha_of
from common.errors import UnavailableError
from common.messages import Request
from tests.helpers.bus import LEASE_MS, Desk, Steady
from tests.helpers.engines import build
from tests.helpers.waiting import until
from workers.engine.null import NullEngine
from workers.engine.types import Engine, EngineRequest, Output
from workers.scheduler.worker import SchedulerWorker

#: Tokens of a request: the context less the prompt.
TOKENS = 17


class Recorder:
    """An engine that tells what was in each of its steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps: list[list[str]] = []
        self.times: list[float] = []
        self.added: list[EngineRequest] = []

    def add(self, request: EngineRequest) -> None:
        self.added.append(request)
        self._engine.add(request)

    def step(self) -> list[Output]:
        outputs = self._engine.step()
        if outputs:
            self.times.append(time.monotonic())
            self.steps.append([output.key for output in outputs])
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Bench:
    """One scheduler, stepped by the test."""

    def __init__(self, desk: Desk, name: str, engine: Engine) -> None:
        self.desk = desk
        self.engine = Recorder(engine)
        self.worker = SchedulerWorker(
            desk.bus, desk.keys, lambda: self.engine,
            model=desk.model, worker=name, partitions=2, lease_ms=LEASE_MS, steadiness=Steady(),
            announce=lambda: None,
        )  # fmt: skip
        for partition in range(2):
            desk.bus.run(leases.renew(desk.keys, partition, name, 60_000, opening=True))
        self.worker.startup()

    def run(self, done: Callable[[], object], timeout: float = 20.0) -> None:
        """Steps until ``done``."""
        until(lambda: self.worker.step() or done(), "the scheduler is done", timeout, every=0.0)

    def logged(self, request: Request, choice: int = 0) -> int:
        return (self.desk.gen(request.uid, choice) or "").count(",")

    def first_steps(self) -> dict[str, list[str]]:
        """The step in which each choice had its first token."""
        return {key: step for step in reversed(self.engine.steps) for key in step}


def null(**more: Any) -> NullEngine:
    return NullEngine(**{"step_ms": 2, "max_num_seqs": 32, "max_model_len": 20, "vocab_size": 49152} | more)


Make = Callable[..., Bench]


@pytest.fixture
def make(desk: Desk) -> Iterator[Make]:
    made: list[Bench] = []

    def start(name: str = "scheduler-2", engine: Engine | None = None) -> Bench:
        made.append(Bench(desk, name, engine or null()))
        return made[-1]

    yield start
    for bench in made:
        bench.worker.shutdown()


def crash(desk: Desk, worker: str = "scheduler-1") -> None:
    desk.bus.run(leases.retire(desk.keys, 0, worker, drained=False))


def suspects(desk: Desk, count: int) -> list[Request]:
    """Requests whose owner crashed before their first tokens."""
    requests = [desk.running()[0] for _ in range(count)]
    crash(desk)
    return requests


# -- suspects -----------------------------------------------------------------------------------------------


def test_suspects_run_alone_one_by_one_and_the_others_in_between(desk: Desk, make: Make) -> None:
    bystander, [job] = desk.running()
    desk.generate(job, 1)
    requests = suspects(desk, 30)
    bench = make(engine=null(step_ms=10, max_model_len=250, max_num_seqs=64))
    bench.run(lambda: bench.engine.steps and not bench.worker.stats()["suspects"])
    keys, other = [f"{request.uid}/0" for request in requests], f"{bystander.uid}/0"
    firsts = bench.first_steps()
    assert [firsts[key] for key in keys] == [[key] for key in keys]
    ran = [index for index, step in enumerate(bench.engine.steps) if other in step]
    assert len(ran) >= 30, "a step after every trial"
    gap = max(bench.engine.times[b] - bench.engine.times[a] for a, b in pairwise(ran))
    print(f"longest gap of a stream beside 30 suspects: {gap * 1000:.0f} ms")
    assert gap < 1.0
    bench.run(lambda: len(bench.engine.steps[-1]) == 31, 5)


def test_the_least_suspicious_is_first(desk: Desk, make: Make) -> None:
    twice, [job] = desk.running(worker="w0")
    crash(desk, "w0")
    desk.open("w1")
    desk.start(job.entry, "w1")
    desk.start(job.entry, "w1", alone=True)
    desk.bus.do("XCLAIM", desk.sched, "sc", "w1", 0, job.entry.id)
    once, _ = desk.running(worker="w1")
    crash(desk, "w1")
    bench = make()
    bench.run(lambda: bench.logged(twice) == bench.logged(once) == TOKENS)
    assert [bench.engine.steps[0], bench.first_steps()[f"{twice.uid}/0"]] == [
        [f"{once.uid}/0"],
        [f"{twice.uid}/0"],
    ]


def test_a_choice_that_crashed_three_workers_ends(desk: Desk, make: Make) -> None:
    request, [job] = desk.running(worker="w0")
    for index in range(1, 3):
        crash(desk, f"w{index - 1}")
        desk.open(f"w{index}")
        desk.start(job.entry, f"w{index}")
        desk.start(job.entry, f"w{index}", alone=True)
        desk.bus.do("XCLAIM", desk.sched, "sc", f"w{index}", 0, job.entry.id)
    crash(desk, "w2")
    bench = make()
    bench.run(desk.records)
    assert "error:crashed" in desk.records()[0]
    assert [fields[1].decode() for _, fields in desk.bus.do("XRANGE", desk.keys.dead(0), "-", "+")] == [
        request.uid
    ]
    assert bench.engine.added == []


def test_a_paused_suspect_holds_up_nobody(desk: Desk, make: Make) -> None:
    first, second = suspects(desk, 2)
    desk.bus.do("SADD", desk.keys.pause(0), first.uid)
    bench = make()
    fresh = desk.waiting()
    bench.run(lambda: bench.logged(second) == bench.logged(fresh) == TOKENS)
    assert not bench.logged(first)
    desk.bus.do("SREM", desk.keys.pause(0), first.uid)
    bench.run(lambda: bench.logged(first) == TOKENS)


def test_a_suspect_that_is_paused_on_trial_holds_up_nobody(
    desk: Desk, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = suspects(desk, 2)
    bench = make()
    steps = iter(range(1000))
    step = bench.engine._engine.step

    def pausing() -> list[Output]:  # it is chosen, started, and then has no output before it is paused
        if next(steps) == 0:
            desk.bus.do("SADD", desk.keys.pause(0), first.uid)
            return []
        return step() if desk.bus.do("SCARD", desk.keys.pause(0)) == 0 or bench.worker._paused else []

    monkeypatch.setattr(bench.engine._engine, "step", pausing)
    bench.run(lambda: bench.logged(second) == TOKENS)
    assert not bench.logged(first)
    desk.bus.do("SREM", desk.keys.pause(0), first.uid)
    bench.run(lambda: bench.logged(first) == TOKENS)


def test_a_waiting_suspect_can_be_cancelled(desk: Desk, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another one is on trial, for however long."""
    first, second = suspects(desk, 2)
    bench = make()
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine._engine, "step", list)  # a very long prompt
        bench.run(lambda: bench.worker.stats()["suspects"])
        desk.cancel(second.uid)
        bench.run(lambda: any(second.uid in record for record in desk.records()), 5)
    bench.run(lambda: bench.logged(first) == TOKENS)
    assert [request.key for request in bench.engine.added] == [f"{first.uid}/0"]
    assert desk.pending(desk.sched, "sc") == 0


def test_a_suspect_that_cannot_be_read_any_more_holds_up_nobody(desk: Desk, make: Make) -> None:
    first, second = suspects(desk, 2)
    bench = make()
    bench.worker._take_in(bench.engine)
    assert bench.worker.stats()["suspects"] == 2
    desk.bus.do("DEL", desk.keys.gen(first.uid, 0))
    desk.bus.do("RPUSH", desk.keys.gen(first.uid, 0), "not a log")
    bench.run(lambda: bench.logged(second) == TOKENS, 5)


def test_a_suspect_fits_beside_paused_rows_that_fill_the_cache(desk: Desk, make: Make) -> None:
    rows = [desk.running() for _ in range(3)]
    for _, [job] in rows:
        job.tokens = -90  # tokens of the fake vocabulary
        desk.generate(job, 1)
    [suspect] = suspects(desk, 1)
    engine, _ = build(num_blocks=9, block_size=1, max_model_len=8, max_num_seqs=3, new_token_ratio=0.01)
    bench = make(engine=engine)
    bench.run(lambda: bench.logged(suspect) and all(bench.logged(request) > 4 for request, _ in rows))
    assert bench.first_steps()[f"{suspect.uid}/0"] == [f"{suspect.uid}/0"]


# -- taking in ----------------------------------------------------------------------------------------------


def test_what_could_not_be_started_is_started_as_soon_as_redis_answers(
    desk: Desk, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "STRANDED_S", 1000.0)
    moved, fresh = desk.running()[0], None
    moved_too = desk.running()[0]
    desk.bus.run(leases.retire(desk.keys, 0, "scheduler-1", drained=True))
    fresh = [desk.waiting() for _ in range(3)]
    bench = make()
    run, run_many = desk.bus.run, desk.bus.run_many
    failures = iter([False, True, True, False, True])

    def failing(call):
        if call.script == "start" and next(failures, False):
            raise UnavailableError("not now")
        return run(call)

    def away(calls):
        if calls[0].script == "start":
            raise UnavailableError("not now")
        return run_many(calls)

    monkeypatch.setattr(desk.bus, "run", failing)
    monkeypatch.setattr(desk.bus, "run_many", away)
    before = time.monotonic()
    bench.run(lambda: len(bench.engine.added) == 5, 10)
    assert time.monotonic() - before < 5 * 3 * intake.AGAIN_S
    assert {request.key for request in bench.engine.added} == {
        f"{request.uid}/0" for request in (moved, moved_too, *fresh)
    }


def test_an_entry_that_redis_refuses_holds_up_no_other(desk: Desk, make: Make) -> None:
    broken, good = desk.waiting(), desk.waiting()
    desk.bus.do("DEL", desk.keys.gen(broken.uid, 0))
    desk.bus.do("RPUSH", desk.keys.gen(broken.uid, 0), "not a log")
    bench = make()
    bench.run(lambda: bench.logged(good) == TOKENS, 5)


def test_work_whose_claim_was_not_answered_is_found_at_once(
    desk: Desk, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "STRANDED_S", 1000.0)
    request, _ = desk.running()
    bench = make()
    bench.run(lambda: True)
    desk.bus.run(leases.retire(desk.keys, 0, "scheduler-1", drained=True))
    ask, lost = client._ask, []

    def losing(connection: Any, command: Any) -> Any:
        reply = ask(connection, command)
        if command[1:2] == (sha_of("claim_dead"),) and reply[2] and not lost:
            lost.append(reply)
            connection.disconnect()
            raise redis.exceptions.ConnectionError
        return reply

    monkeypatch.setattr(client, "_ask", losing)
    bench.run(lambda: bench.logged(request) == TOKENS, 5)
    assert lost


def test_entries_of_one_id_in_two_streams_are_two(desk: Desk, make: Make) -> None:
    """Ids are counted per stream, by the millisecond: on a busy server they meet."""
    other, held = Desk(desk.bus, partition=1), desk.waiting()
    [(entry_id, _)] = desk.bus.do("XRANGE", desk.sched, "-", "+")
    bench = make(engine=null(step_ms=50, max_model_len=2000))
    bench.run(lambda: bench.logged(held))
    request = other.queued()
    [entry] = other.read_in()
    bench.worker._intake.take_fresh = lambda rooms: None  # its reply is lost
    other.tok_done(request, entry)
    [(_, fields)] = desk.bus.do("XRANGE", other.sched, "-", "+")
    desk.bus.do("DEL", other.sched)
    other.reader(other.sched, "sc", "scheduler-2")
    desk.bus.do("XADD", other.sched, entry_id, *fields)
    [lost] = other.read_sched("scheduler-2")
    assert lost.id == entry_id.decode()
    bench.run(lambda: other.gen(request.uid), 10)


def test_tenant_salt_and_priority_survive_every_hand_off(desk: Desk, make: Make) -> None:
    """Admission, admission again after Redis lost it, two owners; the first two name its prefix cache."""
    request, [job] = desk.running()
    desk.generate(job, 2)
    crash(desk)
    lost = desk.queued()
    desk.bus.do("DEL", desk.keys.req(lost.uid))
    assert desk.admit(lost).code == "OK"
    for entry in desk.read_in(count=10):
        desk.tok_done(lost, entry)
    bench = make()
    bench.run(lambda: len(bench.engine.added) == 2, 5)
    assert {added.key: (added.salt, added.rank) for added in bench.engine.added} == {
        f"{each.uid}/0": ("6:tenantsalt", 3) for each in (request, lost)
    }


def test_interactive_entries_are_read_although_batch_fills_the_engine(desk: Desk, make: Make) -> None:
    batch = Desk(desk.bus, cls="batch")
    behind = [batch.waiting() for _ in range(6)]
    bench = make(engine=null(step_ms=10, max_num_seqs=4, max_model_len=180))
    bench.run(lambda: all(map(bench.logged, behind[:4])))
    assert batch.pending(batch.sched, "sc") == 4, "no more than there are rows"
    live = [desk.waiting() for _ in range(4)]
    bench.run(lambda: all(map(bench.logged, live)), 5)
    assert batch.pending(batch.sched, "sc") == 4, "none of them has ended"
    assert set(bench.engine.steps[-1]) == {f"{request.uid}/0" for request in live}
    assert {request.priority for request in bench.engine.added[4:]} == {0}
