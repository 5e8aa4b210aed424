"""Reading work streams as a consumer group: fresh entries, stranded entries, and a bell that rings for news.

Reads are never `XREADGROUP ... 0` (it would raise delivery counts); entries lost with a reply are found by
read-only XPENDING on oneself (B5). A group that is gone is created again at id 0, with back-off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

from common.bus.client import BLOCK_MS, BlockingBus, Bus, NoGroupError
from common.errors import MillstreamError
from common.logging import Log

log = Log(__name__)

_PENDING_PAGE = 1000
_NOGROUP_PAUSE_S = 0.2


#: A stream, and the id of an entry in it.
Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a work stream. ``claimed``: it came from another worker, which crashed (or drained)."""

    stream: str
    id: str
    uid: str
    choice: int
    claimed: bool = False
    drained: bool = False

    @property
    def place(self) -> Place:
        """What tells it from every other entry: the id alone does not, since streams count apart."""
        return self.stream, self.id


def entry_of(stream: str, entry_id: bytes, fields: Iterable[bytes]) -> Entry:
    """An entry from XREADGROUP's or XRANGE's field list."""
    items = list(fields)
    named = dict(zip(items[::2], items[1::2], strict=True))
    return Entry(stream, entry_id.decode(), named[b"uid"].decode(), int(named.get(b"choice", b"0")))


class GroupReader:
    """One consumer of one work stream."""

    def __init__(self, bus: Bus, stream: str, group: str, consumer: str) -> None:
        self._bus = bus
        self.stream = stream
        self.group = group
        self.consumer = consumer
        self._quiet_until = 0.0

    def ensure(self) -> None:
        """Creates the stream and its group if need be, at id 0: what waits there is not skipped."""
        try:
            self._bus.do("XGROUP", "CREATE", self.stream, self.group, "0", "MKSTREAM")
        except MillstreamError as error:
            if "BUSYGROUP" not in error.message:
                raise

    def read(self, count: int) -> list[Entry]:
        """Up to ``count`` fresh entries, at once; none while a lost group is being recreated."""
        if time.monotonic() < self._quiet_until:
            return []
        try:
            reply = self._bus.do(
                "XREADGROUP", "GROUP", self.group, self.consumer, "COUNT", count, "STREAMS", self.stream, ">"
            )
        except NoGroupError:
            log.warning("the consumer group is gone, creating it again", stream=self.stream)
            self._quiet_until = time.monotonic() + _NOGROUP_PAUSE_S
            self.ensure()
            return []
        if not reply:
            return []
        return [
            entry for entry_id, fields in reply[0][1] if (entry := self._entry(entry_id, fields)) is not None
        ]

    def stranded(self, held: Container[Place]) -> list[Entry]:
        """Entries pending on this consumer that it does not hold: replies that were lost on the way."""
        found: list[Entry] = []
        start = b"-"
        try:
            while True:
                page = self._bus.do(
                    "XPENDING", self.stream, self.group, start, "+", _PENDING_PAGE, self.consumer
                )
                found += [
                    entry
                    for entry_id, *_ in page
                    if (self.stream, entry_id.decode()) not in held
                    and (entry := self._look_up(entry_id)) is not None
                ]
                if len(page) < _PENDING_PAGE:
                    return found
                start = b"(" + page[-1][0]
        except NoGroupError:
            return found

    def _look_up(self, entry_id: bytes) -> Entry | None:
        """A pending entry; one that somebody deleted by hand is acked, or it would be searched for ever."""
        rows = self._bus.do("XRANGE", self.stream, entry_id, entry_id)
        if not rows:  # mostly because its hand-off has just acked it, and then there is nothing to ack
            if self._bus.do("XACK", self.stream, self.group, entry_id):
                log.warning("a pending entry is gone", stream=self.stream, entry=entry_id.decode())
            return None
        return self._entry(entry_id, rows[0][1])

    def _entry(self, entry_id: bytes, fields: Iterable[bytes]) -> Entry | None:
        """The entry; one that nobody of ours wrote is removed, or it would end every worker that meets it."""
        try:
            return entry_of(self.stream, entry_id, fields)
        except (KeyError, ValueError):
            log.warning("an entry cannot be read, removing it", stream=self.stream, entry=entry_id.decode())
            self._bus.do("XDEL", self.stream, entry_id)
            self._bus.do("XACK", self.stream, self.group, entry_id)
            return None


class Bell:
    """Rings for each of some streams of one partition that gets an entry: a plain blocking XREAD in a thread.

    It consumes nothing, so a worker can sleep on it whatever it has room for, and decide then what to read.
    """

    def __init__(self, url: str, streams: Collection[str], ring: Callable[[str], None], *, name: str) -> None:
        self._url = url
        self._last = dict.fromkeys(streams, "")
        self._ring = ring
        self._name = name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end; it does within `BLOCK_MS`, and never holds up the exit of the process."""
        self._stop.set()

    def _loop(self) -> None:
        bus = BlockingBus(self._url, name=self._name)
        while not self._stop.is_set():
            try:
                self._wait(bus)
            except MillstreamError as error:
                log.debug("the bell lost Redis", error=error.message)
                self._last = dict.fromkeys(self._last, "")
                self._stop.wait(0.2)
        bus.close()

    def _wait(self, bus: BlockingBus) -> None:
        for stream, last in self._last.items():
            if not last:
                newest = bus.do("XREVRANGE", stream, "+", "-", "COUNT", 1)
                self._last[stream] = newest[0][0].decode() if newest else "0-0"
                self._ring(stream)
        reply = bus.do(
            "XREAD", "COUNT", 1000, "BLOCK", BLOCK_MS, "STREAMS", *self._last, *self._last.values()
        )
        for stream, entries in reply or ():
            self._last[stream.decode()] = entries[-1][0].decode()
            self._ring(stream.decode())
