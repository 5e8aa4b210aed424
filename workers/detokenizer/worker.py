"""The detokenizer: takes partitions by lease and runs one loop for each.

Partitions are shared evenly among live detokenizers; one that nobody owns for a while is taken regardless
of the share, so that no partition waits for a peer that is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from common.bus import registry
from common.bus.client import Bus, FencedError
from common.bus.keys import Keys
from common.bus.leases import Lease, Progress
from common.bus.registry import DETOKENIZER
from common.logging import Log
from workers.detokenizer.choices import Choices
from workers.detokenizer.partition import PartitionLoop

log = Log(__name__)

_EVERY_S = 0.25
_JOIN_S = 3.0


class DetokenizerWorker:
    """A `workers.runner.Worker`; ``load`` makes the decoder side of one partition."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        lease: Lease,
        load: Callable[[], Callable[[int], Choices]],
        *,
        partitions: int,
        ttl_ms: int,
        progress: Progress,
    ) -> None:
        self._bus = bus
        self._keys = keys
        self._lease = lease
        self._load = load
        self._make_choices: Callable[[int], Choices] | None = None
        self._partitions = partitions
        self._ttl_ms = ttl_ms
        self._progress = progress
        self.wake = threading.Event()
        self._loops: dict[int, PartitionLoop] = {}
        self._fence: FencedError | None = None
        self._orphan_since: dict[int, float] = {}
        self._draining = False

    def startup(self) -> None:
        self._make_choices = self._load()
        log.info("ready")

    def begin_drain(self) -> None:
        self._draining = True
        for loop in self._loops.values():
            loop.stop()

    def busy(self) -> bool:
        return not all(loop.join(0) for loop in self._loops.values())

    def shutdown(self) -> None:
        for loop in self._loops.values():
            loop.stop()
        deadline = time.monotonic() + _JOIN_S
        for loop in self._loops.values():
            loop.join(max(0.0, deadline - time.monotonic()))

    def stats(self) -> Mapping[str, Any]:
        """Readings for the registry; called from the lease thread."""
        loops = list(self._loops.values())
        return {
            "partitions": sorted(loop.partition for loop in loops),
            "records": sum(loop.records for loop in loops),
        }

    def step(self) -> None:
        if self._fence is not None:
            raise self._fence
        if not self._draining:
            self._share_out()
        self.wake.wait(_EVERY_S)
        self.wake.clear()

    def _share_out(self) -> None:
        """Take what is free within this process's share, or orphaned; give up what is beyond the share."""
        peers = len(registry.serving(self._bus, self._keys, DETOKENIZER))
        share = -(-self._partitions // max(1, peers))
        if len(self._loops) > share:
            self._give_up(next(iter(self._loops)))
        for partition in range(self._partitions):
            if partition not in self._loops and (len(self._loops) < share or self._orphaned(partition)):
                self._take(partition)

    def _server_ms(self) -> int:
        seconds, micros = self._bus.do("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def _orphaned(self, partition: int) -> bool:
        """Whether nobody has held the partition for a quarter of a lease, on this process's clock."""
        expiry = self._bus.do("HGET", self._keys.detok_lease(partition), "expiry")
        if expiry is not None and int(expiry) > self._server_ms():
            self._orphan_since.pop(partition, None)
            return False
        now = time.monotonic()
        return now - self._orphan_since.setdefault(partition, now) >= self._lease.ttl_ms / 4000

    def _take(self, partition: int) -> None:
        held = self._lease.take(partition)
        if not held.epoch:
            return
        assert self._make_choices is not None
        loop = PartitionLoop(
            self._bus,
            self._keys,
            partition,
            held.epoch,
            self._make_choices(partition),
            name=self._lease.worker,
            ttl_ms=self._ttl_ms,
            progress=self._progress,
            on_fenced=self._on_fenced,
        )
        self._loops[partition] = loop
        self._orphan_since.pop(partition, None)
        loop.start()
        log.info("took a partition", partition=partition, epoch=held.epoch)

    def _give_up(self, partition: int) -> None:
        """Hands a partition to a peer with fewer, between two commits."""
        loop = self._loops[partition]
        loop.stop()
        if loop.join(_JOIN_S):
            del self._loops[partition]
            self._lease.give_up(partition)
            log.info("gave a partition up", partition=partition)

    def _on_fenced(self, error: FencedError) -> None:
        """Called from a partition's thread."""
        self._fence = error
        self.wake.set()
