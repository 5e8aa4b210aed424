"""One process killed at a time, with a peer standing by: how long its streams stand still.

The leases are as long as they are by default. Every other death goes unreported, as when a host is lost.
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
from tests.chaos.faults import Fault, Kind
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.harness import run_scenario
from tests.chaos.load import Load
from tests.chaos.plans import Manner, Plan
from tests.chaos.report import Report
from tests.chaos.state import State
from tests.soak.measure import Row, exactly, quantile, told, within

ROLES = (Command.SCHEDULER, Command.DETOKENIZER)
#: Promised from a kill to the next token.
_MOST_S = 5.0
_MOST_GAP_S = 1.0
_STREAMS, _TOKENS, _STEP_MS = 12, 600, 10.0
_WHOLE_S, _POLL_S, _SETTLE_S = 60.0, 0.05, 1.5
#: From one kill to the next at least: what stood still is to have gone on by then, or it would wait for two.
_APART_S = _MOST_S + 1.0


@dataclass(slots=True)
class _Kills:
    """Kills ``count`` processes of each role, each when all has been whole for a while."""

    count: int
    silent: set[str] = field(default_factory=set)
    over: bool = False

    def reported(self, worker: str) -> bool:
        return worker not in self.silent

    async def run(self, fleet: Fleet, state: State, load: Load) -> list[Fault]:
        faults: list[Fault] = []
        rng = random.Random(1)
        try:
            for number, role in itertools.product(range(self.count), ROLES):
                pids = await _whole(fleet, role)
                await asyncio.sleep(_SETTLE_S + rng.random())
                if faults:
                    await asyncio.sleep(faults[-1].at + _APART_S - time.monotonic())
                faults.append(await self._kill(fleet, state, role, rng.choice(sorted(pids)), number % 2 == 1))
            await _whole(fleet, ROLES[-1])
        finally:
            self.over = True
            await load.over.wait()
        return faults

    async def _kill(self, fleet: Fleet, state: State, role: Command, pid: int, silent: bool) -> Fault:
        worker = fleet.worker_of(pid)
        if silent:
            self.silent.add(worker)
        before = await asyncio.to_thread(state.victims, role, worker)
        detail = "unreported" if silent else "reported"
        fault = Fault(Kind.KILL, role, time.monotonic(), before, detail, standby=True)
        fleet.send(pid, signal.SIGKILL)
        fault.victims |= await asyncio.to_thread(state.victims, role, worker)
        return fault


async def _whole(fleet: Fleet, role: Command) -> set[int]:
    """The processes of ``role``, once every process of every role serves."""
    deadline = time.monotonic() + _WHOLE_S
    while True:
        serving = {each: set(await asyncio.to_thread(fleet.serving, each)) for each in ROLES}
        if all(len(pids) == fleet.shape.replicas[each] for each, pids in serving.items()):
            return serving[role]
        assert time.monotonic() < deadline, f"not whole again\n{fleet.logs()[-2000:]}"
        await asyncio.sleep(_POLL_S)


def run(count: int, *, slack: float = 1.0) -> list[Row]:
    """Some ``count`` kills of each role."""
    kills = _Kills(count)
    endless = (
        Plan(n, Manner.STAYS, ("hello",), seed=1000 * n + 7, n=1, max_tokens=_TOKENS)
        for n in itertools.count()
    )
    plans = itertools.takewhile(lambda _: not kills.over, endless)
    shape = Shape(lease_ms=3000, step_ms=_STEP_MS, reports=kills.reported)
    report = run_scenario(shape, plans, kills.run, streams=_STREAMS)
    return [
        told("kills of each role / seconds", f"{count} / {report.seconds:.0f}"),
        exactly("requests that failed, or whose text is not exact", len(report.bad), 0),
        exactly("problems", " / ".join(report.problems().splitlines()) or "none", "none"),
        *[
            row
            for role, detail in itertools.product(ROLES, ("reported", "unreported"))
            for row in _stalls(report, role, detail, slack)
        ],
        within("longest gap of other streams", _gap(report), _MOST_GAP_S * slack, "s"),
    ]


def _stalls(report: Report, role: str, detail: str, slack: float) -> Sequence[Row]:
    stalls = [s for s in report.stalls() if s.fault.role == role and s.fault.detail == detail]
    waits = [stall.end - stall.fault.at for stall in stalls]
    if not waits:
        return []
    name = f"{role}, {detail}: from the kill to the next token"
    return [
        told(f"{name}, p50 of {len(waits)} streams", f"{quantile(waits, 0.5):.2f} s"),
        within(f"{name}, longest", max(waits), _MOST_S * slack, "s"),
    ]


def _gap(report: Report) -> float:
    return max((gap.seconds for gap in report.undisturbed()), default=0.0)
