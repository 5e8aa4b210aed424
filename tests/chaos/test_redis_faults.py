"""Faults of Redis itself on a whole fleet under load: some of the quick ones, on a cluster.

`python -m tests.chaos --redis-faults` plays all of them on all servers.
"""

from __future__ import annotations

from tests.chaos.redis_runs import play_all, table

QUICK = ["hangs 2 s", "connections killed", "killed, 2 s of writes gone", "flushed"]


def test_requests_go_on_and_nobody_dies_of_it() -> None:
    played = list(play_all(QUICK, "cluster"))
    print(table(played))
    for one in played:
        assert not one.problems(), f"{one.name}: {one.problems()}\n{one.logs[-3000:]}"
