"""Logprobs on their way through EMIT: rows without a token, and what comes of them when owners change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.bus import leases
from common.bus.handoffs import EmitRow, Step
from common.messages import TokRecord, format_record, parse_records
from common.sampling import SamplingParams
from tests.helpers.bus import LEASE_MS, Desk, Job, Steady
from tests.helpers.redis_state import contents, copy_of, put_back
from tests.helpers.waiting import until
from workers.engine.null import NullEngine, logprobs_at, token_at
from workers.scheduler.worker import SchedulerWorker

VOCAB = 49152
PROMPT = tuple((at * 31 + 5) % VOCAB for at in range(150))
#: Tokens that are asked for.
TOKENS = 5


def prompt_row(job: Job, start: int) -> EmitRow:
    """A row with nothing but logprobs of the prompt."""
    record = TokRecord(job.entry.uid, job.entry.choice, job.tokens, None, prompt=f"{start};-1.5,7:-1.5")
    return EmitRow(job.entry.uid, job.entry.choice, format_record(record), "", len(job.log))


# -- EMIT -------------------------------------------------------------------------------------------------


def test_rows_without_a_piece_come_as_often_as_they_like(desk: Desk) -> None:
    """Over several steps, several in one, beside a token of their choice, and at its end."""
    request, [job] = desk.running()
    life = desk.bus.do("PTTL", desk.keys.gen(request.uid, 0))
    for start in (1, 2):
        assert desk.emit(Step((prompt_row(job, start),))).refused == ()
        assert desk.gen(request.uid) == ""
    last = (prompt_row(job, 3), prompt_row(job, 4), desk.row(job, 7))
    assert desk.emit(Step(last)).refused == ()
    assert desk.gen(request.uid) == "7,"
    assert desk.emit(Step((prompt_row(job, 5),))).refused == ()
    assert desk.emit(Step((desk.row(job, None, "length"),), (desk.end(job),))).refused == ()
    assert 0 < desk.bus.do("PTTL", desk.keys.gen(request.uid, 0)) <= life
    parsed = [record for text in desk.records() for record in parse_records(text)]
    assert [record.prompt[:1] for record in parsed] == ["1", "2", "3", "4", "", "5", ""]
    assert [record.token for record in parsed] == [None, None, None, None, 7, None, None]
    assert desk.pending(desk.sched, "sc") == 0


def test_a_repeated_step_of_them_changes_nothing(desk: Desk) -> None:
    _, [job] = desk.running()
    step = Step((prompt_row(job, 1), prompt_row(job, 2)))
    desk.emit(step)
    before = contents(desk.bus)
    assert desk.bus.run(desk.emit_call(step, 1)).backlog == 1
    assert contents(desk.bus) == before


@pytest.mark.parametrize("tokens", [0, 2])
def test_without_their_log_they_are_refused_and_make_none(desk: Desk, tokens: int) -> None:
    request, [job] = desk.running()
    _, [other] = desk.running()
    desk.generate(job, tokens)
    desk.bus.do("DEL", desk.keys.gen(request.uid, 0))
    seen = len(desk.records())
    reply = desk.emit(Step((prompt_row(job, 1), prompt_row(other, 1))))
    assert reply.refused == ((request.uid, 0),)
    assert desk.gen(request.uid) is None
    assert [parse_records(text)[0].uid for text in desk.records()[seen:]] == [other.entry.uid]


@pytest.mark.parametrize("log", ["", "100,101,", "100,101,102,103,"])
def test_beside_a_log_of_another_length_they_are_refused(desk: Desk, log: str) -> None:
    """Another worker got the choice. The end is its business, too."""
    request, [job] = desk.running()
    desk.generate(job, 3)
    seen = len(desk.records())
    desk.bus.do("SET", desk.keys.gen(request.uid, 0), log, "KEEPTTL")
    rows = (prompt_row(job, 1), desk.row(job, None, "length"))
    reply = desk.emit(Step(rows, (desk.end(job),)))
    assert set(reply.refused) == {(request.uid, 0)}
    assert (desk.gen(request.uid), len(desk.records())) == (log, seen)
    assert desk.bus.do("PTTL", desk.keys.gen(request.uid, 0)) > 0
    assert desk.pending(desk.sched, "sc") == 1


# -- the scheduler ----------------------------------------------------------------------------------------


class Bench:
    """A scheduler over a null engine, stepped by the test."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.desk, self.name = desk, name
        engine = NullEngine(step_ms=0, max_num_seqs=8, max_model_len=200, vocab_size=VOCAB)
        self.worker = SchedulerWorker(
            desk.bus, desk.keys, lambda: engine,
            model=desk.model, worker=name, partitions=2, lease_ms=LEASE_MS, steadiness=Steady(),
            announce=lambda: None,
        )  # fmt: skip
        for partition in range(2):
            desk.bus.run(leases.renew(desk.keys, partition, name, 60_000, opening=True))
        self.worker.startup()

    def run_until_ended(self) -> None:
        def ended() -> bool:
            self.worker.step()
            return self.desk.pending(self.desk.sched, "sc") == 0

        until(ended, "the work has ended", 20, every=0.0)

    def run_until_rows(self, count: int) -> None:
        def sent() -> bool:
            self.worker.step()
            return len(self.desk.records()) >= count

        until(sent, "rows were sent", 20, every=0.0)

    def crash(self) -> None:
        """Its process is gone, and a supervisor has said so."""
        for partition in range(2):
            self.desk.bus.run(leases.retire(self.desk.keys, partition, self.name, drained=False))
        self.worker.shutdown()


@pytest.fixture
def benches(desk: Desk) -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.worker.shutdown()


def begin(desk: Desk, benches: list[Bench], **params: int) -> Bench:
    """A scheduler with one request of two choices."""
    desk.params = SamplingParams(**{"seed": 7, "max_tokens": TOKENS, **params})
    request = desk.queued(n=2)
    [entry] = desk.read_in()
    desk.tok_done(request, entry, [PROMPT])
    benches.append(Bench(desk, "scheduler-1"))
    return benches[-1]


def records(desk: Desk, choice: int) -> list[TokRecord]:
    """What was sent of a choice."""
    return [record for text in desk.records() for record in parse_records(text) if record.choice == choice]


def numbers(words: str) -> tuple[float, dict[int, float]]:
    logprob, *top = words.split(",")
    pairs = (pair.split(":") for pair in top)
    return float(logprob), {int(number): float(value) for number, value in pairs}


def check_prompt(sent: list[TokRecord]) -> int:
    """Every position from 1 on, with no gap; gives how often it began anew."""
    nearest, begun = 0, 0
    for record in sent:
        start, *stretch = record.prompt.split(";")
        assert (record.token, record.end, record.index) == (None, "", 0)
        assert int(start) in (1, nearest + 1)
        begun += start == "1"
        for nearest, words in enumerate(stretch, int(start)):
            wanted = logprobs_at(PROMPT[nearest], nearest, 3, vocab_size=VOCAB)
            assert numbers(words) == (wanted.logprob, dict(wanted.top))
    assert nearest == len(PROMPT) - 1
    return begun


def check_tokens(sent: list[TokRecord], choice: int, count: int = TOKENS) -> None:
    assert [record.token for record in sent] == [token_at(7 + choice, index) for index in range(count)]
    for index, record in enumerate(sent):
        assert record.token is not None
        wanted = logprobs_at(record.token, index, 2, vocab_size=VOCAB)
        assert numbers(record.logprobs) == (wanted.logprob, dict(wanted.top))
    assert [record.end for record in sent] == [""] * (count - 1) + ["length"]


def test_every_choice_is_sent_with_its_logprobs_and_those_of_the_prompt(
    desk: Desk, benches: list[Bench]
) -> None:
    begin(desk, benches, logprobs=2, prompt_logprobs=3).run_until_ended()
    for choice in (0, 1):
        sent = records(desk, choice)
        assert check_prompt([record for record in sent if record.prompt]) == 1
        check_tokens([record for record in sent if not record.prompt], choice)
        assert [bool(record.prompt) for record in sent] == [True] * 3 + [False] * TOKENS


def test_without_being_asked_none_are_sent(desk: Desk, benches: list[Bench]) -> None:
    begin(desk, benches).run_until_ended()
    assert not [text for text in desk.records() if "=" in text]


def test_a_request_for_no_tokens_ends_with_its_prompt(desk: Desk, benches: list[Bench]) -> None:
    begin(desk, benches, max_tokens=0, logprobs=2, prompt_logprobs=3).run_until_ended()
    for choice in (0, 1):
        *sent, last = records(desk, choice)
        assert check_prompt(sent) == 1
        assert (last.token, last.end, last.index, last.logprobs) == (None, "length", 0, "")


def test_a_new_owner_sends_the_prompt_again_if_there_is_no_token(desk: Desk, benches: list[Bench]) -> None:
    """Nothing tells how much of it was sent. That it was sent is no progress: the crash counts."""
    bench = begin(desk, benches, max_tokens=0, prompt_logprobs=3)
    bench.run_until_rows(2)
    assert not [record for record in records(desk, 0) if record.end]
    bench.crash()
    benches.append(Bench(desk, "scheduler-2"))
    benches[-1].run_until_ended()
    [uid] = {record.uid for record in records(desk, 0)}
    assert desk.bus.do("HGET", desk.keys.req(uid), "attempts:0") == b"1"
    for choice in (0, 1):
        *sent, last = records(desk, choice)
        assert check_prompt(sent) == 2
        assert last.end == "length"


def test_a_new_owner_sends_no_prompt_of_which_there_are_tokens(desk: Desk, benches: list[Bench]) -> None:
    bench = begin(desk, benches, max_tokens=30, logprobs=2, prompt_logprobs=3)
    bench.run_until_rows(2 * 3 + 2 * 4)
    bench.crash()
    sent_before = len(desk.records())
    benches.append(Bench(desk, "scheduler-2"))
    benches[-1].run_until_ended()
    assert not [text for text in desk.records()[sent_before:] if "plp=" in text]
    for choice in (0, 1):
        sent = records(desk, choice)
        assert check_prompt([record for record in sent if record.prompt]) == 1
        check_tokens([record for record in sent if not record.prompt], choice, 30)


def test_a_redis_that_rolled_back_gets_all_of_it_again(desk: Desk, benches: list[Bench]) -> None:
    bench = begin(desk, benches, logprobs=2, prompt_logprobs=3)
    bench.run_until_rows(2)
    before = copy_of(desk.bus)
    bench.run_until_ended()
    put_back(desk.bus, before)
    bench.run_until_ended()
    for choice in (0, 1):
        sent = records(desk, choice)
        assert check_prompt([record for record in sent if record.prompt]) == 1
        check_tokens([record for record in sent if not record.prompt], choice)
