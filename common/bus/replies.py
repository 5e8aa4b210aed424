"""Following reply streams: one blocking XREAD per partition over all live requests of this process.

A subscriber that does not keep up is left out of the XREAD (its entries stay in Redis) until it can take
more, so memory here is bounded per request whatever the reader's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
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
_RECONNECT_S = 0.2
_CANCEL_AGAIN_S = 0.05


class Subscription:
    """The entries of one request's reply stream, in order, from just after ``after``.

    They are fetched with `next`, or poured into a function; what comes while neither waits is buffered.
    """

    def __init__(self, partition: _PartitionReader, uid: str, after: str) -> None:
        self.uid = uid
        self.key = partition.key_of(uid)
        #: The key, and the id of the last entry that came, as the protocol writes them.
        self.named = _bulk(self.key)
        self.place = _bulk(after.encode())
        self.after = after.encode()
        #: The last entry that came.
        self.last: OutEntry | None = None
        #: Left out of the reads: the buffer is full, or whoever takes the entries cannot take more now.
        self.full = False
        self._held = False
        self._partition = partition
        self._entries: list[OutEntry] = []
        self._take: Callable[[list[OutEntry]], bool] | None = None
        # Asked for once: Python 3.11 makes a system call to find it.
        self._event_loop = asyncio.get_running_loop()
        #: What became of the taking: it has all it wanted, or it failed.
        self._satisfied = False
        self._fault: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = True
        self._woken = False

    async def next(self, timeout_s: float) -> list[OutEntry]:
        """Everything that has arrived, waiting for at least one entry.

        Empty after a silence of one to two times ``timeout_s``: one timer for the whole life costs a third of
        a timeout around every wait.
        """
        if not self._entries and not self._woken:
            await self._wait(timeout_s)
        self._woken = False
        return self._buffered()

    async def pour(self, take: Callable[[list[OutEntry]], bool], timeout_s: float) -> bool:
        """Hands entries to ``take`` the moment they arrive, until it returns True; then returns True.

        False after a silence as in `next`, or when woken; pour again then. Raises what ``take`` raises. This
        is the hot path: no task wakes up for an entry.
        """
        if self._entries and take(self._buffered()):
            return True
        if self._woken:
            self._woken = False
            return False
        self._take = take
        try:
            await self._wait(timeout_s)
        finally:
            self._take = None
            self._woken = False
        if self._fault is not None:
            raise self._fault
        return self._satisfied

    def hold(self) -> None:
        """Leaves the stream out of the reads until `release`: its entries stay in Redis."""
        self._held = self.full = True

    def release(self) -> None:
        """Ends `hold`."""
        self._held = False
        self._hungry()

    def wake(self) -> None:
        """Lets a waiting `next` or `pour`, or the one to come, return with what there is."""
        self._woken = True
        self._answer()

    def close(self) -> None:
        """Stops following; idempotent."""
        self._partition.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def feed(self, entries: list[OutEntry], last: bytes) -> None:
        """Called by the read loop; ``last`` is the raw id of the last entry."""
        self.after = last
        self.last = entries[-1]
        self.place = _bulk(last)
        self._quiet = False
        if self._take is None:
            self._entries += entries
            self.full = self._held or len(self._entries) >= BUFFER
            self._answer()
            return
        try:
            done = self._take(entries)
        except Exception as error:
            self._fault, done = error, True
        if done:
            # Noted, not only answered: a silence may have ended the wait a moment ago, in the same turn.
            self._satisfied = True
            self._take = None
            self._answer()

    def _answer(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, timeout_s: float) -> None:
        if self._timer is None:
            self._timer = self._event_loop.call_later(timeout_s, self._tick, timeout_s)
        self._waiter = self._event_loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _buffered(self) -> list[OutEntry]:
        entries, self._entries = self._entries, []
        self._hungry()
        return entries

    def _hungry(self) -> None:
        if self.full and not self._held:
            self.full = False
            self._partition.ring()

    def _tick(self, every_s: float) -> None:
        if self._quiet:
            self.wake()
        self._quiet = True
        self._timer = self._event_loop.call_later(every_s, self._tick, every_s)


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
        """Follows ``out:<uid>`` from just after entry id ``after``.

        Raises ValueError for what is no request id here, or no entry id.
        """
        partition = partition_of(uid)
        if partition >= len(self._readers):
            raise ValueError(f"not a request id here: {uid}")
        millis, low = _order(after)
        if not (0 <= millis < 2**64 and 0 <= low < 2**64):
            raise ValueError(f"not an entry id: {after[:64]!r}")
        return self._readers[partition].subscribe(uid, f"{millis}-{low}")

    def following(self) -> int:
        """How many requests are followed now."""
        return sum(len(subs) for reader in self._readers for subs in reader.subscriptions.values())


class _PartitionReader:
    """The read loop of one partition, on a connection of its own.

    A new subscription must not wait for the running BLOCK to end: CLIENT UNBLOCK wakes the read. It is
    repeated until the loop has seen the new list, since it may arrive just before the XREAD does.
    """

    def __init__(self, bus: client.AsyncBus, keys: Keys, *, name: str) -> None:
        self._bus = bus
        self._keys = keys
        self._name = name
        #: By key of the reply stream; one request may have several readers in this process.
        self.subscriptions: dict[bytes, list[Subscription]] = {}
        self._version = 0
        self._reading_version = 0
        self._connection_id: int | None = None
        self._bell = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._loop()), asyncio.create_task(self._unblock_loop())]

    async def stop(self) -> None:
        """Ends the loops.

        They are cancelled until they have ended: `wait_for` of Python 3.11, which redis-py uses, swallows a
        cancellation that comes together with its result.
        """
        self._stopping = True
        running = set(self._tasks)
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)

    def subscribe(self, uid: str, after: str) -> Subscription:
        subscription = Subscription(self, uid, after)
        self.subscriptions.setdefault(subscription.key, []).append(subscription)
        self.ring()
        return subscription

    def key_of(self, uid: str) -> bytes:
        return self._keys.out(uid).encode()

    def forget(self, subscription: Subscription) -> None:
        known = self.subscriptions.get(subscription.key, [])
        if subscription in known:
            known.remove(subscription)
        if not known:
            self.subscriptions.pop(subscription.key, None)

    def ring(self) -> None:
        """The list of what to read has changed."""
        self._version += 1
        self._bell.set()

    async def _loop(self) -> None:
        while not self._stopping:
            connection = client.blocking_connection(self._bus.url, name=self._name)
            try:
                async with asyncio.timeout(client.READ_TIMEOUT_S):
                    await connection.connect()
                    await connection.send_command("CLIENT", "ID")
                    self._connection_id = int(await connection.read_response())
                while not self._stopping:
                    await self._read_once(connection)
            # RuntimeError is uvloop's word for a connection that was closed before the write.
            except (RedisError, OSError, RuntimeError) as error:
                log.warning("reply reader lost Redis, reconnecting: %s", type(error).__name__)
            except Exception:  # whatever it is: without its reader every reply of the partition would hang
                log.exception("reply reader failed, starting again")
            finally:
                self._connection_id = None
                await connection.disconnect(nowait=True)
            await asyncio.sleep(_RECONNECT_S)

    async def _read_once(self, connection: Any) -> None:
        """One wait and one read. A stream with several readers is named once, from where the last of them is.

        An XREAD that blocked returns with the first stream alone that has something, although a PUB brings
        news of many. So a second one, which does not block, is sent along behind it and brings them all, that
        of the first once more; what the first one says is not looked at.
        """
        self._reading_version = self._version
        # Who is asked for now, since others may come while the read is on its way.
        asked: dict[bytes, tuple[Subscription, ...]] = {}
        names, places = [], []
        for key, subs in self.subscriptions.items():
            hungry = tuple(subs)
            if len(hungry) > 1 or hungry[0].full:
                hungry = tuple(sub for sub in subs if not sub.full)
            if hungry:
                asked[key] = hungry
                names.append(hungry[0].named)
                places.append(_first_place(hungry))
        if not names:
            self._bell.clear()
            if self._reading_version == self._version:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_WAIT_S):
                        await self._bell.wait()
            return
        async with asyncio.timeout(client.READ_TIMEOUT_S):
            await connection.send_packed_command(_xreads(names, places), check_health=False)
            await connection.read_response()
            reply = await connection.read_response()
        for key, entries in reply or ():
            parsed = _parsed(key, entries)
            readers = asked[key]
            if len(readers) == 1:
                readers[0].feed(parsed, entries[-1][0])
                continue
            for sub in readers:
                after = _order(sub.after.decode())
                if fresh := [entry for entry in parsed if _order(entry.id) > after]:
                    sub.feed(fresh, entries[-1][0])

    async def _unblock_loop(self) -> None:
        while not self._stopping:
            await self._bell.wait()
            self._bell.clear()
            # While other streams flow the read returns by itself, and no reply begins sooner than this.
            pause = 0.002
            while True:
                await asyncio.sleep(pause)
                if self._reading_version == self._version:
                    break
                if self._connection_id is not None:
                    with contextlib.suppress(Exception):
                        await self._bus.do("CLIENT", "UNBLOCK", self._connection_id)
                pause = min(pause * 2, 0.05)


def _bulk(text: bytes) -> bytes:
    """A string as the protocol writes it.

    Packed here, since names and places go out for every step of every engine and redis-py takes three times
    as long.
    """
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _xreads(names: list[bytes], places: list[bytes]) -> bytes:
    """An XREAD that blocks until one of the streams has something, and one that brings what all have."""
    wait = (b"XREAD", b"COUNT", b"1", b"BLOCK", b"%d" % client.BLOCK_MS, b"STREAMS")
    read = (b"XREAD", b"COUNT", b"%d" % _COUNT, b"STREAMS")
    commands = []
    for words in (wait, read):
        head = b"*%d\r\n" % (len(words) + len(names) + len(places))
        commands.append(b"".join([head, *map(_bulk, words), *names, *places]))
    return b"".join(commands)


def _first_place(subs: Sequence[Subscription]) -> bytes:
    """Where the reader that is furthest behind is."""
    return subs[0].place if len(subs) == 1 else min(subs, key=lambda sub: _order(sub.after.decode())).place


def _parsed(key: bytes, entries: list[list[Any]]) -> list[OutEntry]:
    try:
        return [parse_out(entry_id, fields) for entry_id, fields in entries]
    except (ValueError, TypeError):
        return [_parsed_alone(key, entry_id, fields) for entry_id, fields in entries]


def _parsed_alone(key: bytes, entry_id: bytes, fields: list[bytes]) -> OutEntry:
    """The entry; an empty one for what nobody of ours wrote: it must not keep others from their replies."""
    try:
        return parse_out(entry_id, fields)
    except (ValueError, TypeError) as error:
        log.warning("an entry of %s cannot be read: %s", key.decode("utf-8", "replace"), error)
        return OutEntry(entry_id.decode())


def _order(entry_id: str) -> tuple[int, int]:
    millis, _, low = entry_id.partition("-")
    return int(millis), int(low or 0)
