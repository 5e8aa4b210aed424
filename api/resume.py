"""Streams that can be gone on with: every event has an id, and a reader says which one it saw last. Pure.

A layer over `api.events`, to which a stream that is resumed is a stream from its start: what was seen is made
again, which brings the state to where the reader is, and left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from api.events import GapError
from api.sse import DONE, Events
from common.errors import InvalidRequestError, MillstreamError
from common.messages import OutEntry

_CURSOR = re.compile(r"([0-9]{1,20})-([0-9]{1,20})(?:\.([1-9][0-9]{0,3}))?")
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Position:
    """An id: the entry of `out` that it names, and how many of its events it covers (None: all)."""

    entry: tuple[int, int]
    events: int | None = None

    @classmethod
    def parse(cls, text: str) -> Position:
        """``ms-n``, or ``ms-n.k`` for the first k events of an entry. Raises `InvalidRequestError`."""
        found = _CURSOR.fullmatch(text)
        if found is None or max(int(found[1]), int(found[2])) >= 2**64:
            raise InvalidRequestError("The event id to go on after is malformed.", param="after")
        return cls((int(found[1]), int(found[2])), int(found[3]) if found[3] else None)

    def covers(self, entry: OutEntry) -> bool:
        """Whether all events of ``entry`` were seen."""
        place = _place(entry)
        return place < self.entry or (place == self.entry and self.events is None)


#: Nothing was seen.
START = Position((0, 0))


class Numbered:
    """`Events` with ids: the entry's own on its last event, ``<entry>.<k>`` on the k-th of those before it.

    What ``seen`` covers is left out. A reader that saw an entry which is not there any more (Redis lost its
    last second) may have seen a part of what comes instead: it gets an error, never something twice.
    """

    def __init__(self, events: Events, seen: Position = START) -> None:
        self._events = events
        self._seen = seen
        self._found = seen == START
        self.done = False

    def push(self, entry: OutEntry) -> bytes:
        """The events of one entry, framed; without those that were seen."""
        body = self._events.push(entry)
        self.done = self._events.done
        skipped = self._skipped(entry)
        if skipped is None:
            return b"id: %b\n%b" % (entry.id.encode(), DONE) if self.done else b""
        return _numbered(entry.id.encode(), body, skipped)

    def failure(self, error: MillstreamError) -> bytes:
        """The events that end the stream; without ids, as the reply may go on for a reader that returns."""
        self.done = True
        return self._events.failure(error)

    def _skipped(self, entry: OutEntry) -> int | None:
        """How many events of the entry were seen; None for all of them."""
        if self._seen is START:
            return 0
        if self._seen.covers(entry):
            self._found = self._found or _place(entry) == self._seen.entry
            return None
        if _place(entry) == self._seen.entry:
            self._found = True
            return self._seen.events or 0
        if not self._found:
            raise GapError
        self._seen = START
        return 0


def _place(entry: OutEntry) -> tuple[int, int]:
    millis, _, low = entry.id.partition("-")
    return int(millis), int(low)


def _numbered(name: bytes, body: bytes, skipped: int) -> bytes:
    if not body:
        return b""
    if not skipped and body.find(_END) == len(body) - len(_END):  # one event, by far the most common
        return b"id: %b\n%b" % (name, body)
    events = body.split(_END)[:-1]
    ids = [b"%b.%d" % (name, place) for place in range(1, len(events))] + [name]
    pairs = zip(ids[skipped:], events[skipped:], strict=True)
    return b"".join([b"id: %b\n%b%b" % (each, event, _END) for each, event in pairs])
