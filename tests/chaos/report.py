"""What a chaos run comes to: the numbers of its table, and what a test asserts of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.check import Verdict
from tests.chaos.faults import Fault
from tests.chaos.load import Outcome
from tests.helpers.stack import REDIS_ROLE


@dataclass(frozen=True, slots=True)
class Stall:
    """A stream that stood still in a fault's hands, from ``start`` to ``end``."""

    fault: Fault
    uid: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def suffers_from(self, other: Fault) -> bool:
        """Whether another fault struck meanwhile, the stream itself or the peers that were to take over."""
        if other is self.fault or not self.start <= other.at <= self.end:
            return False
        return self.uid in other.victims or other.role in (self.fault.role, REDIS_ROLE)


@dataclass(frozen=True, slots=True)
class Gap:
    """The longest time between two texts of a stream, from ``start`` on."""

    outcome: Outcome
    start: float
    seconds: float


@dataclass(slots=True)
class Report:
    """One run."""

    server: str
    seed: int
    seconds: float
    verdicts: list[Verdict]
    faults: list[Fault]
    #: What Redis still holds, keys without an end, requests whose streams or logs are wrong there.
    leftovers: dict[str, object]
    immortal: list[str]
    inexact: dict[str, list[str]]
    #: Processes that ended because they had been declared dead, and tracebacks in the log.
    fenced: int
    tracebacks: int
    logs: str = field(repr=False, default="")
    #: When the harness itself stood still and heard nothing.
    deaf: list[tuple[float, float]] = field(default_factory=list)

    @property
    def bad(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.good]

    @property
    def good(self) -> bool:
        return not (self.bad or self.leftovers or self.immortal or self.inexact or self.tracebacks)

    def stalls(self) -> list[Stall]:
        """How long each stream in a fault's hands stood still, the longest last."""
        by_uid = {v.outcome.uid: v.outcome for v in self.verdicts if v.outcome.plan.is_stream}
        found = [
            Stall(fault, uid, *gap)
            for fault in self.faults
            for uid in fault.victims & by_uid.keys()
            if (gap := _gap_at(by_uid[uid], fault.at)) is not None
        ]
        return sorted(found, key=lambda stall: stall.seconds)

    def stalls_with_standby(self) -> list[Stall]:
        """`stalls` of one fault alone, after which a peer of the role could take over."""
        return [
            stall
            for stall in self.stalls()
            if stall.fault.standby and not any(stall.suffers_from(other) for other in self.faults)
        ]

    def worst(self, count: int = 5) -> str:
        """The longest stalls: what to look for in the log."""
        lines = [
            f"stall of {stall.seconds:.2f} s, {stall.fault}: {stall.uid}"
            for stall in (*self.stalls()[-count:], *self.stalls_with_standby()[-count:])
        ]
        lines += [
            f"gap of {gap.seconds:.2f} s from {_clock(gap.start)}, undisturbed: {gap.outcome.uid}"
            for gap in self.undisturbed()[-count:]
        ]
        return "\n".join(lines)

    def undisturbed(self) -> list[Gap]:
        """The longest gap of each stream that was never in a fault's hands, sorted.

        Without the time in which the harness itself stood still.
        """
        touched = set().union(*(fault.victims for fault in self.faults))
        streams = [v.outcome for v in self.verdicts if v.outcome.plan.is_stream and v.outcome.uid]
        gaps = [self._longest_gap(one) for one in streams if one.uid not in touched]
        return sorted(gaps, key=lambda gap: gap.seconds)

    def _longest_gap(self, outcome: Outcome) -> Gap:
        longest = Gap(outcome, 0.0, 0.0)
        for before, after in pairwise(outcome.texts):
            if after - before > longest.seconds:  # few are: the rest need not be looked at closely
                gap = Gap(outcome, before, after - before - self._deaf(before, after))
                longest = max(longest, gap, key=lambda gap: gap.seconds)
        return longest

    def _deaf(self, start: float, end: float) -> float:
        """How long of a span of time the harness stood still."""
        return sum(max(0.0, min(end, until) - max(start, since)) for since, until in self.deaf)

    def problems(self) -> str:
        """All that is wrong, for a failing test."""
        lines = [str(verdict) for verdict in self.bad[:20]]
        lines += [f"left in Redis: {self.leftovers}"] if self.leftovers else []
        lines += [f"no time to live: {self.immortal[:5]}"] if self.immortal else []
        lines += [f"{uid}: {faults}" for uid, faults in list(self.inexact.items())[:10]]
        lines += [f"{self.tracebacks} tracebacks in the log"] if self.tracebacks else []
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, str]]:
        """The table, one run a column."""
        kinds = Counter(f"{fault.kind} {fault.role}" for fault in self.faults)
        beside = [stall.seconds for stall in self.stalls_with_standby()]
        stalls, gaps = [stall.seconds for stall in self.stalls()], [gap.seconds for gap in self.undisturbed()]
        refusals = sum(verdict.outcome.refusals for verdict in self.verdicts)
        wrong = sum(bool(verdict.wrong) for verdict in self.verdicts)
        return [
            ("seed", str(self.seed)),
            ("seconds", f"{self.seconds:.0f}"),
            ("requests", str(len(self.verdicts))),
            ("tokens checked", str(sum(sum(v.outcome.plan.expected.tokens) for v in self.verdicts))),
            ("faults", str(len(self.faults))),
            *((name, str(count)) for name, count in sorted(kinds.items())),
            ("zombies fenced", str(self.fenced)),
            ("tokens lost", str(sum(verdict.lost for verdict in self.verdicts))),
            ("tokens doubled", str(sum(verdict.doubled for verdict in self.verdicts))),
            ("tokens reordered", str(sum(verdict.reordered for verdict in self.verdicts))),
            ("requests with errors, wrong ends or usage, or that hang", str(wrong)),
            ("connections cut (API killed)", str(sum(v.outcome.cut for v in self.verdicts))),
            ("cut, and gone on with elsewhere", str(sum(v.outcome.returns for v in self.verdicts))),
            ("refused before acceptance (503, 429), asked again", str(refusals)),
            ("token logs or reply streams not exact in Redis", str(len(self.inexact))),
            ("left in Redis", str(len(self.leftovers) + len(self.immortal))),
            ("stall of a stream in a fault's hands, p50 / p99 / max s", _quantiles(stalls)),
            ("the same where a peer stood by, p50 / p99 / max s", _quantiles(beside)),
            ("longest gap of undisturbed streams, p50 / p99 / max s", _quantiles(gaps)),
        ]


def table(reports: Sequence[Report]) -> str:
    """Markdown, one column per run."""
    columns = [dict(report.rows()) for report in reports]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = [
        "| | " + " | ".join(report.server for report in reports) + " |",
        "|---" * (len(reports) + 1) + "|",
    ]
    return "\n".join(
        head + [f"| {name} | " + " | ".join(c.get(name, "0") for c in columns) + " |" for name in names]
    )


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    picked = (values[len(values) // 2], values[min(len(values) - 1, len(values) * 99 // 100)], values[-1])
    return " / ".join(f"{value:.2f}" for value in picked)


def _gap_at(outcome: Outcome, moment: float) -> tuple[float, float] | None:
    """The time without an event around ``moment``; None when the stream was not under way."""
    marks = [outcome.sent, *outcome.times]
    return next(((before, after) for before, after in pairwise(marks) if before <= moment < after), None)


def _clock(moment: float) -> str:
    """A monotonic time as the log tells it."""
    wall = moment + time.time() - time.monotonic()
    return time.strftime("%H:%M:%S", time.localtime(wall)) + f".{int(wall % 1 * 1000):03d}"
