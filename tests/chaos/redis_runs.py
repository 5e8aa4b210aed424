"""Plays faults of Redis on fleets, and judges what came out: each request, what is left, who died."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.chaos.check import Verdict, judge
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.harness import count_prompts, inexact, settle
from tests.chaos.load import Load, Outcome
from tests.chaos.plans import Plan, endless_plans
from tests.chaos.redis_faults import FAULTS, RedisFault, Scene
from tests.chaos.state import State

_STREAMS = 12
_LONGEST = 300
#: More than are asked while one fault is played.
_MOST_PLANS = 100_000
#: A request that takes longer than this hangs: longer than any fault and all of its successors' waits.
_BOUND_S = 90.0
_SETTLE_S = 20.0
_AFTERWARDS_S = 1.0
#: Promised is about a second; asserted is five times that, since the machine may be a slow one.
_MOST_REFUSAL_S = 5.0
_LOST = "The request was lost together with the data of Redis."
#: What a client hears that comes back for a request of which no trace is left.
_UNKNOWN = "There is no such request, or it has expired."


@dataclass(slots=True)
class Played:
    """What one fault came to."""

    name: str
    fault: RedisFault
    server: str
    seconds: float
    scene: Scene
    verdicts: list[Verdict]
    leftovers: dict[str, object]
    immortal: list[str]
    inexact: dict[str, list[str]]
    #: Processes that ended, crashes that were counted against requests, tracebacks in the log.
    deaths: int
    attempts: int
    #: Requests that ran to their end though their clients had been refused.
    for_nobody: int
    tracebacks: int
    logs: str = field(repr=False)

    @property
    def bad(self) -> list[Verdict]:
        return [v for v in self.verdicts if not v.good and not self._lawful(v)]

    def _lawful(self, verdict: Verdict) -> bool:
        """An end in an error that this fault may bring, with the right beginning before it."""
        return verdict.lost == verdict.doubled == verdict.reordered == 0 and (
            (self.fault.loses_writes and self._says(verdict, _LOST))
            or (self.fault.loses_writes and verdict.outcome.cut and self._says(verdict, _UNKNOWN))
            or (self.fault.overdue and (verdict.outcome.error or {}).get("code") == "timeout")
        )

    @staticmethod
    def _says(verdict: Verdict, message: str) -> bool:
        return (verdict.outcome.error or {}).get("message") == message

    @property
    def errors(self) -> list[Verdict]:
        return [v for v in self.verdicts if not v.good and self._lawful(v)]

    @property
    def stall_s(self) -> float:
        """The longest that a stream stood still."""
        gaps = (b - a for v in self.verdicts for a, b in itertools.pairwise(v.outcome.texts))
        return max(gaps, default=0.0)

    @property
    def refusal_s(self) -> float:
        """The longest that a new request waited for its refusal."""
        return max((a.seconds for a in self.scene.asked if a.answer.status == 503), default=0.0)

    def problems(self) -> str:
        """All that is wrong, for a failing test; "" when nothing is."""
        fault = self.fault
        lines = [str(verdict) for verdict in self.bad[:20]]
        lines += [f"left in Redis: {self.leftovers}"] if self.leftovers else []
        lines += [f"no time to live: {self.immortal[:5]}"] if self.immortal else []
        lines += [f"{uid}: {faults}" for uid, faults in list(self.inexact.items())[:10]]
        lines += [f"{self.tracebacks} tracebacks in the log"] if self.tracebacks else []
        if not fault.overdue:  # whose clients were told that it is too late
            lines += [f"{self.for_nobody} requests ran for nobody"] if self.for_nobody else []
        if not fault.fences:
            lines += [f"{self.deaths} processes ended"] if self.deaths else []
            lines += [f"{self.attempts} crashes counted"] if self.attempts else []
        if fault.overdue and not self.errors:
            lines.append("no request passed its deadline")
        if self.refusal_s > _MOST_REFUSAL_S:
            lines.append(f"a new request waited {self.refusal_s:.1f} s for its refusal")
        if not fault.loses_writes and self.scene.lost_writes:
            lines.append(f"{self.scene.lost_writes} acknowledged writes lost")
        for asked in self.scene.asked:
            if asked.answer.status == 503 and not 1 <= int(asked.answer.headers.get("retry-after", 0)) <= 60:
                lines.append(f"a 503 without advice: {asked.answer.headers}")
            if asked.answer.status not in (200, 503) and not fault.overdue:
                lines.append(f"a new request got {asked.answer.status} {asked.answer.body!r}")
        return "\n".join(lines)

    def row(self) -> list[str]:
        tokens = sum(len(text) for v in self.verdicts for text in v.outcome.plan.expected.texts)
        return [
            self.name,
            self.server,
            str(len(self.verdicts)),
            str(tokens),
            str(len(self.bad)),
            str(len(self.errors)),
            str(self.scene.lost_writes),
            str(self.deaths),
            f"{self.stall_s:.1f}",
            f"{self.scene.back_s:.1f}",
            f"{self.refusal_s:.1f}" if self.scene.asked else "-",
        ]


HEAD = (
    "fault", "server", "requests", "tokens", "wrong", "ended in an error", "acknowledged writes lost",
    "processes ended", "longest stall, s", "new requests served after, s", "slowest 503, s",
)  # fmt: skip


def table(played: Sequence[Played]) -> str:
    """Markdown, a fault a line."""
    rows = [HEAD, ["---"] * len(HEAD), *(one.row() for one in played)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def shape_for(name: str, server: str, lease_ms: int = 1000) -> Shape:
    """The fleet that a fault is played on."""
    fault = FAULTS[name]
    return Shape(
        server=server,
        lease_ms=lease_ms,
        appendfsync=fault.appendfsync,
        behind_proxy=fault.behind_proxy,
        request_timeout_s=fault.request_timeout_s,
    )


def play_all(names: Sequence[str], server: str, lease_ms: int = 1000) -> Iterator[Played]:
    """Faults that can share a fleet do."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        fault = FAULTS[name]
        if server != "cluster" or not fault.alone_only:
            key = (fault.appendfsync, fault.behind_proxy, fault.request_timeout_s)
            groups.setdefault(key, []).append(name)
    for group in groups.values():
        with Stage(shape_for(group[0], server, lease_ms)) as stage:
            for number, name in enumerate(group):
                yield stage.play(name, seed=number + 1)


class Stage:
    """One fleet on which faults are played, one after another. Use as a context manager."""

    def __init__(self, shape: Shape) -> None:
        self.fleet = Fleet(shape)
        self._plays = 0

    def __enter__(self) -> Stage:
        self.fleet.__enter__()
        self._prompt_tokens = count_prompts(self.fleet.ports[0])
        return self

    def __exit__(self, *error: object) -> None:
        self.fleet.__exit__(None, None, None)

    def play(self, name: str, *, seed: int = 1) -> Played:
        """Plays one fault, and leaves the fleet whole."""
        fault, fleet = FAULTS[name], self.fleet
        self._plays += 1
        plans = endless_plans(seed, longest=_LONGEST, first=self._plays * _MOST_PLANS)
        deaths, logged, start = fleet.deaths, len(fleet.logs()), time.monotonic()
        with fleet.redis() as client:
            state = State(client, fleet.keys, fleet.shape.partitions)
            before = state.completed()
            try:
                scene = asyncio.run(_under_load(fleet, state, fault, plans))
            except BaseException as error:
                error.add_note(f"while Redis: {name}\n{fleet.logs()[logged:][-20_000:]}")
                raise
            seconds = time.monotonic() - start
            outcomes = scene.load.outcomes
            hung = any(outcome.hung for outcome in outcomes)
            leftovers = settle(state, 0.0 if hung else _SETTLE_S)
            verdicts = [self._judge(outcome, fault) for outcome in outcomes]
            known = before | scene.uids | {outcome.uid for outcome in outcomes}
            strangers = sum(outcome.left and not outcome.uid for outcome in outcomes)
            for_nobody = max(0, len(state.completed() - known) - strangers)
            logs = fleet.logs()[logged:]
            played = Played(
                name, fault, fleet.shape.server, seconds, scene, verdicts, leftovers, state.immortal(),
                _inexact(state, scene.load, fault), fleet.deaths - deaths,
                state.attempts([one.uid for one in outcomes]), for_nobody, logs.count("Traceback"), logs,
            )  # fmt: skip
        fleet.wait_whole()
        return played

    def _judge(self, outcome: Outcome, fault: RedisFault) -> Verdict:
        return judge(outcome, self._prompt_tokens(outcome.plan), cuts_allowed=fault.cuts)


def _inexact(state: State, load: Load, fault: RedisFault) -> dict[str, list[str]]:
    """Traces in Redis that are wrong; none of what it lost whole after the client had it all."""
    found = inexact(state, load)
    return {uid: f for uid, f in found.items() if not fault.loses_writes or state.inside.field(uid, "state")}


async def _under_load(fleet: Fleet, state: State, fault: RedisFault, plans: Iterator[Plan]) -> Scene:
    """The load goes on until the fault is over and new requests are served again."""
    over = asyncio.Event()
    wanted = itertools.takewhile(lambda _: not over.is_set(), plans)
    load = Load(fleet.ports, wanted, streams=_STREAMS, bound_s=_BOUND_S)
    scene = Scene(fleet, state, load)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        try:
            await scene.under_way()
            await fault.breaks(scene)
            await scene.answers()
            await asyncio.sleep(_AFTERWARDS_S)
        finally:
            over.set()
    return scene
