"""Faults of Redis itself on a whole fleet under load: the quick ones, always the same, on one server each.

`python -m tests.chaos --redis-faults` plays all of them on all servers.
"""

from __future__ import annotations

import pytest

from tests.chaos.redis_faults import FAULTS, RedisFault, hangs, is_read_only
from tests.chaos.redis_runs import Stage, table
from tests.chaos.fleet import Shape

#: Promised is a second, give or take a look at the server; asserted is five times that.
MOST_REFUSAL_S = 5.0
LEASE_MS = 800

QUICK = {
    "hangs": RedisFault(hangs(2.0)),
    "read-only": RedisFault(is_read_only(1.6)),
    "out of memory": FAULTS["out of memory"],
    "eviction allowed": FAULTS["eviction allowed"],
    "connections killed": FAULTS["connections killed"],
    "2 s of writes gone": FAULTS["killed, 2 s of writes gone"],
}
