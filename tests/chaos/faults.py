"""The faults of a chaos run: a schedule made from a seed, and the hand that carries it out.

Faults are tied to the progress of the load, so that all of them happen under load, however slow the machine;
some come in bursts, so that a successor dies before it has settled.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import redis

from common.settings import Command
from tests.chaos.failpoints import Action, Failpoint, Side
from tests.chaos.fleet import Fleet, Trap
from tests.chaos.load import Load
from tests.chaos.state import State
from tests.helpers.stack import REDIS_ROLE

_POLL_S = 0.02
#: A pause is this many leases long: long enough to be taken for dead.
_PAUSE_LEASES = (1.3, 3.0)
_BURST = 0.25
#: How often, and how many times, one looks at partitions that are down.
_AFTERMATH_S, _AFTERMATH_LOOKS = 0.1, 200

#: The calls of each role that are worth a failpoint, and up to which hit they are counted.
CALLS: dict[str, dict[str, int]] = {
    Command.TOKENIZER: {"tok_done": 8, "tok_end": 2, "xreadgroup": 20, "hgetall": 8, "renew": 6},
    Command.SCHEDULER: {"start": 12, "emit": 200, "xreadgroup": 20, "drop": 2, "renew": 6},
    Command.DETOKENIZER: {"pub": 200, "own_partition": 6, "look": 8, "xinfo": 3, "renew": 6},
    Command.API: {"admit": 8, "cancel": 3, "attach": 4},
}


class Kind(StrEnum):
    KILL = "SIGKILL"
    PAUSE = "SIGSTOP..SIGCONT"
    TRAP = "failpoint"


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault to come: when so many requests have ended, and a moment later."""

    after: int
    delay_s: float
    kind: Kind
    role: str
    point: Failpoint | None = None


@dataclass(slots=True)
class Fault:
    """One that happened."""

    kind: Kind
    role: str
    at: float
    victims: set[str] = field(default_factory=set)
    detail: str = ""
    #: Whether a peer served at that moment that could take over.
    standby: bool = False
    #: For reading the log.
    clock: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))

    def __str__(self) -> str:
        standby = "a peer stood by" if self.standby else "no peer stood by"
        return " ".join(filter(None, (self.kind, self.role, self.detail, f"at {self.clock}, {standby}")))


def make_schedule(count: int, requests: int, seed: int, roles: Sequence[str]) -> list[Planned]:
    """``count`` faults spread over the load."""
    rng = random.Random(f"faults {seed}")
    planned, after = [], 0
    for number in range(count):
        if rng.random() >= _BURST:
            after = int(requests * 0.95 * number / count)
        role = rng.choice(list(roles))
        kind = Kind.KILL
        if role != REDIS_ROLE:
            kind = rng.choice((Kind.KILL, Kind.KILL, Kind.PAUSE, Kind.TRAP))
        point = make_point(role, rng) if kind is Kind.TRAP else None
        planned.append(Planned(after, rng.uniform(0, 0.4), kind, role, point))
    return planned


def make_point(role: str, rng: random.Random) -> Failpoint:
    call, most = rng.choice(list(CALLS[role].items()))
    return Failpoint(call, rng.choice(list(Side)), rng.choice(list(Action)), rng.randint(1, most))


class Injector:
    """Carries a schedule out on a fleet while a load runs."""

    def __init__(self, fleet: Fleet, state: State, load: Load, seed: int) -> None:
        self._fleet = fleet
        self._state = state
        self._load = load
        self._rng = random.Random(f"hand {seed}")
        self._paused: dict[int, float] = {}
        self._traps: dict[int, tuple[Trap, int]] = {}
        self._aftermaths: list[asyncio.Task[None]] = []
        self.faults: list[Fault] = []

    async def run(self, planned: Sequence[Planned]) -> None:
        """Ends early when the load is over; continues whatever is paused."""
        keeper = asyncio.create_task(self._keep())
        try:
            for one in planned:
                while self._load.finished < one.after and not self._load.over.is_set():
                    await asyncio.sleep(_POLL_S)
                await asyncio.sleep(one.delay_s)
                if self._load.over.is_set():
                    return
                await self._inflict(one)
            await self._load.over.wait()
        finally:
            for task in (keeper, *self._aftermaths):
                task.cancel()
            for pid in self._paused:
                self._fleet.send(pid, signal.SIGCONT)

    async def _inflict(self, one: Planned) -> None:
        if one.role == REDIS_ROLE:
            pause_s = self._rng.uniform(0.0, 1.0)
            await self._strike(
                Kind.KILL, REDIS_ROLE, "", lambda: asyncio.to_thread(self._fleet.restart_redis, pause_s)
            )
            return
        pids = [pid for pid in self._fleet.pids(one.role) if pid not in self._paused]
        while not pids:
            await asyncio.sleep(_POLL_S)
            pids = [pid for pid in self._fleet.pids(one.role) if pid not in self._paused]
        pid = self._rng.choice(pids)
        worker = self._fleet.worker_of(pid)
        if one.kind is Kind.PAUSE:
            await self._strike(one.kind, one.role, worker, lambda: self._send(pid, signal.SIGSTOP))
            self._continue_later(pid)
            return
        if one.point is not None:  # its successor walks into the trap
            trap = self._fleet.set_trap(one.role, one.point)
            self._traps[id(trap)] = trap, 0
        await self._strike(Kind.KILL, one.role, worker, lambda: self._send(pid, signal.SIGKILL))

    async def _send(self, pid: int, number: signal.Signals) -> None:
        self._fleet.send(pid, number)

    def _continue_later(self, pid: int) -> None:
        lease_s = self._fleet.shape.lease_ms / 1000
        self._paused[pid] = time.monotonic() + lease_s * self._rng.uniform(*_PAUSE_LEASES)

    async def _strike(
        self, kind: Kind, role: str, worker: str, deed: Callable[[], Awaitable[None]], detail: str = ""
    ) -> None:
        """Does the deed, and notes whom it hit: who was in the worker's hands before, and who is after.

        Requests come into them while one looks. Looking takes a while, in which the clients must be heard.
        """
        before, serving = await asyncio.to_thread(self._look, role, worker)
        at = time.monotonic()
        fault = Fault(
            kind, role, at, before, detail, any(self._fleet.worker_of(p) not in ("", worker) for p in serving)
        )
        self.faults.append(fault)
        await deed()
        fault.victims |= (await asyncio.to_thread(self._look, role, worker))[0]
        if role == Command.DETOKENIZER:
            self._aftermaths.append(asyncio.create_task(self._aftermath(fault)))

    async def _aftermath(self, fault: Fault) -> None:
        """A partition whose owner was hit is down until somebody serves it again: so are its new requests."""
        down: set[str] = set()
        for _ in range(_AFTERMATH_LOOKS):
            fault.victims |= down
            await asyncio.sleep(_AFTERMATH_S)
            down = await asyncio.to_thread(self._down)
            if not down and len(await asyncio.to_thread(self._fleet.serving, fault.role)) > 1:
                return

    def _down(self) -> set[str]:
        try:
            workers = {
                self._fleet.worker_of(pid)
                for pid in self._fleet.serving(Command.DETOKENIZER)
                if pid not in self._paused
            }
            return self._state.served_by_none_of(workers)
        except redis.RedisError:
            return set()

    def _look(self, role: str, worker: str) -> tuple[set[str], list[int]]:
        """The requests in the hands of a worker, and the processes that serve beside it."""
        try:
            serving = [pid for pid in self._fleet.serving(role) if pid not in self._paused]
            return self._state.victims(role, worker), serving
        except redis.RedisError:  # it is away as well
            return set(), []

    async def _keep(self) -> None:
        """Continues what was paused long enough, and sees what traps did."""
        while True:
            await asyncio.sleep(_POLL_S)
            for pid, until in list(self._paused.items()):
                if time.monotonic() >= until:
                    self._fleet.send(pid, signal.SIGCONT)
                    del self._paused[pid]
            for key, (trap, seen) in list(self._traps.items()):
                struck = trap.struck()
                self._traps[key] = trap, len(struck)
                for pid, worker in struck[seen:]:
                    await self._strike(Kind.TRAP, trap.role, worker, _nothing, str(trap.point))
                    if trap.point.action is Action.STOP:
                        self._continue_later(pid)


async def _nothing() -> None:
    """It has happened already."""
