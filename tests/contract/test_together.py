"""What travels together is kept apart where it matters: one commit, one job, one loop's signs of life."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from common.bus import leases
from common.bus.client import Bus, BusFullError
from common.bus.leases import Progress
from common.errors import UnavailableError
from common.messages import Request
from tests.helpers.bus import LEASE_MS, TTL_MS, Desk, Steady
from tests.helpers.text import bundled_codec
from tests.helpers.waiting import until
from workers.detokenizer.choices import Choices
from workers.detokenizer.loop import Loop
from workers.detokenizer.partition import Partition
from workers.text.stream import TextStreams
from workers.tokenizer.worker import TokenizerWorker

# -- detokenizer --------------------------------------------------------------------------------------------


def test_a_commit_whose_answer_was_lost_is_known_for_made(desk: Desk) -> None:
    desk.open_tok()
    choices = Choices(desk.bus, desk.keys, TextStreams(bundled_codec()))
    partition = Partition(desk.bus, desk.keys, 0, desk.take_partition(), choices, name="me", ttl_ms=TTL_MS)
    request, [job] = desk.running()
    desk.generate(job, 2)
    partition.ask()
    select.select([partition], [], [], 5)
    call = partition.take()
    assert call is not None
    desk.bus.run(call)
    again = desk.bus.run(call)
    assert again.code == "MOVED"
    partition.settle(again)
    assert choices._states, "the decoders were thrown away"
    partition.ask()
    desk.generate(job, 1)
    select.select([partition], [], [], 5)
    call = partition.take()
    assert call is not None
    assert desk.bus.run(call).code == "OK"
    assert [entry.n for entry in desk.out(request.uid)[1:]] == [1, 2, 3]
    partition.close()


class Slow:
    """A partition whose Redis hangs: all it does takes long."""

    waiting = False

    def __init__(self, number: int) -> None:
        self.number = number

    def ask(self) -> None:
        time.sleep(0.1)
        raise UnavailableError

    def check(self) -> None: ...
    def recover(self, error: Exception) -> None: ...
    def close(self) -> None: ...


def test_a_redis_that_hangs_is_no_lack_of_progress(desk: Desk) -> None:
    """Each of many partitions waits for it in turn."""
    progress = Progress(hang_s=0.5)
    loop = Loop(desk.bus, progress=progress, on_fenced=lambda _: None)
    for number in range(10):
        loop.add(cast("Partition", Slow(number)))
    loop.start()
    wedged = []
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        wedged += progress.wedged()
        time.sleep(0.01)
    loop.stop(5)
    assert wedged == []


class Quick(Slow):
    """A partition with something to commit, and how long its reading takes."""

    waiting = True

    def __init__(self, number: int, file: socket.socket, seconds: float) -> None:
        super().__init__(number)
        self._file = file
        self._seconds = seconds
        self.settled = 0.0

    def fileno(self) -> int:
        return self._file.fileno()

    def ask(self) -> None: ...

    def take(self) -> object:
        time.sleep(self._seconds)
        return object()

    def settle(self, outcome: object) -> None:
        self.settled = self.settled or time.monotonic()


class Obliging:
    """A bus on which every exchange succeeds."""

    def run_many(self, calls: Sequence[object]) -> list[object]:
        return list(calls)


def test_nobody_waits_for_a_partition_that_takes_long(desk: Desk) -> None:
    """It was taken over in the middle of many choices, say: others commit before it has been read."""
    loop = Loop(cast("Bus", Obliging()), progress=Progress(), on_fenced=lambda _: None)
    readable, other = socket.socketpair()
    with readable, other:
        other.send(b"news")
        copies = [readable.dup() for _ in range(2)]
        parts = [Quick(0, copies[0], 0.1), Quick(1, copies[1], 1.0)]
        for part in parts:
            loop.add(cast("Partition", part))
        loop.start()
        until(lambda: parts[1].settled, "both have committed", every=0.01)
        loop.stop(5)
        for copy in copies:
            copy.close()
    assert parts[0].settled < parts[1].settled - 0.9


# -- tokenizer ----------------------------------------------------------------------------------------------


class Tokenizer:
    """A worker that is stepped by the test, and whose work takes as long as the prompt says."""

    def __init__(self, desk: Desk) -> None:
        self.worker = TokenizerWorker(
            desk.bus, desk.keys, lambda: self._work,
            model=desk.model, max_model_len=100, worker="tokenizer-1", partitions=1, lease_ms=LEASE_MS,
            steadiness=Steady(), ttl_ms=TTL_MS, life_ms=TTL_MS,
        )  # fmt: skip
        desk.bus.run(leases.renew(desk.keys, 0, "tokenizer-1", 60_000, opening=True))
        self.worker.startup()
        self.done: list[str] = []
        self.seen: list[tuple[str, list[str]]] = []
        self.desk = desk

    def _work(self, request: Request, limit: int) -> tuple[list[list[int]], str]:
        waiting = [uid for uid in self.done if self.desk.req(uid)["state"] == "queued"]
        self.seen.append((request.uid, waiting))
        self.done.append(request.uid)
        return [[1, 2, 3]], ""


@pytest.fixture
def tokenizer(desk: Desk) -> Iterator[Tokenizer]:
    made = Tokenizer(desk)
    yield made
    made.worker.shutdown()


def test_jobs_that_come_together_are_handed_off_together(desk: Desk, tokenizer: Tokenizer) -> None:
    requests = [desk.queued() for _ in range(5)]
    until(lambda: tokenizer.worker.step() or len(tokenizer.done) == 5, "all are done", every=0)
    assert {desk.req(request.uid)["state"] for request in requests} == {"waiting"}
    assert any(waiting for _, waiting in tokenizer.seen), "each was handed off alone"


def test_nobody_waits_for_a_long_prompt(desk: Desk, tokenizer: Tokenizer) -> None:
    desk.queued()
    long = desk.request(payload="x" * 10_000)
    desk.admit(long)
    until(lambda: tokenizer.worker.step() or len(tokenizer.done) == 2, "both are done", every=0)
    assert (long.uid, []) in tokenizer.seen


def test_what_redis_cannot_take_now_is_handed_off_later(
    desk: Desk, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = desk.queued()
    with monkeypatch.context() as patched:
        patched.setattr(desk.bus, "run_many", lambda calls: [BusFullError()] * len(calls))
        with pytest.raises(UnavailableError):
            until(tokenizer.worker.step, "never")
        assert tokenizer.worker.busy()
    tokenizer.worker.step()
    assert desk.req(request.uid)["state"] == "waiting"
    assert not tokenizer.worker.busy()
    assert tokenizer.done == [request.uid]
