"""Finding dead peers of a consumer group and taking over what they held.

A peer that somebody marked dead is dead, at once. A lease that merely expired must be seen expired twice,
with Redis answering in between, on this process's own clock; after any error, after a gap in its own
renewals, or when the server is another or has just begun, the observer first waits one full lease: a Redis
that was away makes everybody look dead (B3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from common.bus.client import Bus, NoGroupError
from common.bus.keys import Keys
from common.bus.leases import KEEP_MS
from common.bus.registry import parse_info
from common.bus.scripts import Call
from common.bus.steadiness import Steadiness
from common.bus.streams import Entry
from common.errors import MillstreamError
from common.logging import Log

log = Log(__name__)

#: Shortest time between the two observations.
OBSERVE_S = 0.5
_CLAIM_PAGE = 100


def claim_dead(
    keys: Keys, partition: int, stream: str, group: str, *, me: str, dead: str, expired_ok: bool
) -> Call[tuple[list[Entry], bool]]:
    """CLAIM_DEAD: (entries taken over, whether the peer was really dead)."""
    names = (stream, keys.lease(partition, me), keys.lease(partition, dead))

    def parse(reply: Any) -> tuple[list[Entry], bool]:
        if reply[0] != b"OK":
            return [], False
        drained = reply[1] == b"1"
        rows = zip(reply[3::3], reply[4::3], reply[5::3], strict=True)
        return [
            Entry(stream, entry.decode(), uid.decode(), int(choice), claimed=True, drained=drained)
            for entry, uid, choice in rows
        ], True

    args = (group, me, dead, _CLAIM_PAGE, int(expired_ok), KEEP_MS)
    return Call("claim_dead", names, args, parse)


class PeerWatch:
    """Watches the other consumers of some streams of one partition. Call `scan` every half second or so."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        partition: int,
        group: str,
        *,
        me: str,
        lease_ms: int,
        steadiness: Steadiness,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._keys = keys
        self._partition = partition
        self._group = group
        self._me = me
        self._lease_s = lease_ms / 1000
        self._steadiness = steadiness
        self._clock = clock
        self._first_seen: dict[str, float] = {}
        self._run_id = ""
        self._calm_from = clock()

    def scan(self, stream: str) -> Iterator[Entry]:
        """Entries taken over from dead peers, oldest first; none on most calls.

        One by one, so that what was taken is not lost with what cannot be. Raises what `Bus.run` raises; an
        outage starts the waiting time again.
        """
        try:
            self._notice_restart()
            yield from self._scan(stream)
        except MillstreamError:
            self._forget()
            raise

    def _forget(self) -> None:
        self._first_seen.clear()
        self._calm_from = self._clock() + self._lease_s

    def _notice_restart(self) -> None:
        info = parse_info(self._bus.do("INFO", "server"))
        run_id = info.get("run_id", "")
        if run_id != self._run_id:
            if self._run_id or int(info.get("uptime_in_seconds", "0")) <= self._lease_s:
                self._forget()
            self._run_id = run_id

    def _scan(self, stream: str) -> Iterator[Entry]:
        try:
            consumers = self._bus.do("XINFO", "CONSUMERS", stream, self._group)
        except NoGroupError:
            return
        for info in consumers:
            name = dict(zip(info[::2], info[1::2], strict=True))[b"name"].decode()
            if name != self._me and self._looks_dead(name):
                yield from self._claim(stream, name)

    def _looks_dead(self, name: str) -> bool:
        key = self._keys.lease(self._partition, name)
        dead, expiry = self._bus.do("HMGET", key, "dead", "expiry")
        if dead == b"1":
            return True
        if expiry is not None:
            seconds, micros = self._bus.do("TIME")
            if int(expiry) > int(seconds) * 1000 + int(micros) // 1000:
                self._first_seen.pop(name, None)
                return False
        now = self._clock()
        if now < self._calm_from or not self._steadiness.holds():
            self._first_seen.pop(name, None)
            return False
        return now - self._first_seen.setdefault(name, now) >= OBSERVE_S

    def _claim(self, stream: str, name: str) -> Iterator[Entry]:
        """All that a dead peer held, page by page."""
        call = claim_dead(
            self._keys,
            self._partition,
            stream,
            self._group,
            me=self._me,
            dead=name,
            expired_ok=name in self._first_seen,
        )
        while True:
            entries, was_dead = self._bus.run(call)
            if not was_dead:
                return
            if not entries:
                self._first_seen.pop(name, None)
                return
            log.info("took over from a dead peer", peer=name, stream=stream, entries=len(entries))
            yield from entries
