"""What the long runs measure, and how they say it: rows with bounds, quantiles, who uses how much memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.helpers.stack import REDIS_ROLE, Stack, role_of

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. ``good`` is None for what is only told."""

    name: str
    value: str
    bound: str = ""
    good: bool | None = None


def within(name: str, value: float, most: float, unit: str) -> Row:
    """A number that must not be larger than ``most``."""
    return Row(name, f"{value:.3g} {unit}", f"<= {most:.3g} {unit}", value <= most)


def exactly(name: str, value: object, wanted: object) -> Row:
    return Row(name, str(value), f"= {wanted}", value == wanted)


def told(name: str, value: object) -> Row:
    return Row(name, str(value))


def bad(rows: Sequence[Row]) -> list[Row]:
    """Rows whose bounds are broken."""
    return [row for row in rows if row.good is False]


def table(title: str, rows: Sequence[Row]) -> str:
    """Markdown."""
    words = {True: "yes", False: "**no**", None: ""}
    lines = [f"### {title}", "", "| | measured | bound | holds |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.value} | {row.bound} | {words[row.good]} |" for row in rows]
    return "\n".join(lines)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What a stack uses at one moment, in bytes: resident memory by role, what Redis says, and its keys."""

    resident: Mapping[str, int]
    redis: int
    keys: int

    def growth(self, since: Memory) -> dict[str, int]:
        """By role, Redis as it counts itself."""
        grown = {role: size - since.resident.get(role, 0) for role, size in self.resident.items()}
        return grown | {REDIS_ROLE: self.redis - since.redis}


def memory_of(stack: Stack) -> Memory:
    resident: dict[str, int] = {}
    for process in stack.processes():
        if (role := role_of(process)) and role != REDIS_ROLE:
            resident[role] = resident.get(role, 0) + process.memory_info().rss
    with stack.redis() as client:
        return Memory(resident, int(client.info("memory")["used_memory"]), client.dbsize())


def flat(name: str, grown: Mapping[str, int], most: int) -> list[Row]:
    """A row per role, none of which may have grown by more than ``most`` bytes."""
    return [within(f"{name}: {role}", size / _MB, most / _MB, "MB") for role, size in sorted(grown.items())]
