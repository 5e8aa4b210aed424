"""Where a worker's work comes from: fresh entries, stranded entries, and entries of dead peers.

One partition at a time, interactive before batch, and never more than the worker has room for. What was
taken from Redis stays here until the worker has begun it, whatever fails in between.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import islice

from common.bus.client import Bus, FencedError
from common.bus.keys import Keys
from common.bus.peers import OBSERVE_S, PeerWatch
from common.bus.steadiness import Steadiness
from common.bus.streams import Bell, Entry, GroupReader, Place
from common.errors import MillstreamError, UnavailableError
from common.logging import Log

log = Log(__name__)

#: How often entries of lost replies are searched for, besides after every loss this process knows of.
STRANDED_S = 2.0
#: Fresh entries are looked for at least this often, should a bell have been missed.
POLL_S = 1.0
#: Pause before what could not be begun is tried again, while Redis does not answer.
AGAIN_S = 0.1


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
        steadiness: Steadiness,
        wake: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._wake = wake
        self._readers = {
            p: [GroupReader(bus, stream, group, worker) for stream in some] for p, some in streams.items()
        }
        self._watches = {
            p: PeerWatch(bus, keys, p, group, me=worker, lease_ms=lease_ms, steadiness=steadiness)
            for p in streams
        }
        #: Streams that may have entries.
        self._news = {stream for some in streams.values() for stream in some}
        self._next_poll = self._next_stranded = self._next_scan = self._next_try = 0.0
        self._taken: deque[Entry] = deque()
        self._losses = 0
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

    def next(self, count: int) -> list[Entry]:
        """What `begin` will give out first, at most ``count``; nothing while Redis does not answer."""
        return list(islice(self._taken, count)) if self._clock() >= self._next_try else []

    @property
    def taken(self) -> int:
        """How many entries were taken and not begun yet."""
        return len(self._taken)

    def begin(self, start: Callable[[Entry], None]) -> int:
        """Gives what was taken to ``start``, oldest first; returns how much that was.

        While Redis does not answer the rest waits for the next call. An entry that Redis refuses is left to
        the search for stranded ones, so that it holds up no other.
        """
        if self._clock() < self._next_try:
            return 0
        begun = 0
        while self._taken:
            entry = self._taken[0]
            try:
                start(entry)
                begun += 1
            except FencedError:
                raise
            except UnavailableError as error:
                log.warning("work cannot be begun yet", uid=entry.uid, error=error.message)
                self._next_try = self._clock() + AGAIN_S
                break
            except MillstreamError as error:
                log.warning("work cannot be begun", uid=entry.uid, error=error.message)
            self._taken.popleft()
        return begun

    def take_fresh(self, rooms: Sequence[int]) -> None:
        """Takes new work: ``rooms`` says for each class how much of it and of those before it."""
        rooms = [room - len(self._taken) for room in rooms]
        now = self._clock()
        if now >= self._next_poll:
            self._next_poll = now + POLL_S
            self._news.update(reader.stream for some in self._readers.values() for reader in some)
        partitions = len(self._readers)
        order = [(self._first + i) % partitions for i in range(partitions)]
        self._first = (self._first + 1) % partitions
        got = 0
        for level, room in enumerate(rooms):
            for partition in order:
                reader, asked = self._readers[partition][level], room - got
                if asked <= 0 or reader.stream not in self._news:
                    continue
                self._news.discard(reader.stream)  # before the read: what comes in meanwhile rings again
                read = self._read(reader, asked)
                self._taken += read
                got += len(read)
                if len(read) >= asked:
                    self._news.add(reader.stream)  # there may be more

    def _read(self, reader: GroupReader, count: int) -> list[Entry]:
        try:
            return reader.read(count)
        except MillstreamError:
            self._news.add(reader.stream)
            raise

    def take_recovered(self, held: Container[Place]) -> None:
        """Takes work of dead peers and of lost replies; ``held`` is what the worker has in hand."""
        now = self._clock()
        if now >= self._next_scan:
            self._next_scan = now + OBSERVE_S
            for partition, readers in self._readers.items():
                for reader in readers:
                    for entry in self._watches[partition].scan(reader.stream):
                        self._taken.append(entry)
        losses = self._bus.losses
        if now >= self._next_stranded or losses != self._losses:
            self._next_stranded, self._losses = now + STRANDED_S, losses
            known = {entry.place for entry in self._taken}
            for readers in self._readers.values():
                for reader in readers:
                    found = reader.stranded(held)
                    self._taken += [entry for entry in found if entry.place not in known]
