"""A Redis that comes back without its last seconds: live workers bring them back, and nothing doubles.

The rollback is exact: every key is put back as it was, while the workers keep what they remember.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from common.bus.client import FencedError
from common.bus.handoffs import Emitted, Step
from common.bus.streams import Entry
from tests.helpers.bus import Desk
from tests.helpers.bus_actors import Detokenizer, Plan, Scheduler, Tokenizer, World, check_ended, published
from tests.helpers.redis_state import Copy, copy_of, put_back
from tests.helpers.waiting import until
from workers.scheduler.emitter import Emitter


@pytest.fixture
def world(desk: Desk) -> World:
    desk.open_tok()
    return World(desk)


def _admit(world: World, *lengths: int) -> str:
    request = world.desk.request(n=len(lengths))
    world.plans[request.uid] = Plan(len(world.plans), lengths, (None,) * len(lengths))
    world.requests[request.uid] = request
    world.desk.admit(request)
    return request.uid


def _tokenize(world: World, name: str = "tokenizer-1") -> None:
    tokenizer = Tokenizer(world, name)
    tokenizer.read(10)
    for entry in list(tokenizer.held.values()):
        tokenizer.finish(entry)


def _replay(scheduler: Scheduler) -> list[Emitted]:
    """What an emitter does when it is BEHIND: all it remembers from there on, in order."""
    bus = scheduler.desk.bus
    reply = bus.run(scheduler.desk.emit_call(Step(), scheduler.seq + 1, scheduler.name))
    assert reply.code == "BEHIND"
    replies = [bus.run(call) for call in scheduler.sent[reply.stored :]]
    for each in replies:
        scheduler.obey(each)
    return replies


def _race(world: World, old: Scheduler, new: Scheduler) -> None:
    """Both write as long as they may: each token comes once, from whoever is first, and the other is told."""
    [(uid, plan)] = world.plans.items()
    for scheduler in (old, new, old, new, old):
        if scheduler.jobs:
            scheduler.emit(list(scheduler.jobs))
        log = world.desk.gen(uid)
        assert log is not None
        assert plan.log(0).startswith(log)
    assert not old.jobs, "the entry is not its own: it is refused, or the work has ended"


def _finish(world: World, scheduler: Scheduler, detokenizer: Detokenizer) -> None:
    scheduler.find_stranded()
    scheduler.read(10)
    for _ in range(10):
        if scheduler.jobs:
            assert scheduler.emit(list(scheduler.jobs)).refused == ()
    while call := detokenizer.prepare(5):
        assert detokenizer.commit(call).code == "OK"
    check_ended(world, {})


def test_lost_steps_are_sent_again(world: World) -> None:
    _admit(world, 6, 3)
    _tokenize(world)
    scheduler, detokenizer = Scheduler(world, "scheduler-1"), Detokenizer(world, "detokenizer-1")
    detokenizer.take()
    scheduler.read(10)
    scheduler.emit(list(scheduler.jobs))
    before = copy_of(world.desk.bus)
    for _ in range(3):
        scheduler.emit(list(scheduler.jobs))
    put_back(world.desk.bus, before)
    assert [reply.code for reply in _replay(scheduler)] == ["OK", "OK", "OK"]
    _finish(world, scheduler, detokenizer)


def test_lost_commits_are_made_again(world: World) -> None:
    uid = _admit(world, 8)
    _tokenize(world)
    scheduler, detokenizer = Scheduler(world, "scheduler-1"), Detokenizer(world, "detokenizer-1")
    detokenizer.take()
    scheduler.read(10)
    before: Copy = {}
    for step in range(6):
        scheduler.emit(list(scheduler.jobs))
        detokenizer.commit(detokenizer.prepare(5))
        if step == 2:
            before = copy_of(world.desk.bus)
    seen = published(world.desk.out(uid), 0)
    put_back(world.desk.bus, before)
    time.sleep(0.002)  # names of entries are milliseconds, and the server's clock went on
    _replay(scheduler)
    stale = detokenizer.prepare(5)
    assert stale is not None
    assert detokenizer.commit(stale).code == "MOVED"
    detokenizer.commit(detokenizer.prepare(5))
    assert published(world.desk.out(uid), 0) == seen
    _finish(world, scheduler, detokenizer)


@pytest.mark.parametrize("first", ["old", "new"])
@pytest.mark.parametrize("lost", ["the start", "the hand-off"])
def test_two_owners_after_a_lost_start(world: World, lost: str, first: str) -> None:
    """Redis has forgotten who had read the entry; somebody else reads it, and the first replays."""
    _admit(world, 7)
    old, new = Scheduler(world, "scheduler-1"), Scheduler(world, "scheduler-2")
    detokenizer = Detokenizer(world, "detokenizer-1")
    detokenizer.take()
    tokenizer = Tokenizer(world, "tokenizer-1")
    before = copy_of(world.desk.bus)
    tokenizer.read(1)
    tokenizer.finish(next(iter(tokenizer.held.values())))
    if lost == "the start":
        before = copy_of(world.desk.bus)
    old.read(1)
    for _ in range(3):
        old.emit(list(old.jobs))
    put_back(world.desk.bus, before)
    if lost == "the hand-off":
        time.sleep(0.002)
        _tokenize(world, "tokenizer-2")
    if first == "old":
        assert [reply.refused for reply in _replay(old)] == [()] * 3
    new.read(1)
    new.emit(list(new.jobs))
    if first == "new":
        assert _replay(old)[0].refused, "it is not the first to write there"
    _race(world, old, new)
    _finish(world, new, detokenizer)


def test_a_request_that_was_lost_whole_is_admitted_again(world: World) -> None:
    """The API puts it back under the same id, while its old scheduler still replays."""
    desk = world.desk
    old, new = Scheduler(world, "scheduler-1"), Scheduler(world, "scheduler-2")
    detokenizer = Detokenizer(world, "detokenizer-1")
    detokenizer.take()
    before = copy_of(desk.bus)
    uid = _admit(world, 5)
    _tokenize(world)
    old.read(1)
    for _ in range(2):
        old.emit(list(old.jobs))
    put_back(desk.bus, before)
    time.sleep(0.002)
    assert desk.admit(world.requests[uid]).code == "OK"
    _tokenize(world, "tokenizer-2")
    new.read(1)
    new.emit(list(new.jobs))
    _replay(old)
    _race(world, old, new)
    _finish(world, new, detokenizer)


# -- the scheduler's own emitter --------------------------------------------------------------------------


class Bench:
    """An emitter with one job, and what it reports."""

    def __init__(self, world: World) -> None:
        self.replies: list[Emitted] = []
        self.scheduler = Scheduler(world, "scheduler-1")
        self.emitter = Emitter(
            world.desk.bus,
            world.desk.keys,
            1,
            worker="scheduler-1",
            on_reply=lambda _partition, _step, reply: self.replies.append(reply),
        )

    def step(self) -> None:
        self.pump_until(lambda: not self.emitter.full())
        self.emitter.submit({0: self.scheduler.build(list(self.scheduler.jobs))})
        self.emitter.pump()

    def settle(self) -> None:
        self.pump_until(self.emitter.idle)

    def pump_until(self, done: Callable[[], bool]) -> None:
        until(lambda: self.emitter.pump() or done(), "the emitter is done", timeout=5, every=0.001)


@pytest.fixture
def bench(world: World) -> Iterator[Bench]:
    _admit(world, 9)
    _tokenize(world)
    made = Bench(world)
    made.scheduler.read(1)
    yield made
    made.emitter.stop(5.0)


def _log(world: World, entry: Entry) -> str | None:
    return world.desk.gen(entry.uid, entry.choice)


def test_the_emitter_replays_what_redis_lost(world: World, bench: Bench) -> None:
    [job] = bench.scheduler.jobs.values()
    bench.step()
    bench.settle()
    before = copy_of(world.desk.bus)
    for _ in range(4):
        bench.step()
    bench.settle()
    whole = _log(world, job.entry)
    put_back(world.desk.bus, before)
    assert _log(world, job.entry) != whole
    bench.pump_until(lambda: _log(world, job.entry) == whole)  # an idle emitter notices by its tick
    bench.step()
    bench.settle()
    assert _log(world, job.entry) == job.log == world.plans[job.entry.uid].log(0)[: len(job.log)]


def test_the_emitter_stops_when_it_is_fenced(world: World, bench: Bench) -> None:
    bench.step()
    bench.settle()
    world.desk.bus.do("HSET", world.desk.keys.lease(0, "scheduler-1"), "dead", 1)
    with pytest.raises(FencedError):
        bench.pump_until(lambda: bool(bench.step()))
    begun = time.monotonic()
    bench.emitter.stop(5.0)  # asks nothing more: it has its answer
    assert time.monotonic() - begun < 1
