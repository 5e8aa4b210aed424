"""The detokenizer: takes partitions by lease and runs one loop for each.

Partitions are shared evenly among live detokenizers; one that nobody owns for a while is taken regardless
of the share, so that no partition waits for a peer that is gone. Nothing of a partition is decoded between
one owner and the next, so whoever waits for one that is about to change hands looks often.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
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
#: While a partition is about to change hands.
_SOON_S = 0.02
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
        #: Partitions whose loop ends with its present commit, to be given up then.
        self._leaving: set[int] = set()
        #: Whether a partition should be ours soon.
        self._expecting = False
        self._fence: FencedError | None = None
        self._orphan_since: dict[int, float] = {}
        self._draining = False

    def startup(self) -> None:
        self._make_choices = self._load()
        log.info("ready")

    def begin_drain(self) -> None:
        self._draining = True
        self._expecting = False
        for partition in self._loops:
            self._leave(partition)

    def busy(self) -> bool:
        return bool(self._loops)

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
        self._give_up_ended()
        if not self._draining:
            self._share_out()
        self.wake.wait(_SOON_S if self._leaving or self._expecting else _EVERY_S)
        self.wake.clear()

    def _share_out(self) -> None:
        """Take what is free within this process's share, or orphaned; leave what is beyond the share."""
        now = self._server_ms()
        peers = registry.serving(self._bus, self._keys, DETOKENIZER)
        share = -(-self._partitions // max(1, len(peers)))
        owners = {partition: self._owner(partition, now) for partition in range(self._partitions)}
        if len(self._loops) - len(self._leaving) > share:
            self._leave(next(partition for partition in self._loops if partition not in self._leaving))
        for partition, owner in owners.items():
            if partition in self._loops:
                continue
            if self._orphaned(partition, owner) or (not owner and len(self._loops) < share):
                self._take(partition)
        self._expecting = len(self._loops) < share and self._changes_hands(owners.values(), peers, share)

    def _changes_hands(self, owners: Collection[str], peers: Collection[str], share: int) -> bool:
        """Whether somebody owns a partition who has too many, is draining, or has stopped."""
        sizes = Counter(owners)
        others = sizes.keys() - {"", self._lease.worker}
        return any(owner not in peers or sizes[owner] > share for owner in others)

    def _owner(self, partition: int, now: int) -> str:
        """Who holds the partition's lease; "" when it is free."""
        owner, expiry = self._bus.do("HMGET", self._keys.detok_lease(partition), "owner", "expiry")
        return owner.decode() if owner is not None and int(expiry or 0) > now else ""

    def _server_ms(self) -> int:
        seconds, micros = self._bus.do("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def _orphaned(self, partition: int, owner: str) -> bool:
        """Whether nobody has held the partition for a quarter of a lease, on this process's clock."""
        if owner:
            self._orphan_since.pop(partition, None)
            return False
        now = time.monotonic()
        return now - self._orphan_since.setdefault(partition, now) >= self._lease.ttl_ms / 4000

    def _take(self, partition: int) -> None:
        if self._lease.fenced.is_set():  # about to exit: the partition would be down until then
            return
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

    def _leave(self, partition: int) -> None:
        """Has a partition's loop end, between two commits. A loop that waits for news takes a second."""
        self._loops[partition].stop()
        self._leaving.add(partition)

    def _give_up_ended(self) -> None:
        """Hands the partitions whose loops have ended to peers."""
        for partition in list(self._leaving):
            if self._loops[partition].join(0):
                self._lease.give_up(partition)
                self._leaving.discard(partition)
                del self._loops[partition]
                log.info("gave a partition up", partition=partition)

    def _on_fenced(self, error: FencedError) -> None:
        """Called from a partition's thread."""
        self._fence = error
        self.wake.set()
