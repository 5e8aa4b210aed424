"""The life of a worker: what others know of it when it begins to stop."""

from __future__ import annotations

import threading

from common.bus import registry
from common.bus.client import Bus
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys
from common.bus.leases import Lease, Progress
from common.exitcodes import ExitCode
from workers.runner import Runner

KEYS = Keys()


class Idle:
    """A worker with nothing to do, which looks around when it is told to stop."""

    def __init__(self, bus: Bus) -> None:
        self.wake = threading.Event()
        self._bus = bus
        self.seen: list[list[str]] = []

    def startup(self) -> None:
        """Nothing to load."""

    def step(self) -> None:
        self.seen.append(registry.serving(self._bus, KEYS, registry.SCHEDULER, "m"))

    def begin_drain(self) -> None:
        self.step()

    def busy(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Nothing to stop."""


def test_who_stops_says_so_before_it_looks_for_a_peer(server: EmbeddedRedis, bus: Bus) -> None:
    """Else two that stop at once would rely on each other."""
    progress, worker = Progress(), Idle(bus)
    lease = Lease(
        server.url, KEYS, worker="w", role=registry.SCHEDULER, model="m", partitions=1, ttl_ms=60_000,
        progress=progress, stats=dict,
    )  # fmt: skip
    assert Runner(worker, lease, progress, grace_s=1.0, burst=True).run() == ExitCode.OK
    assert worker.seen == [["w"], []]
