"""What can happen on the bus, one move at a time: to be drawn in any order.

A move says when it is possible and how often it is to be chosen. Each asserts what it can see at once:
what must be refused is refused, and what must change nothing changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st

from common.bus import leases
from common.bus.client import Bus, FencedError
from common.bus.handoffs import Step
from tests.helpers.bus import Desk
from tests.helpers.bus_actors import Consumer, Detokenizer, Plan, Scheduler, Tokenizer, World
from tests.helpers.redis_state import fingerprint

MAX_REQUESTS = 8

T = TypeVar("T")
Data = st.DataObject
_SHAPES = st.lists(
    st.tuples(st.integers(1, 9), st.one_of(st.none(), st.integers(1, 9))), min_size=1, max_size=3
)


@dataclass(frozen=True, slots=True)
class Move:
    """One kind of event."""

    weight: int
    when: Callable[[Any], object]
    run: Callable[[Any, Data], None]


MOVES: dict[str, Move] = {}


def move(weight: int, when: Callable[[Stage], object] = lambda _: True) -> Callable[..., Any]:
    """Makes a method of `Stage` a move."""

    def register(method: Callable[[Any, Data], None]) -> Callable[[Any, Data], None]:
        MOVES[method.__name__] = Move(weight, when, method)
        return method

    return register


class Stage:
    """One partition, two live workers of each role, and the ghosts of those before them."""

    #: Names of moves that are not made here.
    without: frozenset[str] = frozenset()
    #: Redis forgets nothing, so nobody is ever refused or surprised without a reason that can be seen.
    strict = True

    def __init__(self, bus: Bus) -> None:
        bus.do("FLUSHALL")
        self.desk = Desk(bus)
        self.desk.open_tok()
        self.world = World(self.desk)
        self._born = 0
        self.tokenizers = [Tokenizer(self.world, self._name("tokenizer")) for _ in range(2)]
        self.schedulers = [Scheduler(self.world, self._name("scheduler")) for _ in range(2)]
        self.detokenizers = [Detokenizer(self.world, self._name("detokenizer")) for _ in range(2)]
        self.ghosts: list[Scheduler] = []
        self.dead: list[str] = []
        #: The errors with which each request may end, after what was done to it.
        self.may_fail: dict[str, set[str]] = {}

    def play(self, data: Data) -> str:
        """Draws a move that is possible now, and makes it; returns its name."""
        moves = sorted(MOVES.items(), key=lambda item: -item[1].weight)
        possible = [item for item in moves if item[0] not in self.without and item[1].when(self)]
        names = [name for name, each in possible for _ in range(each.weight)]
        # Spread by a multiplication: hypothesis prefers the ends of a range, and would prefer some moves.
        spread = data.draw(st.integers(0, 2**32 - 1)) * 2_654_435_761 % 2**32
        name = names[spread * len(names) >> 32]
        MOVES[name].run(self, data)
        return name

    def _name(self, role: str) -> str:
        self._born += 1
        return f"{role}-{self._born}"

    def unchanged(self, action: Callable[[], T]) -> T:
        """Runs what must change nothing."""
        before = fingerprint(self.desk.bus)
        reply = action()
        assert fingerprint(self.desk.bus) == before
        return reply

    def fenced(self, action: Callable[[], object]) -> None:
        """Runs what must be refused."""

        def refused() -> None:
            with pytest.raises(FencedError):
                action()

        self.unchanged(refused)

    def bury(self, name: str, *, drained: bool) -> None:
        self.desk.bus.run(leases.retire(self.desk.keys, 0, name, drained=drained))
        self.dead.append(name)

    @property
    def busy(self) -> list[Scheduler]:
        return [scheduler for scheduler in self.schedulers if scheduler.jobs]

    @property
    def owner(self) -> Detokenizer | None:
        """The detokenizer whose epoch is the current one, if it is one of the living."""
        epoch = int(self.desk.bus.do("HGET", self.desk.keys.detok_lease(0), "epoch") or 0)
        return next((each for each in self.detokenizers if epoch and each.epoch == epoch), None)

    # -- clients ------------------------------------------------------------------------------------------

    @move(weight=8, when=lambda stage: len(stage.world.plans) < MAX_REQUESTS)
    def admit(self, data: Data) -> None:
        shape, bad = data.draw(_SHAPES), data.draw(st.integers(0, 7)) == 0
        request = self.desk.request(n=len(shape))
        lengths, stops = tuple(a for a, _ in shape), tuple(b for _, b in shape)
        self.world.plans[request.uid] = Plan(len(self.world.plans), lengths, stops, bad)
        self.world.requests[request.uid] = request
        self.may_fail[request.uid] = {"context"} if bad else set()
        assert self.desk.admit(request).code == "OK"

    @move(weight=1, when=lambda stage: stage.world.plans)
    def admit_again(self, data: Data) -> None:
        request = self.world.requests[self._any(data)]
        assert self.unchanged(lambda: self.desk.admit(request)).code == "DUP"

    @move(weight=3, when=lambda stage: stage.world.plans)
    def cancel(self, data: Data) -> None:
        uid = self._any(data)
        req = self.desk.req(uid)
        if not req or "terminal" in req:
            assert self.unchanged(lambda: self.desk.cancel(uid)) == "NONE"
            return
        self.may_fail[uid].add("cancelled")
        if data.draw(st.booleans()):  # with redis-cli; a sweep finds it later
            self.desk.bus.do("SADD", self.desk.keys.cancel(0), uid)
        else:
            self.desk.cancel(uid)

    @move(weight=2)
    def sweep_flags(self, data: Data) -> None:
        for member in self.desk.members(self.desk.keys.cancel(0)):
            if "/" not in member:
                self.desk.cancel(member)

    @move(weight=3, when=lambda stage: stage.world.plans)
    def expire(self, data: Data) -> None:
        uid = self._any(data)
        req = self.desk.req(uid)
        if req:
            self.desk.overdue(uid)
        if "terminal" not in req:
            self.may_fail[uid] |= {"deadline", "unavailable", "cancelled"}
        self.desk.expire(uid, self._owner_of(uid))

    def _any(self, data: Data) -> str:
        return data.draw(st.sampled_from(list(self.world.plans)))

    def _owner_of(self, uid: str) -> str:
        """As a sweep finds it: who runs a choice that has not ended."""
        req = self.desk.req(uid)
        choices = [name.partition(":")[2] for name in req if name.startswith("owner:")]
        return next((req[f"owner:{choice}"] for choice in choices if f"ended:{choice}" not in req), "")

    # -- tokenizers and schedulers ------------------------------------------------------------------------

    @move(weight=12, when=lambda stage: stage.unread(stage.tokenizers))
    def tokenizer_reads(self, data: Data) -> None:
        self._read(data, self.tokenizers)

    @move(weight=15, when=lambda stage: stage.unread(stage.schedulers))
    def scheduler_reads(self, data: Data) -> None:
        self._read(data, self.schedulers)

    def _read(self, data: Data, consumers: Sequence[Consumer]) -> None:
        consumer = data.draw(st.sampled_from(consumers))
        consumer.read(data.draw(st.integers(1, 4)), lost=data.draw(st.integers(0, 5)) == 5)

    def unread(self, consumers: Sequence[Consumer]) -> int:
        """Entries that wait for any of them."""
        reader = consumers[0].reader
        return int(self.desk.bus.do("XLEN", reader.stream)) - self.desk.pending(reader.stream, reader.group)

    @move(weight=4)
    def consumer_looks_for_lost_replies(self, data: Data) -> None:
        data.draw(st.sampled_from([*self.tokenizers, *self.schedulers])).find_stranded()

    @move(weight=15, when=lambda stage: any(each.held for each in stage.tokenizers))
    def tokenizer_finishes(self, data: Data) -> None:
        tokenizer = data.draw(st.sampled_from([each for each in self.tokenizers if each.held]))
        entry = data.draw(st.sampled_from(list(tokenizer.held.values())))
        tokenizer.finish(entry)
        if data.draw(st.booleans()):
            self.unchanged(lambda: tokenizer.finish(entry))

    @move(weight=2)
    def tokenizer_dies(self, data: Data) -> None:
        who = data.draw(st.integers(0, 1))
        self.bury(self.tokenizers[who].name, drained=data.draw(st.booleans()))
        self.tokenizers[who] = Tokenizer(self.world, self._name("tokenizer"))

    @move(weight=40, when=lambda stage: stage.busy)
    def scheduler_steps(self, data: Data) -> None:
        scheduler = data.draw(st.sampled_from(self.busy))
        jobs = sorted(scheduler.jobs)
        ids = data.draw(st.one_of(st.just(jobs), st.lists(st.sampled_from(jobs), unique=True, min_size=1)))
        assert scheduler.emit(ids).refused == () or not self.strict

    @move(weight=2)
    def scheduler_listens(self, data: Data) -> None:
        self.unchanged(data.draw(st.sampled_from(self.schedulers)).tick)

    @move(weight=6, when=lambda stage: any(each.sent for each in stage.schedulers))
    def scheduler_repeats_a_step(self, data: Data) -> None:
        sent = [call for each in self.schedulers for call in each.sent[-3:]]
        call = data.draw(st.sampled_from(sent))
        assert self.unchanged(lambda: self.desk.bus.run(call)).code == "OK"

    @move(weight=3, when=lambda stage: stage.busy)
    def scheduler_skips_a_number(self, data: Data) -> None:
        scheduler = data.draw(st.sampled_from(self.busy))
        call = self.desk.emit_call(Step(), scheduler.seq + data.draw(st.integers(2, 3)), scheduler.name)
        reply = self.unchanged(lambda: self.desk.bus.run(call))
        assert (reply.code, reply.stored) == ("BEHIND", scheduler.seq)

    @move(weight=3, when=lambda stage: stage.busy)
    def scheduler_asks_again(self, data: Data) -> None:
        scheduler = data.draw(st.sampled_from(self.busy))
        job = data.draw(st.sampled_from(list(scheduler.jobs.values())))
        self.unchanged(lambda: self.desk.start(job.entry, scheduler.name))

    @move(weight=4, when=lambda stage: stage.busy)
    def scheduler_dies(self, data: Data) -> None:
        """Silence is a SIGSTOP: its lease runs out, and it may come back as a zombie."""
        old = data.draw(st.sampled_from(self.busy))
        how = data.draw(st.sampled_from(["crash", "drain", "silence"]))
        if how == "silence":
            self.desk.expire_lease(old.name)
            self.dead.append(old.name)
        else:
            self.bury(old.name, drained=how == "drain")
        self.ghosts.append(old)
        self.schedulers[self.schedulers.index(old)] = Scheduler(self.world, self._name("scheduler"))

    @move(weight=6, when=lambda stage: stage.ghosts)
    def zombie_wakes(self, data: Data) -> None:
        """Until somebody took over it is in its rights; afterwards everything it sends is refused."""
        ghost = data.draw(st.sampled_from(self.ghosts))
        ids = list(ghost.jobs)[:1]
        if self.desk.bus.do("HGET", self.desk.keys.lease(0, ghost.name), "dead") != b"1":
            if ids:
                assert ghost.emit(ids).refused == () or not self.strict
            return
        ghost.reader.read(1)  # reading is not fenced: what it gets must move on as well
        if ids:
            entry = ghost.jobs[ids[0]].entry
            call = self.desk.emit_call(ghost.build(ids), ghost.seq + 1, ghost.name)
            self.fenced(lambda: self.desk.bus.run(call))
            self.fenced(lambda: self.desk.start(entry, ghost.name))
        self.fenced(ghost.tick)
        self.ghosts.remove(ghost)

    @move(weight=8, when=lambda stage: stage.dead)
    def work_is_taken_over(self, data: Data) -> None:
        name = data.draw(st.sampled_from(self.dead))
        heirs: Sequence[Consumer] = self.tokenizers if name.startswith("tokenizer") else self.schedulers
        heir = data.draw(st.sampled_from(heirs))
        assert heir.claim(name, expired_ok=True, lost=data.draw(st.integers(0, 4)) == 4)

    @move(weight=2, when=lambda stage: stage.busy)
    def the_living_are_not_robbed(self, data: Data) -> None:
        robber, victim = self.schedulers
        assert not self.unchanged(lambda: robber.claim(victim.name, expired_ok=True))

    # -- detokenizers -------------------------------------------------------------------------------------

    @move(weight=20, when=lambda stage: stage.owner)
    def owner_commits(self, data: Data) -> None:
        owner = self.owner
        assert owner is not None
        call = owner.prepare(data.draw(st.integers(1, 3)))
        fate = data.draw(st.sampled_from(["sent", "sent", "reply lost", "not sent"]))
        if call is None or fate == "not sent":
            owner.forget()
        else:
            reply = owner.commit(call, lost=fate == "reply lost")
            assert reply.code == "OK" or not self.strict

    @move(weight=6, when=lambda stage: any(each.last for each in stage.detokenizers))
    def a_commit_is_repeated(self, data: Data) -> None:
        """By its owner, who did not hear the answer, or by a zombie."""
        who = data.draw(st.sampled_from([each for each in self.detokenizers if each.last]))
        call = who.last
        assert call is not None
        if call.args[0] != (self.owner.epoch if self.owner else None):
            self.fenced(lambda: self.desk.bus.run(call))
            return
        reply = self.unchanged(lambda: self.desk.bus.run(call))
        assert (reply.code, reply.offset) == ("MOVED", self.desk.stored())

    @move(weight=5)
    def partition_changes_hands(self, data: Data) -> None:
        who = data.draw(st.integers(0, 1))
        heir, other = self.detokenizers[who], self.detokenizers[1 - who]
        how = data.draw(st.sampled_from(["silence", "crash", "give up", "not at all"]))
        if how == "silence":
            self.desk.bus.do("HSET", self.desk.keys.detok_lease(0), "expiry", 0)
        elif how == "give up":
            self.desk.bus.run(leases.release_partition(self.desk.keys, 0, other.name))
        elif how == "crash":
            self.bury(other.name, drained=False)
            self.detokenizers[1 - who] = Detokenizer(self.world, self._name("detokenizer"))
        heir.take()

    @move(weight=3)
    def a_zombie_detokenizer_commits(self, data: Data) -> None:
        for zombie in self.detokenizers:
            if zombie.epoch and zombie is not self.owner and (call := zombie.prepare(2)):
                self.fenced(lambda call=call: self.desk.bus.run(call))
                zombie.forget()

    # -- the end ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The survivors of a bad day: one of each role, who take over whatever there is."""
        for worker in (*self.tokenizers, *self.schedulers, *self.detokenizers):
            self.bury(worker.name, drained=True)
        tokenizer = Tokenizer(self.world, self._name("tokenizer"))
        scheduler = Scheduler(self.world, self._name("scheduler"))
        detokenizer = Detokenizer(self.world, self._name("detokenizer"))
        assert detokenizer.take()
        for _ in range(40):
            for name in self.dead:
                if not name.startswith("detokenizer"):
                    heir = tokenizer if name.startswith("tokenizer") else scheduler
                    assert heir.claim(name, expired_ok=True)
            tokenizer.read(10)
            for entry in list(tokenizer.held.values()):
                tokenizer.finish(entry)
            scheduler.read(20)
            scheduler.tick()
            if scheduler.jobs:
                scheduler.emit(list(scheduler.jobs))
            while call := detokenizer.prepare(3):
                assert detokenizer.commit(call).code == "OK"
