"""A short run of the random harness, always the same, on either kind of server.

The cluster is Valkey's; alone, Valkey has its turn in `python -m tests.chaos`.
"""

from __future__ import annotations

import pytest

from tests.chaos.fleet import Shape
from tests.chaos.harness import Config, run
from tests.chaos.report import table

SERVERS = [pytest.param("redis7", marks=pytest.mark.redis7), "cluster"]
#: Promised is a second; asserted is five times that, since the machine may be a slow one.
MOST_GAP_S = 5.0


@pytest.mark.parametrize("server", SERVERS)
def test_nothing_is_lost_doubled_or_reordered(server: str) -> None:
    report = run(Config(requests=80, faults=12, server=server, seed=7, shape=Shape(lease_ms=800)))
    print(table([report]))
    assert report.good, report.problems()
    assert len(report.faults) >= 12
    assert report.undisturbed()[-1].seconds < MOST_GAP_S
