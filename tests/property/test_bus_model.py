"""The bus under every interleaving that hypothesis finds, on a real server.

Several tokenizers, schedulers and detokenizers take single steps in any order; they lose replies, repeat
calls, crash, drain, expire, come back as zombies and rob each other, while clients cancel and deadlines pass.
After each step: logs and texts are right as far as they go, and there is at most one end. In the end, whoever
is left finishes what there is: then every request has ended once, its text is whole, and nothing is left.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.bus import leases
from common.bus.client import Bus, FencedError
from common.bus.embedded import EmbeddedRedis
from common.bus.handoffs import Step
from common.bus.keys import SCHEDULERS, TOKENIZERS
from tests.helpers.bus import Desk
from tests.helpers.bus_actors import Detokenizer, Plan, Scheduler, Tokenizer, World, check_ended, published
from tests.helpers.redis_state import fingerprint
from tests.helpers.servers import BOTH

MAX_REQUESTS = 5
which = st.integers(0, 1)
some = st.integers(1, 3)
lost = st.booleans()
plans = st.lists(
    st.tuples(st.integers(1, 7), st.one_of(st.none(), st.integers(1, 7))), min_size=1, max_size=3
)


class BusMachine(RuleBasedStateMachine):
    """One partition, two live workers of each role, and the ghosts of those before them."""

    def __init__(self, bus: Bus) -> None:
        super().__init__()
        bus.do("FLUSHALL")
        self.desk = Desk(bus)
        self.desk.open_tok()
        self.world = World(self.desk)
        self.born = 0
        self.tokenizers = [self._tokenizer() for _ in range(2)]
        self.schedulers = [self._scheduler() for _ in range(2)]
        self.detokenizers = [self._detokenizer() for _ in range(2)]
        self.ghosts: list[Scheduler] = []
        self.dead: list[str] = []
        self.may_fail: dict[str, set[str]] = {}

    # -- births -------------------------------------------------------------------------------------------

    def _name(self, role: str) -> str:
        self.born += 1
        return f"{role}-{self.born}"

    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self.world, self._name("tokenizer"))

    def _scheduler(self) -> Scheduler:
        return Scheduler(self.world, self._name("scheduler"))

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self.world, self._name("detokenizer"))

    @property
    def uids(self) -> list[str]:
        return list(self.world.plans)

    def _unchanged(self, action: Any, error: type[Exception] | None = None) -> Any:
        """Runs what must not change anything, and fail if it should."""
        before = fingerprint(self.desk.bus)
        reply = None
        if error is None:
            reply = action()
        else:
            with pytest.raises(error):
                action()
        assert fingerprint(self.desk.bus) == before
        return reply

    # -- clients ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.plans) < MAX_REQUESTS)
    @rule(shape=plans, bad=st.integers(0, 7))
    def admit(self, shape: list[tuple[int, int | None]], bad: int) -> None:
        request = self.desk.request(n=len(shape))
        lengths, stops = tuple(a for a, _ in shape), tuple(b for _, b in shape)
        self.world.plans[request.uid] = Plan(len(self.world.plans), lengths, stops, bad == 0)
        self.world.requests[request.uid] = request
        self.may_fail[request.uid] = {"context"} if bad == 0 else set()
        assert self.desk.admit(request).code == "OK"

    @precondition(lambda self: self.world.plans)
    @rule(data=st.data())
    def admit_again(self, data: st.DataObject) -> None:
        request = self.world.requests[data.draw(st.sampled_from(self.uids))]
        assert self._unchanged(lambda: self.desk.admit(request)).code == "DUP"

    @precondition(lambda self: self.world.plans)
    @rule(data=st.data(), by_hand=st.booleans())
    def cancel(self, data: st.DataObject, by_hand: bool) -> None:
        uid = data.draw(st.sampled_from(self.uids))
        if "terminal" in self.desk.req(uid):
            assert self._unchanged(lambda: self.desk.cancel(uid)) == "NONE"
            return
        self.may_fail[uid].add("cancelled")
        if by_hand:  # with redis-cli; a sweep finds it later
            self.desk.bus.do("SADD", self.desk.keys.cancel(0), uid)
        else:
            self.desk.cancel(uid)

    @rule()
    def sweep_flags(self) -> None:
        for member in self.desk.members(self.desk.keys.cancel(0)):
            if "/" not in member:
                self.desk.cancel(member)

    @precondition(lambda self: self.world.plans)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.uids))
        if "terminal" not in self.desk.req(uid):
            self.may_fail[uid] |= {"deadline", "unavailable", "cancelled"}
        self.desk.overdue(uid)
        self.desk.expire(uid, self._owner(uid))

    def _owner(self, uid: str) -> str:
        req = self.desk.req(uid)
        owners = [
            worker
            for name, worker in req.items()
            if name.startswith("owner:") and f"ended:{name.partition(':')[2]}" not in req
        ]
        return owners[0] if owners else ""

    # -- tokenizers and schedulers ------------------------------------------------------------------------

    @rule(who=which, count=some, lost=lost)
    def tokenizer_reads(self, who: int, count: int, lost: bool) -> None:
        self.tokenizers[who].read(count, lost=lost)

    @rule(who=which)
    def tokenizer_looks_for_lost_replies(self, who: int) -> None:
        self.tokenizers[who].find_stranded()

    @rule(who=which, twice=st.booleans())
    def tokenizer_finishes(self, who: int, twice: bool) -> None:
        tokenizer = self.tokenizers[who]
        for entry in list(tokenizer.held.values())[:1]:
            tokenizer.finish(entry)
            if twice:
                self._unchanged(lambda entry=entry: tokenizer.finish(entry))

    @rule(who=which, drained=st.booleans())
    def tokenizer_dies(self, who: int, drained: bool) -> None:
        self._bury(self.tokenizers[who].name, drained=drained)
        self.tokenizers[who] = self._tokenizer()

    @rule(who=which, count=some, lost=lost)
    def scheduler_reads(self, who: int, count: int, lost: bool) -> None:
        self.schedulers[who].read(count, lost=lost)

    @rule(who=which)
    def scheduler_looks_for_lost_replies(self, who: int) -> None:
        self.schedulers[who].find_stranded()

    @rule(who=which, data=st.data())
    def scheduler_steps(self, who: int, data: st.DataObject) -> None:
        scheduler = self.schedulers[who]
        if scheduler.jobs:
            ids = data.draw(st.lists(st.sampled_from(sorted(scheduler.jobs)), unique=True, min_size=1))
            assert scheduler.emit(ids).refused == ()

    @rule(who=which)
    def scheduler_steps_all(self, who: int) -> None:
        if self.schedulers[who].jobs:
            assert self.schedulers[who].emit(list(self.schedulers[who].jobs)).refused == ()

    @rule(who=which)
    def scheduler_listens(self, who: int) -> None:
        self._unchanged(self.schedulers[who].tick)

    @rule(who=which, back=st.integers(1, 3))
    def scheduler_repeats_a_step(self, who: int, back: int) -> None:
        for call in self.schedulers[who].sent[-back:][:1]:
            assert self._unchanged(lambda call=call: self.desk.bus.run(call)).code == "OK"

    @rule(who=which, gap=st.integers(2, 3))
    def scheduler_skips_a_number(self, who: int, gap: int) -> None:
        scheduler = self.schedulers[who]
        call = self.desk.emit_call(Step(), scheduler.seq + gap, scheduler.name)
        reply = self._unchanged(lambda: self.desk.bus.run(call))
        assert (reply.code, reply.stored) == ("BEHIND", scheduler.seq)

    @rule(who=which)
    def scheduler_asks_again(self, who: int) -> None:
        scheduler = self.schedulers[who]
        for job in list(scheduler.jobs.values())[:1]:
            self._unchanged(lambda job=job: self.desk.start(job.entry, scheduler.name, counts=True))

    @rule(who=which, how=st.sampled_from(["crash", "drain", "silence"]))
    def scheduler_dies(self, who: int, how: str) -> None:
        """Silence is a SIGSTOP: its lease runs out, and it may come back as a zombie."""
        old = self.schedulers[who]
        if how == "silence":
            self.desk.expire_lease(old.name)
            self.dead.append(old.name)
        else:
            self._bury(old.name, drained=how == "drain")
        self.ghosts.append(old)
        self.schedulers[who] = self._scheduler()

    def _bury(self, name: str, *, drained: bool) -> None:
        self.desk.bus.run(leases.retire(self.desk.keys, 0, name, drained=drained))
        self.dead.append(name)

    @precondition(lambda self: self.ghosts)
    @rule(data=st.data())
    def zombie_wakes(self, data: st.DataObject) -> None:
        """Until somebody took over it is in its rights; afterwards everything it sends is refused."""
        ghost = data.draw(st.sampled_from(self.ghosts))
        lease = self.desk.keys.lease(0, ghost.name)
        ids = list(ghost.jobs)[:1]
        if self.desk.bus.do("HGET", lease, "dead") != b"1":
            if ids:
                assert ghost.emit(ids).refused == ()
            return
        ghost.reader.read(1)  # reading is not fenced: what it gets must move on as well
        if ids:
            call = self.desk.emit_call(ghost.build(ids), ghost.seq + 1, ghost.name)
            self._unchanged(lambda: self.desk.bus.run(call), FencedError)
            entry = ghost.jobs[ids[0]].entry
            self._unchanged(lambda: self.desk.start(entry, ghost.name), FencedError)
        self._unchanged(ghost.tick, FencedError)
        self.ghosts.remove(ghost)

    @precondition(lambda self: self.dead)
    @rule(who=which, data=st.data(), lost=lost)
    def work_is_taken_over(self, who: int, data: st.DataObject, lost: bool) -> None:
        name = data.draw(st.sampled_from(self.dead))
        heirs = self.tokenizers if name.startswith("tokenizer") else self.schedulers
        assert heirs[who].claim(name, expired_ok=True, lost=lost)

    @rule(who=which)
    def the_living_are_not_robbed(self, who: int) -> None:
        robber, victim = self.schedulers[who], self.schedulers[1 - who]
        assert not self._unchanged(lambda: robber.claim(victim.name, expired_ok=True))

    # -- detokenizers -------------------------------------------------------------------------------------

    @rule(who=which)
    def detokenizer_asks_for_the_partition(self, who: int) -> None:
        self.detokenizers[who].take()

    @rule(who=which, how=st.sampled_from(["silence", "crash", "give up"]))
    def partition_changes_hands(self, who: int, how: str) -> None:
        other = self.detokenizers[1 - who]
        if how == "silence":
            self.desk.bus.do("HSET", self.desk.keys.detok_lease(0), "expiry", 0)
        elif how == "give up":
            self.desk.bus.run(leases.release_partition(self.desk.keys, 0, other.name))
        else:
            self.desk.bus.run(leases.retire(self.desk.keys, 0, other.name, drained=False))
            self.detokenizers[1 - who] = self._detokenizer()
        self.detokenizers[who].take()

    @rule(who=which, count=some, fate=st.sampled_from(["sent", "sent", "lost", "not sent"]))
    def detokenizer_commits(self, who: int, count: int, fate: str) -> None:
        detokenizer = self.detokenizers[who]
        call = detokenizer.prepare(count)
        if call is None:
            return
        if str(detokenizer.epoch).encode() != self.desk.bus.do(
            "HGET", self.desk.keys.detok_lease(0), "epoch"
        ):
            self._unchanged(lambda: self.desk.bus.run(call), FencedError)
            detokenizer.forget()
        elif fate == "not sent":
            detokenizer.forget()
        else:
            assert detokenizer.commit(call, lost=fate == "lost").code == "OK"

    @rule(who=which)
    def detokenizer_repeats_a_commit(self, who: int) -> None:
        call = self.detokenizers[who].last
        if call is None:
            return
        if call.args[0] == int(self.desk.bus.do("HGET", self.desk.keys.detok_lease(0), "epoch")):
            reply = self._unchanged(lambda: self.desk.bus.run(call))
            assert (reply.code, reply.offset) == ("MOVED", self.desk.stored())
        else:
            self._unchanged(lambda: self.desk.bus.run(call), FencedError)

    # -- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def everything_is_right_as_far_as_it_goes(self) -> None:
        for uid, plan in self.world.plans.items():
            out, choices = self.desk.out(uid), range(len(plan.lengths))
            assert len([entry for entry in out if entry.end]) <= 1
            logs = self.desk.bus.do("MGET", *(self.desk.keys.gen(uid, choice) for choice in choices))
            for choice, log in zip(choices, logs, strict=True):
                assert log is None or plan.log(choice).startswith(log.decode())
                assert plan.text(choice).startswith(published(out, choice))

    def teardown(self) -> None:
        try:
            self._finish()
            self._check_the_end()
        finally:
            super().teardown()

    def _finish(self) -> None:
        """The survivors of a bad day: one of each role, who take over whatever there is."""
        for name in [w.name for w in (*self.tokenizers, *self.schedulers, *self.detokenizers)]:
            self._bury(name, drained=True)
        tokenizer, scheduler, detokenizer = self._tokenizer(), self._scheduler(), self._detokenizer()
        assert detokenizer.take()
        for _ in range(40):
            for name in self.dead:
                heir = tokenizer if name.startswith("tokenizer") else scheduler
                if not name.startswith("detokenizer"):
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

    def _check_the_end(self) -> None:
        desk = self.desk
        check_ended(self.world, self.may_fail)
        for stream, group in ((desk.work_in, TOKENIZERS), (desk.sched, SCHEDULERS)):
            consumers = {info[1].decode() for info in desk.bus.do("XINFO", "CONSUMERS", stream, group)}
            assert consumers.isdisjoint(self.dead), "the dead keep no name in a group"


@pytest.mark.parametrize("redis_binary", BOTH, indirect=True)
def test_the_bus(redis_server: EmbeddedRedis) -> None:
    bus = Bus(redis_server.url, name="model")
    run_state_machine_as_test(
        lambda: BusMachine(bus),
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    bus.close()
