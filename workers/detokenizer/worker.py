"""The detokenizer: takes partitions by lease, and has one loop work on them.

Partitions are shared evenly among live detokenizers; one that nobody owns for a while is taken regardless
of the share, so that no partition waits for a peer that is gone. A lease that merely expired is no proof of
that: it must be seen expired twice, by a process whose own lease is in order (B3). Nothing of a partition is
decoded between one owner and the next, so whoever waits for one that is about to change hands looks often.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from common.bus import registry
from common.bus.client import Bus, FencedError
from common.bus.keys import Keys
from common.bus.leases import Lease, Progress
from common.bus.peers import OBSERVE_S
from common.bus.registry import DETOKENIZER
from common.logging import Log
from workers.detokenizer.choices import Choices
from workers.detokenizer.loop import Loop
from workers.detokenizer.partition import Partition

log = Log(__name__)

_EVERY_S = 0.25
#: While a partition is about to change hands.
_SOON_S = 0.02
_JOIN_S = 3.0


class _Hold(NamedTuple):
    """What a partition's lease says."""

    #: Who holds it; "" when nobody does.
    owner: str
    #: It ran out; its owner did not give it up, and no supervisor said that it is dead.
    lapsed: bool


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
        self.wake = threading.Event()
        self._loop = Loop(bus, progress=progress, on_fenced=self._on_fenced)
        self._held: dict[int, Partition] = {}
        #: Partitions that the loop lets go of after its present commit, to be given up then.
        self._leaving: set[int] = set()
        #: Whether a partition should be ours soon.
        self._expecting = False
        self._fence: FencedError | None = None
        self._unheld_since: dict[int, float] = {}
        self._draining = False

    def startup(self) -> None:
        self._make_choices = self._load()
        self._loop.start()
        log.info("ready")

    def begin_drain(self) -> None:
        self._draining = True
        self._expecting = False
        for partition in self._held:
            self._leave(partition)

    def busy(self) -> bool:
        return bool(self._held)

    def shutdown(self) -> None:
        self._loop.stop(_JOIN_S)

    def stats(self) -> Mapping[str, Any]:
        """Readings for the registry; called from the lease thread."""
        held = list(self._held.values())
        return {
            "partitions": sorted(partition.number for partition in held),
            "records": sum(partition.records for partition in held),
        }

    def step(self) -> None:
        if self._fence is not None:
            raise self._fence
        self._give_up_left()
        if not self._draining:
            self._share_out()
        self.wake.wait(_SOON_S if self._leaving or self._expecting else _EVERY_S)
        self.wake.clear()

    def _share_out(self) -> None:
        """Take what is free within this process's share, or orphaned; leave what is beyond the share."""
        now = self._server_ms()
        peers = registry.serving(self._bus, self._keys, DETOKENIZER)
        share = -(-self._partitions // max(1, len(peers)))
        holds = {partition: self._hold(partition, now) for partition in range(self._partitions)}
        if len(self._held) - len(self._leaving) > share:
            self._leave(next(partition for partition in self._held if partition not in self._leaving))
        for partition, hold in holds.items():
            if partition in self._held:
                continue
            if self._is_free(partition, hold, within=len(self._held) < share):
                self._take(partition)
        self._expecting = len(self._held) < share and self._changes_hands(
            [hold.owner for hold in holds.values()], peers, share
        )

    def _changes_hands(self, owners: Collection[str], peers: Collection[str], share: int) -> bool:
        """Whether somebody owns a partition who has too many, is draining, or has stopped."""
        sizes = Counter(owners)
        others = sizes.keys() - {"", self._lease.worker}
        return any(owner not in peers or sizes[owner] > share for owner in others)

    def _hold(self, partition: int, now: int) -> _Hold:
        owner, expiry = self._bus.do("HMGET", self._keys.detok_lease(partition), "owner", "expiry")
        until_ms = int(expiry or 0)
        return _Hold(owner.decode() if owner is not None and until_ms > now else "", 0 < until_ms <= now)

    def _server_ms(self) -> int:
        seconds, micros = self._bus.do("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def _is_free(self, partition: int, hold: _Hold, *, within: bool) -> bool:
        """Whether the partition may be taken; ``within`` this process's share at once, if it was given up."""
        if hold.owner or (hold.lapsed and not self._lease.steadiness.holds()):
            self._unheld_since.pop(partition, None)
            return False
        now = time.monotonic()
        patience_s = OBSERVE_S if hold.lapsed else 0.0 if within else self._lease.ttl_ms / 4000
        return now - self._unheld_since.setdefault(partition, now) >= patience_s

    def _take(self, partition: int) -> None:
        if self._lease.fenced.is_set():  # about to exit: the partition would be down until then
            return
        held = self._lease.take(partition)
        if not held.epoch:
            return
        assert self._make_choices is not None
        self._held[partition] = Partition(
            self._bus,
            self._keys,
            partition,
            held.epoch,
            self._make_choices(partition),
            name=self._lease.worker,
            ttl_ms=self._ttl_ms,
        )
        self._loop.add(self._held[partition])
        self._unheld_since.pop(partition, None)
        log.info("took a partition", partition=partition, epoch=held.epoch)

    def _leave(self, partition: int) -> None:
        """Has a partition let go of, between two commits."""
        self._loop.leave(partition)
        self._leaving.add(partition)

    def _give_up_left(self) -> None:
        """Hands the partitions that the loop has let go of to peers."""
        for partition in list(self._leaving):
            if not self._loop.holds(partition):
                self._lease.give_up(partition)
                self._leaving.discard(partition)
                del self._held[partition]
                log.info("gave a partition up", partition=partition)

    def _on_fenced(self, error: FencedError) -> None:
        """Called from the loop's thread."""
        self._fence = error
        self.wake.set()
