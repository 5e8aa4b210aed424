"""Where a worker's work comes from: fresh entries, stranded entries, and entries of dead peers.

One partition at a time, interactive before batch, and never more than the worker has room for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from common.bus.client import Bus
from common.bus.keys import Keys
from common.bus.peers import OBSERVE_S, PeerWatch
from common.bus.streams import Bell, Entry, GroupReader

#: How often entries of lost replies are searched for.
STRANDED_S = 2.0
#: Fresh entries are looked for at least this often, should a bell have been missed.
POLL_S = 1.0


class Intake:
    """One consumer group's streams: ``streams`` maps a partition to its streams, most urgent class first."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        group: str,
        streams: Mapping[int, Sequence[str]],
        *,
        worker: str,
        lease_ms: int,
        wake: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._wake = wake
        self._readers = {
            p: [GroupReader(bus, stream, group, worker) for stream in some] for p, some in streams.items()
        }
        self._watches = {p: PeerWatch(bus, keys, p, group, me=worker, lease_ms=lease_ms) for p in streams}
        self._levels = max(map(len, streams.values()))
        #: Streams that may have entries.
        self._news = {stream for some in streams.values() for stream in some}
        self._next_poll = self._next_stranded = self._next_scan = 0.0
        self._first = 0
        self._bells = [
            Bell(bus.url, some, self._ring, name=f"{worker}-bell-{p}") for p, some in streams.items()
        ]

    def start(self) -> None:
        """Creates the groups and starts listening."""
        for readers in self._readers.values():
            for reader in readers:
                reader.ensure()
        for bell in self._bells:
            bell.start()

    def stop(self) -> None:
        for bell in self._bells:
            bell.stop()

    def _ring(self, stream: str) -> None:
        self._news.add(stream)
        self._wake.set()

    def fresh(self, room: int) -> list[Entry]:
        """New work, at most ``room`` entries."""
        now = self._clock()
        if now >= self._next_poll:
            self._next_poll = now + POLL_S
            self._news.update(reader.stream for some in self._readers.values() for reader in some)
        partitions = len(self._readers)
        order = [(self._first + i) % partitions for i in range(partitions)]
        self._first = (self._first + 1) % partitions
        entries: list[Entry] = []
        for level in range(self._levels):
            for partition in order:
                reader, asked = self._readers[partition][level], room - len(entries)
                if asked <= 0 or reader.stream not in self._news:
                    continue
                self._news.discard(reader.stream)  # before the read: what comes in meanwhile rings again
                got = reader.read(asked)
                if len(got) >= asked:
                    self._news.add(reader.stream)  # there may be more
                entries += got
        return entries

    def recovered(self, held: Collection[str]) -> list[Entry]:
        """Work of dead peers and of lost replies; ``held`` are the entry ids in hand. Mostly empty."""
        now = self._clock()
        entries: list[Entry] = []
        if now >= self._next_scan:
            self._next_scan = now + OBSERVE_S
            for partition, readers in self._readers.items():
                for reader in readers:
                    entries += self._watches[partition].scan(reader.stream)
        if now >= self._next_stranded:
            self._next_stranded = now + STRANDED_S
            for readers in self._readers.values():
                for reader in readers:
                    entries += reader.stranded(held)
        return [entry for entry in entries if entry.id not in held]
