"""A worker's liveness: leases on every partition, renewed from a thread of their own, gated by progress.

Expiry alone never fences anybody; ``dead=1`` does (B3, B4). A worker whose loop is wedged stops being
renewed, so its peers may take its work; should it wake up, its next write is refused and it exits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.bus import registry
from common.bus.client import Bus, FencedError
from common.bus.keys import Keys
from common.bus.scripts import Call
from common.bus.steadiness import Steadiness
from common.errors import MillstreamError
from common.logging import Log

log = Log(__name__)

#: A loop that made no progress for this long is wedged. Longer than the longest step of a slow machine.
HANG_S = 30.0
#: How long the lease of a worker that is dead, or silent, stays as evidence.
KEEP_MS = 3_600_000
#: A worker still wedged this long after its lease stopped is beyond help: it ends, to be replaced.
_WEDGED_S = 2 * HANG_S
#: Renewals per lease time.
_RENEWALS = 4
#: How soon a renewal that failed is tried again: before any peer can see the lease expired twice.
_RETRY_S = 0.1


def renew(keys: Keys, partition: int, worker: str, ttl_ms: int, *, opening: bool = False) -> Call[int]:
    """RENEW: a sign of life; returns the server's clock in ms. ``opening`` creates the lease, once."""
    return Call("renew", (keys.lease(partition, worker),), (worker, ttl_ms, int(opening), KEEP_MS), int)


def retire(keys: Keys, partition: int, worker: str, *, drained: bool) -> Call[int]:
    """RETIRE: marks a worker dead at once. ``drained``: it went in order, which never counts as a crash."""
    names = (keys.lease(partition, worker), keys.detok_lease(partition))
    return Call("retire", names, (worker, int(drained), KEEP_MS), int)


@dataclass(frozen=True, slots=True)
class Ownership:
    """A detokenizer's hold on a partition; ``epoch`` 0 means it is somebody else's."""

    epoch: int
    taken: bool


def own_partition(keys: Keys, partition: int, worker: str, ttl_ms: int, *, take: bool) -> Call[Ownership]:
    """OWN_PARTITION: renews the partition's lease, or takes it when it is free and ``take`` is set."""
    names = (keys.detok_lease(partition), keys.lease(partition, worker))
    return Call(
        "own_partition",
        names,
        (worker, ttl_ms, "take" if take else "keep"),
        lambda reply: Ownership(int(reply[0]), bool(reply[1])),
    )


def release_partition(keys: Keys, partition: int, worker: str) -> Call[Ownership]:
    """OWN_PARTITION, the other way: gives the partition up, for a peer to take."""
    names = (keys.detok_lease(partition), keys.lease(partition, worker))
    return Call("own_partition", names, (worker, 0, "release"), lambda _: Ownership(0, taken=False))


class WedgedError(MillstreamError):
    """A worker's loop hangs and will not come back."""


class Progress:
    """Signs of life of a worker's loops, one per name; a loop that waits on purpose beats as well."""

    def __init__(self, *, hang_s: float = HANG_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._hang_s = hang_s
        self._clock = clock
        self._beats: dict[str, float] = {}

    def beat(self, name: str) -> None:
        self._beats[name] = self._clock()

    def end(self, name: str) -> None:
        """The loop has ended; it is not waited for any more."""
        self._beats.pop(name, None)

    def wedged(self) -> list[str]:
        """Names of the loops that have not moved for too long."""
        now = self._clock()
        return [name for name, beat in list(self._beats.items()) if now - beat > self._hang_s]


class Lease:
    """One worker's leases and its announcement in the registry, kept up by a thread.

    `fenced` is set once the worker has been declared dead: it must stop writing and exit.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        *,
        worker: str,
        role: str,
        model: str,
        partitions: int,
        ttl_ms: int,
        progress: Progress,
        stats: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._bus = Bus(url, name=f"{worker}-lease", timeout_s=1.0, retries=1)
        self._keys = keys
        self.worker = worker
        self._role = role
        self._model = model
        self._partitions = range(partitions)
        self.ttl_ms = ttl_ms
        self._progress = progress
        self._stats = stats
        self.fenced = threading.Event()
        #: Whether this worker may take others for dead.
        self.steadiness = Steadiness(ttl_ms)
        self.draining = False
        self._serving = False
        self._owned: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="lease", daemon=True)

    def open(self) -> None:
        """Creates the leases and starts the thread that renews them; raises what `Bus.run` raises."""
        for partition in self._partitions:
            self._bus.run(renew(self._keys, partition, self.worker, self.ttl_ms, opening=True))
        self.steadiness.renewed()
        self._thread.start()

    def announce(self) -> None:
        """Tells everybody that this worker takes work now; the thread repeats it."""
        self._serving = True
        self._announce()

    def take(self, partition: int) -> Ownership:
        """For detokenizers: takes a free partition; from now on the thread renews it."""
        held = self._bus.run(own_partition(self._keys, partition, self.worker, self.ttl_ms, take=True))
        if held.epoch:
            self._owned.add(partition)
        return held

    def give_up(self, partition: int) -> None:
        """For detokenizers: releases a partition for a peer."""
        self._owned.discard(partition)
        self._bus.run(release_partition(self._keys, partition, self.worker))

    def close(self, *, drained: bool) -> None:
        """Stops renewing and says so, so that peers need not wait. Best effort: Redis may be gone."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        try:
            for partition in self._partitions:
                self._bus.run(retire(self._keys, partition, self.worker, drained=drained))
            registry.withdraw(self._bus, self._keys, self.worker)
        except MillstreamError as error:
            log.warning("could not retire the leases", error=error.message)
        self._bus.close()

    def _announce(self) -> None:
        registry.announce(
            self._bus,
            self._keys,
            worker=self.worker,
            role=self._role,
            model=self._model,
            draining=self.draining,
            stats=self._stats(),
        )

    def _loop(self) -> None:
        wedged_since: float | None = None
        every_s = pause_s = self.ttl_ms / 1000 / _RENEWALS
        while not self._stop.wait(pause_s):
            wedged = self._progress.wedged()
            if wedged:
                if wedged_since is None:
                    wedged_since = time.monotonic()
                    log.warning("no progress: the lease is not renewed", loops=",".join(wedged))
                if time.monotonic() - wedged_since > _WEDGED_S:
                    raise WedgedError(f"no progress for long: {', '.join(wedged)}")
                continue
            wedged_since = None
            try:
                self._renew_all()
            except FencedError as error:
                log.warning("fenced: this worker was declared dead", reason=error.message)
                self.fenced.set()
                return
            except MillstreamError as error:
                if pause_s == every_s:
                    log.warning("the lease could not be renewed, trying again", error=error.message)
                pause_s = min(every_s, _RETRY_S)
            except Exception:  # a fault of ours, say in `stats`, must not make a working worker look dead
                log.exception("a renewal failed")
            else:
                if pause_s != every_s:
                    log.info("the lease is renewed again")
                pause_s = every_s

    def _renew_all(self) -> None:
        for partition in self._partitions:
            self._bus.run(renew(self._keys, partition, self.worker, self.ttl_ms))
        self.steadiness.renewed()
        for partition in list(self._owned):
            held = self._bus.run(own_partition(self._keys, partition, self.worker, self.ttl_ms, take=False))
            if not held.epoch and partition in self._owned:
                raise FencedError(f"partition {partition} was taken by a peer")
        if self._serving:
            self._announce()


def mark_dead(bus: Bus, keys: Keys, partitions: int, worker: str) -> None:
    """For supervisors: a child was reaped, so its leases are dead now, not when they expire (B3)."""
    for partition in range(partitions):
        bus.run(retire(keys, partition, worker, drained=False))
    registry.withdraw(bus, keys, worker)
