"""Following reply streams: one blocking XREAD per partition over all live requests of this process.

A subscriber that does not keep up is left out of the XREAD (its entries stay in Redis) until it has drained
its buffer, so memory here is bounded per request whatever the reader's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any

from redis.exceptions import RedisError

from common.bus import client
from common.bus.keys import Keys, partition_of
from common.messages import OutEntry, parse_out

log = logging.getLogger(__name__)

#: Entries buffered per request before it is left out of the reads.
BUFFER = 256
_COUNT = 128
_IDLE_WAIT_S = 1.0


class Subscription:
    """The entries of one request's reply stream, in order, from just after ``after``."""

    def __init__(self, partition: _PartitionReader, key: str, uid: str, after: str) -> None:
        self.key = key
        self.uid = uid
        self.after = after
        self._partition = partition
        self._entries: deque[OutEntry] = deque()
        self._ready = asyncio.Event()

    async def next(self, timeout_s: float) -> list[OutEntry]:
        """Everything that has arrived, waiting for at least one entry; empty after ``timeout_s``."""
        if not self._entries:
            self._ready.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
        was_full = len(self._entries) >= BUFFER
        entries = list(self._entries)
        self._entries.clear()
        if was_full:
            self._partition.ring()
        return entries

    def wake(self) -> None:
        """Lets a waiting `next` return now, with nothing if nothing has arrived."""
        self._ready.set()

    def close(self) -> None:
        """Stops following; idempotent."""
        self._partition.forget(self)

    @property
    def full(self) -> bool:
        return len(self._entries) >= BUFFER

    def feed(self, entries: list[OutEntry]) -> None:
        self._entries.extend(entries)
        self.after = entries[-1].id
        self._ready.set()


class Replies:
    """All reply streams this process follows."""

    def __init__(self, bus: client.AsyncBus, keys: Keys, partitions: int, *, name: str) -> None:
        self._readers = [_PartitionReader(bus, keys, name=f"{name}-read-{p}") for p in range(partitions)]

    def start(self) -> None:
        for reader in self._readers:
            reader.start()

    async def stop(self) -> None:
        await asyncio.gather(*(reader.stop() for reader in self._readers))

    def subscribe(self, uid: str, after: str = "0-0") -> Subscription:
        """Follows ``out:<uid>`` from just after entry id ``after``. Raises ValueError for a foreign uid."""
        partition = partition_of(uid)
        if partition >= len(self._readers):
            raise ValueError(f"not a request id here: {uid}")
        return self._readers[partition].subscribe(uid, after)

    def following(self) -> int:
        """How many requests are followed now."""
        return sum(len(reader.subscriptions) for reader in self._readers)


class _PartitionReader:
    """The read loop of one partition, on a connection of its own.

    A new subscription must not wait for the running BLOCK to end: CLIENT UNBLOCK wakes the read. It is
    repeated until the loop has seen the new list, since it may arrive just before the XREAD does.
    """

    def __init__(self, bus: client.AsyncBus, keys: Keys, *, name: str) -> None:
        self._bus = bus
        self._keys = keys
        self._name = name
        self.subscriptions: dict[str, Subscription] = {}
        self._version = 0
        self._reading_version = 0
        self._connection_id: int | None = None
        self._bell = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._loop()), asyncio.create_task(self._unblock_loop())]

    async def stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def subscribe(self, uid: str, after: str) -> Subscription:
        key = self._keys.out(uid)
        while key in self.subscriptions:  # a second reader of the same request in this process
            key += " "
        subscription = Subscription(self, key, uid, after)
        self.subscriptions[key] = subscription
        self.ring()
        return subscription

    def forget(self, subscription: Subscription) -> None:
        self.subscriptions.pop(subscription.key, None)

    def ring(self) -> None:
        """The list of what to read has changed."""
        self._version += 1
        self._bell.set()

    async def _loop(self) -> None:
        connection: Any = None
        while not self._stopping:
            try:
                if connection is None:
                    connection = await self._connect()
                await self._read_once(connection)
            except (RedisError, OSError) as error:
                log.warning("reply reader lost Redis, reconnecting: %s", type(error).__name__)
                self._connection_id = None
                if connection is not None:
                    await connection.disconnect()
                    connection = None
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                if connection is not None:
                    await connection.disconnect()
                raise

    async def _connect(self) -> Any:
        connection = client.blocking_connection(self._bus.url, name=self._name)
        await connection.connect()
        await connection.send_command("CLIENT", "ID")
        self._connection_id = int(await connection.read_response())
        return connection

    async def _read_once(self, connection: Any) -> None:
        self._reading_version = self._version
        wanted = [(key, sub) for key, sub in self.subscriptions.items() if not sub.full]
        if not wanted:
            self._bell.clear()
            if self._reading_version == self._version:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_WAIT_S):
                        await self._bell.wait()
            return
        await connection.send_command(
            "XREAD", "COUNT", _COUNT, "BLOCK", client.BLOCK_MS, "STREAMS",
            *[key.rstrip(" ") for key, _ in wanted], *[sub.after for _, sub in wanted],
        )  # fmt: skip
        reply = await connection.read_response()
        if reply:
            self._dispatch(reply, wanted)

    def _dispatch(self, reply: Any, wanted: list[tuple[str, Subscription]]) -> None:
        """Several subscriptions of one key name it several times, and get one part of the reply each."""
        by_key: dict[bytes, list[Subscription]] = {}
        for key, sub in wanted:
            by_key.setdefault(key.rstrip(" ").encode(), []).append(sub)
        for key, entries in reply:
            subs = by_key[key]
            sub = subs.pop(0) if len(subs) > 1 else subs[0]
            parsed = [parse_out(entry_id, fields) for entry_id, fields in entries]
            after = _order(sub.after)
            fresh = [entry for entry in parsed if _order(entry.id) > after]
            if fresh:
                sub.feed(fresh)

    async def _unblock_loop(self) -> None:
        while not self._stopping:
            await self._bell.wait()
            self._bell.clear()
            pause = 0.001
            while self._reading_version != self._version:
                if self._connection_id is not None:
                    with contextlib.suppress(Exception):
                        await self._bus.do("CLIENT", "UNBLOCK", self._connection_id)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.05)


def _order(entry_id: str) -> tuple[int, int]:
    millis, _, low = entry_id.partition("-")
    return int(millis), int(low or 0)
