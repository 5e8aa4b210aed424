"""Every process replaced under load, in order and by other versions: no request fails, and none is refused.

Clients go where `/ready` says 200, as behind a load balancer.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import signal
import time
from collections.abc import Awaitable, Callable

from common.settings import Command
from tests.chaos.faults import Fault
from tests.chaos.fleet import WORKERS, Fleet, Shape
from tests.chaos.harness import run_scenario
from tests.chaos.load import Load
from tests.chaos.plans import endless_plans
from tests.chaos.report import Report
from tests.chaos.state import State
from tests.soak.measure import Row, exactly, told

_ROLES = (*WORKERS, Command.API)
_STREAMS = 12
#: Longest time for a process to end in order, and for its successor to serve.
_REPLACED_S = 60.0
_POLL_S = 0.05
_LOOK_S, _LOOK_TIMEOUT_S = 0.15, 0.3
#: Between two replacements: what was started before and after runs beside each other.
_REST_S = 1.0

Replace = Callable[[Fleet], Awaitable[None]]


def restarts(server: str = "valkey") -> list[Row]:
    """Every process of every role gets SIGTERM, one after another."""

    async def replace_all(fleet: Fleet) -> None:
        for role in _ROLES:
            for pid in fleet.pids(role):
                await _replace(fleet, role, pid)

    return _rows(_under_load(replace_all, server))


def versions(server: str = "valkey", *, at_once: bool = False) -> list[Row]:
    """One process of each role becomes the next version, then the other becomes the previous one.

    At the end each role's next version is killed, so that the previous one takes over what it held.
    ``at_once`` does each of the three to all roles together, and not to one after another.
    """

    async def mix(fleet: Fleet) -> None:
        first = {role: fleet.pids(role) for role in _ROLES}
        newer: dict[str, int] = {}

        async def change(role: Command, pid: int, version: str) -> None:
            fleet.set_version(role, version)
            made = await _replace(fleet, role, pid)
            if version == "next":
                [newer[role]] = made

        steps = [
            [functools.partial(change, role, first[role][0], "next") for role in _ROLES],
            [functools.partial(change, role, first[role][1], "previous") for role in _ROLES],
            [functools.partial(_kill, fleet, role, newer) for role in WORKERS],
        ]
        for some in steps:
            if at_once:
                await asyncio.gather(*(step() for step in some))
            else:
                for step in some:
                    await step()

    return _rows(_under_load(mix, server))


def _under_load(replace: Replace, server: str) -> Report:
    over = [False]
    plans = itertools.takewhile(lambda _: not over[0], endless_plans(3))

    async def faults(fleet: Fleet, state: State, load: Load) -> list[Fault]:
        balancer = asyncio.create_task(_balance(fleet))
        try:
            await asyncio.sleep(_REST_S)
            await replace(fleet)
        finally:
            over[0] = True
            await load.over.wait()
            balancer.cancel()
        return []

    return run_scenario(Shape(server=server, lease_ms=3000), plans, faults, streams=_STREAMS)


async def _kill(fleet: Fleet, role: Command, newer: dict[str, int]) -> None:
    await _replace(fleet, role, newer[role], signal.SIGKILL)


async def _replace(
    fleet: Fleet, role: Command, pid: int, number: signal.Signals = signal.SIGTERM
) -> set[int]:
    """Ends a process, and waits until its successor serves. Returns the process ids that are new."""
    before = set(fleet.pids(role))
    fleet.send(pid, number)
    deadline = time.monotonic() + _REPLACED_S
    while True:
        serving = set(await asyncio.to_thread(fleet.serving, role))
        if pid not in serving and len(serving) == len(before):
            break
        assert time.monotonic() < deadline, f"{role} {pid} has no successor\n{fleet.logs()[-2000:]}"
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(_REST_S)
    return serving - before


async def _balance(fleet: Fleet) -> None:
    """Keeps ``fleet.ports``, of which the clients choose, to those that are ready."""
    everyone = list(fleet.ports)
    while True:
        ready = await asyncio.gather(*map(_is_ready, everyone))
        fleet.ports[:] = [port for port, good in zip(everyone, ready, strict=True) if good] or everyone
        await asyncio.sleep(_LOOK_S)


async def _is_ready(port: int) -> bool:
    try:
        async with asyncio.timeout(_LOOK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /ready HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _rows(report: Report) -> list[Row]:
    refused = sum(verdict.outcome.refusals for verdict in report.verdicts)
    gaps = [gap.seconds for gap in report.undisturbed()]
    return [
        told("requests / seconds", f"{len(report.verdicts)} / {report.seconds:.0f}"),
        exactly("requests that failed, or whose text is not exact", len(report.bad), 0),
        exactly("requests refused", refused, 0),
        exactly("problems", " / ".join(report.problems().splitlines()) or "none", "none"),
        told("longest gap in a stream", f"{max(gaps, default=0):.2f} s"),
    ]
