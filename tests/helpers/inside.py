"""What is going on inside a running stack, as Redis tells: what is in flight, and what is left afterwards."""

from __future__ import annotations

import json
import time
from typing import Any

import redis

from common.bus.keys import CLASSES, Keys
from common.bus.registry import SCHEDULER
from tests.helpers.text import BUNDLED
from tests.helpers.waiting import until

#: The promise is one second; asserted is five times that, since the machine may be a slow one.
FREE_S = 5.0


class Inside:
    """Reads a stack's Redis. ``client`` gives text; how many ``partitions`` there are it says itself."""

    def __init__(
        self, client: redis.Redis, *, keys: Keys | None = None, partitions: int | None = None
    ) -> None:
        self.redis = client
        self.keys = keys or Keys()
        self.partitions = range(partitions or int(client.hget(self.keys.meta(), "partitions")))

    def _queues(self, make: Any) -> list[str]:
        return [make(p, BUNDLED, cls) for p in self.partitions for cls in CLASSES]

    def in_flight(self) -> list[str]:
        """Uids of all requests that take a place."""
        return [uid for key in self._queues(self.keys.inflight) for uid in self.redis.zrange(key, 0, -1)]

    def only(self) -> str:
        """The uid of the one request in flight, once it is."""
        found: list[str] = until(self.in_flight, "a request in flight", every=0.005)
        assert len(found) == 1
        return found[0]

    def field(self, uid: str, name: str) -> str:
        """A field of a request; "" when it or the request is not there."""
        return self.redis.hget(self.keys.req(uid), name) or ""

    def admissions(self) -> int:
        """How many requests were ever admitted."""
        queues = [queue for queue in self._queues(self.keys.work_in) if self.redis.exists(queue)]
        return sum(self.redis.xinfo_stream(queue)["entries-added"] for queue in queues)

    def generated(self, uid: str, choice: int = 0) -> int:
        """How many tokens of a choice there are."""
        return int((self.redis.get(self.keys.gen(uid, choice)) or "").count(","))

    def scheduler(self) -> dict[str, int]:
        """The readings of the only scheduler."""
        for worker in self.redis.smembers(self.keys.workers()):
            said = json.loads(self.redis.get(self.keys.worker(worker)) or "{}")
            if said.get("role") == SCHEDULER:
                return dict(said["stats"])
        return {}

    def held(self) -> dict[str, Any]:
        """What requests in flight hold in Redis; empty when there are none, and nothing is left."""
        sizes: dict[str, Any] = {}
        for make in (self.keys.work_in, self.keys.sched):
            sizes |= {queue: self.redis.xlen(queue) for queue in self._queues(make)}
        sizes |= {queue: self.redis.zrange(queue, 0, -1) for queue in self._queues(self.keys.inflight)}
        for queue in self._queues(self.keys.bytes):
            sizes[queue] = {k: v for k, v in self.redis.hgetall(queue).items() if (k, v) != ("total", "0")}
        for p in self.partitions:
            for flags in (self.keys.cancel(p), self.keys.pause(p)):
                sizes[flags] = self.redis.smembers(flags)
        return {key: size for key, size in sizes.items() if size}

    def wait_free(self, timeout: float = FREE_S) -> float:
        """Waits until nothing is held in Redis, and then no row and no block of the KV cache.

        Returns how many seconds the first took; the readings of the second are up to a second old.
        """
        start = time.monotonic()
        _settled(self.held, "places, entries and flags are freed", timeout)
        seconds = time.monotonic() - start
        busy = ("running", "waiting", "paused", "kv_blocks_used")
        _settled(
            lambda: {name: self.scheduler()[name] for name in busy if self.scheduler()[name]}, "rows", timeout
        )
        return seconds


def _settled(left: Any, what: str, timeout: float) -> None:
    """Waits until nothing is ``left``; fails saying what is."""
    try:
        until(lambda: not left(), what, timeout, every=0.01)
    except AssertionError as error:
        raise AssertionError(f"{error}: {left()}") from None
