"""Faults of Redis itself on a whole fleet under load: the quick ones, each on one kind of server.

`python -m tests.chaos --redis-faults` plays all of them on all servers.
"""

from __future__ import annotations

import pytest

from tests.chaos.redis_runs import play_all, table

QUICK = {
    "valkey": ["hangs 2 s", "read-only 2 s", "killed, 2 s of writes gone", "out of memory"],
    "cluster": ["connections killed", "eviction allowed", "flushed"],
}


@pytest.mark.parametrize("server", QUICK)
def test_requests_go_on_and_nobody_dies_of_it(server: str) -> None:
    played = list(play_all(QUICK[server], server))
    print(table(played))
    for one in played:
        assert not one.problems(), f"{one.name}: {one.problems()}\n{one.logs[-3000:]}"
