"""Every failpoint once: at both sides of every script call, each way to fail, one after another under load.

Roles are swept side by side, so that failures also meet one another.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.settings import Command
from tests.chaos.failpoints import Action, Failpoint, Side
from tests.chaos.faults import Fault, Kind
from tests.chaos.fleet import Fleet, Shape, Trap
from tests.chaos.harness import run_scenario
from tests.chaos.load import Load
from tests.chaos.plans import endless_plans
from tests.chaos.report import Report
from tests.chaos.state import State

_POLL_S = 0.02
#: How long a process has to come to its failpoint, the start of processes on a slow machine included.
_REACH_S = 30.0
#: Between two failpoints of a role: what was interrupted goes on meanwhile, as it would between real faults.
_REST_S = 0.6

#: The calls of each role that happen in every run or can be brought about, and at which hit to fail.
CALLS: dict[str, dict[str, int]] = {
    Command.TOKENIZER: {
        "tok_done": 2, "tok_end": 1, "claim_dead": 1, "attempt": 1, "retire": 1, "renew": 4, "xreadgroup": 5
    },
    Command.SCHEDULER: {"start": 3, "emit": 30, "claim_dead": 1, "retire": 1, "renew": 4, "xreadgroup": 5},
    Command.DETOKENIZER: {"pub": 20, "own_partition": 2, "retire": 1, "renew": 4, "look": 2},
    Command.API: {"admit": 2, "cancel": 1, "attach": 2, "expire": 1},
}  # fmt: skip

#: Left to the whole sweep.
_SELDOM = frozenset({"renew", "xreadgroup", "look", "attempt", "retire", "expire", "claim_dead"})


def all_points(role: str) -> list[Failpoint]:
    return [
        Failpoint(call, side, action, hit)
        for (call, hit), side, action in itertools.product(CALLS[role].items(), Side, Action)
    ]


def some_points(role: str) -> list[Failpoint]:
    """Both sides of every hand-off that needs no other death first, the ways to fail in turn."""
    actions = itertools.cycle(Action)
    calls = [(call, hit) for call, hit in CALLS[role].items() if call not in _SELDOM]
    return [Failpoint(call, side, next(actions), hit) for (call, hit), side in itertools.product(calls, Side)]


@dataclass(slots=True)
class Swept:
    """What a sweep came to."""

    report: Report
    #: Failpoints at which a process failed, and those that none came to in time.
    reached: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def sweep(points: dict[str, Sequence[Failpoint]], *, server: str = "valkey", seed: int = 1) -> Swept:
    """Fails at each of the points of each role."""
    over = [False]
    reached: list[str] = []
    missed: list[str] = []

    plans = itertools.takewhile(lambda _: not over[0], endless_plans(seed, longest=200))

    async def faults(fleet: Fleet, state: State, load: Load) -> list[Fault]:
        happened: list[Fault] = []
        sweepers = [_Sweeper(fleet, state, role, happened, reached, missed) for role in points]
        try:
            await asyncio.gather(*(one.run(points[one.role]) for one in sweepers))
        finally:
            over[0] = True
        while not load.over.is_set():  # whoever came to a stop too late is not to stand still for ever
            for one in sweepers:
                one.continue_late()
            await asyncio.sleep(_POLL_S)
        return happened

    coin = random.Random(f"reports {seed}")
    shape = Shape(server=server, lease_ms=800, reports=lambda _: coin.random() < 0.5)
    report = run_scenario(shape, plans, faults, streams=16, seed=seed, cuts_allowed=Command.API in points)
    return Swept(report, reached, missed)


class _Sweeper:
    """Sweeps one role."""

    def __init__(
        self,
        fleet: Fleet,
        state: State,
        role: str,
        happened: list[Fault],
        reached: list[str],
        missed: list[str],
    ) -> None:
        self.role = role
        self._fleet = fleet
        self._state = state
        self._happened = happened
        self._reached = reached
        self._missed = missed
        self._late: list[Trap] = []

    async def run(self, points: Sequence[Failpoint]) -> None:
        for point in points:
            trap = self._fleet.set_trap(self.role, point)
            self._kill(self._fleet.pids(self.role)[0])
            struck = await self._strikes(trap)
            self.continue_late()
            where = f"{self.role} {point}"
            if not struck:
                self._missed.append(where)
                self._late.append(trap)
                continue
            self._reached.append(where)
            self._happened.append(
                Fault(
                    Kind.TRAP, self.role, time.monotonic(), self._state.victims(self.role, struck[1]), where
                )
            )
            if point.action is Action.STOP:
                await asyncio.sleep(1.8 * self._fleet.shape.lease_ms / 1000)
                self._fleet.send(struck[0], signal.SIGCONT)
            await asyncio.sleep(_REST_S)

    def continue_late(self) -> None:
        """Continues processes that came to a stop after all, when nobody waited for it any more."""
        for trap in self._late:
            for pid, _ in trap.struck():
                self._fleet.send(pid, signal.SIGCONT)

    def _kill(self, pid: int) -> None:
        worker = self._fleet.worker_of(pid)
        self._happened.append(
            Fault(Kind.KILL, self.role, time.monotonic(), self._state.victims(self.role, worker))
        )
        self._fleet.send(pid, signal.SIGKILL)

    async def _strikes(self, trap: Trap) -> tuple[int, str] | None:
        """The process in which it struck; what its call is about is brought about on the way."""
        start, provoked = time.monotonic(), False
        while time.monotonic() - start < _REACH_S:
            if struck := trap.struck():
                return struck[0]
            newest = self._newest()
            if not provoked and newest is not None:
                provoked = self._provoke(trap.point.call, newest)
            await asyncio.sleep(_POLL_S)
        return None

    def _provoke(self, call: str, newest: int) -> bool:
        """Has ``newest`` come to a call that it would not make by itself; whether that was done for good."""
        match call:
            case "attempt" | "claim_dead" if self.role == Command.TOKENIZER:
                # A job is claimed from a peer that died with it in its hands, which is seldom by chance.
                self._fleet.set_trap(self.role, Failpoint("tok_done", Side.BEFORE, Action.KILL, 1))
                self._kill_peers(newest)
            case "claim_dead":
                self._kill_peers(newest)
            case "retire":
                self._fleet.send(newest, signal.SIGTERM)
            case "expire":  # a request looks overdue, which it is not
                self._state.make_look_overdue()
                return False
        return True

    def _kill_peers(self, newest: int) -> None:
        for pid in self._fleet.pids(self.role):
            if pid != newest:
                self._kill(pid)

    def _newest(self) -> int | None:
        """The process that started last, once it serves and its peers do."""
        serving = self._fleet.serving(self.role)
        return max(serving) if len(serving) == self._fleet.shape.replicas[Command(self.role)] else None
