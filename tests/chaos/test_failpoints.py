"""Processes that fail at the worst moments: just before a script call, and just after Redis executed it."""

from __future__ import annotations

import random

from tests.chaos.report import table
from tests.chaos.sweep import CALLS, some_points, sweep


def test_failing_on_both_sides_of_every_call() -> None:
    points = {role: some_points(role) for role in CALLS}
    for role, some in points.items():
        random.Random(role).shuffle(some)
        del some[len(some) // 2 :]  # `make chaos` takes them all
    swept = sweep(points)
    print(table([swept.report]), swept.missed, sep="\n")
    assert swept.report.good, swept.report.problems()
    assert len(swept.missed) <= len(swept.reached) / 5, swept.missed
