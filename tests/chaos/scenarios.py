"""Faults aimed at one protection each: what random kills would hit once in a thousand times, every time.

A scenario comes to a report like any other run; `broken` says in what way the product was seen to fail.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from common.settings import Command
from tests.chaos.failpoints import Failpoint
from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.harness import run_scenario
from tests.chaos.load import Load
from tests.chaos.plans import Manner, Plan
from tests.chaos.report import Report
from tests.chaos.state import State

_POLL_S = 0.02
_WAIT_S = 30.0
_LEASE_MS = 600
#: A lease is left expired for this long: less than lies between two observations.
_LAPSE_S = 0.25
_LAPSE_LIMIT_S = 0.4
_LAPSES = 8

Break = Callable[["Scene"], Awaitable[None]]


@dataclass(slots=True)
class Scene:
    """What a scenario may touch, and what it notes."""

    fleet: Fleet
    state: State
    load: Load
    #: Workers that died of a lease expired for longer than intended: the machine was slow, not the judge.
    overlong: int = 0

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for ``condition``, or the end of the load."""
        async with asyncio.timeout(_WAIT_S):
            while not condition() and not self.load.over.is_set():
                await asyncio.sleep(_POLL_S)

    async def under_way(self, events: int = 20) -> None:
        """Waits until every stream is in the middle."""
        await self.until(
            lambda: self.load.outcomes and all(len(o.texts) > events for o in self.load.outcomes)
        )

    def victims(self, pid: int) -> set[str]:
        return self.state.victims(Command.SCHEDULER, self.fleet.worker_of(pid))


async def zombie(scene: Scene) -> None:
    """A scheduler stands still until its peer has taken over and gone on, then continues."""
    await scene.under_way()
    one = max(scene.fleet.pids(Command.SCHEDULER), key=lambda pid: len(scene.victims(pid)))
    theirs = scene.victims(one)
    scene.fleet.send(one, signal.SIGSTOP)
    try:
        await scene.until(lambda: not scene.victims(one))
        sizes = {uid: scene.state.inside.generated(uid) for uid in theirs}
        await scene.until(lambda: any(scene.state.inside.generated(u) > n + 20 for u, n in sizes.items()))
    finally:
        scene.fleet.send(one, signal.SIGCONT)
    await scene.load.over.wait()


async def lapses(scene: Scene) -> None:
    """Schedulers stand still until their leases have just expired, again and again."""
    await scene.under_way(2)
    for number in range(_LAPSES):
        pids = scene.fleet.pids(Command.SCHEDULER)
        if scene.load.over.is_set() or len(pids) < 2:
            return
        pid = pids[number % 2]
        worker = scene.fleet.worker_of(pid)
        scene.fleet.send(pid, signal.SIGSTOP)
        try:
            await scene.until(lambda w=worker: scene.state.lapse(w)[0] > _LAPSE_S)
        finally:
            scene.fleet.send(pid, signal.SIGCONT)
        await scene.until(lambda w=worker: _noted(scene, w))
        await asyncio.sleep(0.2)


def _noted(scene: Scene, worker: str) -> bool:
    """Whether the worker has renewed its lease, or is dead; counts those that died of a lapse too long.

    A dead lease keeps its last expiry, so a machine that slept through the lapse shows itself afterwards too.
    """
    lapse_s, dead = scene.state.lapse(worker)
    if dead and lapse_s > _LAPSE_LIMIT_S:
        scene.overlong += 1
    return lapse_s <= 0 or dead


async def nothing(scene: Scene) -> None:
    """The traps do it all."""
    await scene.load.over.wait()


@dataclass(frozen=True, slots=True)
class Scenario:
    """Faults of one kind."""

    breaks: Break
    #: A failpoint in the first process of a role, by role.
    traps: Sequence[tuple[str, str]] = ()


SCENARIOS = {
    "zombie": Scenario(zombie),
    "emit replies lost": Scenario(nothing, [(Command.SCHEDULER, "emit:after:lose:3+")] * 2),
    "pub replies lost": Scenario(nothing, [(Command.DETOKENIZER, "pub:after:lose:10+")]),
    "read replies lost": Scenario(nothing, [(Command.SCHEDULER, "xreadgroup:after:lose:3+")] * 2),
    "lapses": Scenario(lapses),
    "all at once": Scenario(
        zombie,
        [
            (Command.SCHEDULER, "emit:after:lose:10+"),
            (Command.SCHEDULER, "xreadgroup:after:lose:3+"),
            (Command.DETOKENIZER, "pub:after:lose:10+"),
        ],
    ),
}


def play(name: str, mutant: str = "") -> tuple[Report, str]:
    """Plays a scenario: the report, and in what way the product failed; "" when it did not."""
    scenario = SCENARIOS[name]
    shape = Shape(
        replicas={
            Command.TOKENIZER: 1, Command.SCHEDULER: 2, Command.DETOKENIZER: 1, Command.API: 1
        },
        lease_ms=_LEASE_MS,
        step_ms=10.0,
        request_timeout_s=60.0,
        mutant=mutant,
        traps=tuple((role, Failpoint.parse(text)) for role, text in scenario.traps),
    )  # fmt: skip
    scenes: list[Scene] = []

    async def faults(fleet: Fleet, state: State, load: Load) -> list[Fault]:
        scenes.append(Scene(fleet, state, load))
        await scenario.breaks(scenes[0])
        return []

    report = run_scenario(shape, _plans(), faults, streams=12, bound_s=15.0 if mutant else 45.0)
    problems = report.problems()
    if scenario.breaks is lapses and report.fenced > scenes[0].overlong:
        problems += f"\n{report.fenced} live workers were taken for dead"
    return report, problems


def _plans() -> list[Plan]:
    """Streams long enough to be in the middle of, of one choice and of several."""
    return [
        Plan(
            number, Manner.STAYS, ("hello",), seed=1000 * number + 17, n=1 + (number % 4 == 0), max_tokens=400
        )
        for number in range(12)
    ]
