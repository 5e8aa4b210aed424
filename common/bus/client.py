"""Connections to Redis, of three kinds (B7), and the one place that names redis-py's exceptions.

- commands: short, idempotent scripts, bounded in number and time, retried;
- blocking reads: a connection of their own, never retried by itself (a retry would strand entries);
- leases: a small client with short timeouts, used from a thread of its own.
Replies are bytes.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import hiredis
import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import ConnectionInterface
from redis.retry import Retry

from common.bus.pipeline import Pipeline
from common.bus.scripts import Call, sha_of, source_of
from common.errors import MillstreamError, UnavailableError

T = TypeVar("T")

#: Longest BLOCK of a blocking read. Bounds how late a reader notices a stop or a dead connection.
BLOCK_MS = 2000
#: Longest wait for the reply to a blocking read; a connection that stays silent longer is broken.
READ_TIMEOUT_S = BLOCK_MS / 1000 + 5
_COMMAND_TIMEOUT_S = 5.0
#: Commands of one `AsyncBus` without an answer; more wait for their turn.
_MOST_UNDER_WAY = 256
#: Errors that say "not now": it fails over, cannot save, or runs a script that hangs. redis-py has classes
#: for some, and cuts the code off their text.
_AWAY = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)
_AWAY_CODES = frozenset({"BUSY", "MISCONF", "NOREPLICAS", "UNKILLABLE"})
_RETRIES = 3
_BACKOFF_S = 0.02
_BACKOFF_CAP_S = 0.5


class FencedError(MillstreamError):
    """A worker that was declared dead must not write any more; it exits and comes back under a new id."""


class NoGroupError(MillstreamError):
    """A stream or its consumer group is gone (flushed): create it again."""


class BusDownError(UnavailableError):
    """Redis cannot be reached."""


class BusFullError(UnavailableError):
    """Redis is out of memory."""


@contextmanager
def mapped() -> Iterator[None]:
    """Turns redis-py's exceptions into ours."""
    try:
        yield
    except redis.exceptions.ResponseError as error:
        raise _from_reply(error) from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        raise BusDownError(f"Redis cannot be reached: {type(error).__name__}.") from error


def _from_reply(error: redis.exceptions.ResponseError) -> MillstreamError:
    text = str(error)
    code = text.partition(" ")[0]
    if code == "FENCED":
        return FencedError(text)
    if code == "NOGROUP" or "requires the key to exist" in text or "no such key" in text:
        return NoGroupError(text)
    if isinstance(error, redis.exceptions.OutOfMemoryError) or code == "OOM":
        return BusFullError()
    if isinstance(error, _AWAY) or code in _AWAY_CODES:
        return BusDownError(f"Redis cannot take writes now: {text}")
    return MillstreamError(f"Redis refused a command: {text}")


def _options(name: str) -> dict[str, Any]:
    return {"client_name": name, "socket_connect_timeout": 2.0, "protocol": 2, "health_check_interval": 0}


class Bus:
    """Synchronous commands: what workers write and read with. Safe to use from several threads.

    Each thread has a connection of its own: there are few, and a pool's checks cost as much as the command.
    """

    def __init__(
        self, url: str, *, name: str, timeout_s: float = _COMMAND_TIMEOUT_S, retries: int = _RETRIES
    ) -> None:
        self.url = url
        self._factory = _factory(url, name, timeout_s)
        self._retries = retries
        #: Commands without an answer so far, repeated or not. What they did remains: they may have read work.
        self.losses = 0
        self._local = threading.local()
        self._connections: list[ConnectionInterface] = []

    def run(self, call: Call[T]) -> T:
        """Runs one script; its errors are `FencedError`, `NoGroupError`, `BusDownError`, `BusFullError`."""
        args = (len(call.keys), *call.keys, *call.args)
        with mapped():
            try:
                reply = self._execute("EVALSHA", sha_of(call.script), *args)
            except redis.exceptions.NoScriptError:
                reply = self._execute("EVAL", source_of(call.script), *args)
        return call.parse(reply)

    def do(self, *command: Any) -> Any:
        """Runs one plain, idempotent command and returns its raw reply."""
        with mapped():
            return self._execute(*command)

    def run_many(self, calls: Sequence[Call[T]]) -> list[T | MillstreamError]:
        """Runs scripts in one exchange, in order; a refused one's error stands in its place.

        Raises `BusDownError` when the exchange has no answer. So may a script have that had to be run again
        alone; its error then stands in its place.
        """
        return self.outcomes(calls, self._exchange([_evalsha(call) for call in calls]))

    def outcomes(self, calls: Sequence[Call[T]], replies: Sequence[Any]) -> list[T | MillstreamError]:
        """What the raw replies to ``calls`` say; a script that the server does not know yet is run again."""
        outcomes: list[T | MillstreamError] = []
        for call, reply in zip(calls, replies, strict=True):
            outcome = self._outcome(call, reply)
            outcomes.append(outcome)
        return outcomes

    def _outcome(self, call: Call[T], reply: Any) -> T | MillstreamError:
        if isinstance(reply, redis.exceptions.NoScriptError):
            return self._run_alone(call)
        if isinstance(reply, redis.exceptions.ResponseError):
            return _from_reply(reply)
        return _parsed(call, reply)

    def do_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Runs plain, idempotent commands in one exchange, as `run_many` does scripts."""
        return [
            _from_reply(reply) if isinstance(reply, redis.exceptions.ResponseError) else reply
            for reply in self._exchange(commands)
        ]

    def close(self) -> None:
        """Closes every thread's connection."""
        for connection in self._connections:
            connection.disconnect()

    def _run_alone(self, call: Call[T]) -> T | MillstreamError:
        try:
            return self.run(call)
        except MillstreamError as error:
            return error

    def _execute(self, *command: Any) -> Any:
        """Sends a command until it is answered, at most 1 + retries times."""
        return self._until_answered(lambda: _ask(self._connection(), command))

    def _exchange(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`_execute` for several; error replies are values here."""
        with mapped():
            return self._until_answered(lambda: _ask_many(self._connection(), commands))

    def _until_answered(self, ask: Callable[[], T]) -> T:
        for pause in _pauses(self._retries):
            try:
                return ask()
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
                self.losses += 1
                if pause is None:
                    raise
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _connection(self) -> ConnectionInterface:
        known: ConnectionInterface | None = getattr(self._local, "connection", None)
        if known is not None:
            return known
        connection = self._local.connection = self._factory.make_connection()
        self._connections.append(connection)
        return connection


def _factory(url: str, name: str, timeout_s: float) -> redis.ConnectionPool:
    """Makes connections that never retry by themselves."""
    return redis.ConnectionPool.from_url(
        url, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0), **_options(name)
    )


def _parsed(call: Call[T], reply: Any) -> T | MillstreamError:
    try:
        return call.parse(reply)
    except (AttributeError, KeyError, ValueError):
        return MillstreamError("The reply cannot be read.")


def _ask(connection: ConnectionInterface, command: tuple[Any, ...]) -> Any:
    """One command, one reply; connects first if need be."""
    _send(connection, (command,))
    return _one(_receive(connection, 1))


def _one(replies: list[Any]) -> Any:
    """The only one of ``replies``; raises it if it is an error."""
    [reply] = replies
    if isinstance(reply, redis.exceptions.ResponseError):
        raise reply
    return reply


def _ask_many(connection: ConnectionInterface, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """`_ask` for several commands in one write. Error replies are returned, not raised."""
    _send(connection, commands)
    return _receive(connection, len(commands))


def _send(connection: ConnectionInterface, commands: Sequence[tuple[Any, ...]]) -> None:
    """Several commands in one write; connects first if need be.

    After any failure the connection is closed, here and in `_receive`: else a late reply would be taken for
    the next command's.
    """
    try:
        packed = b"".join([hiredis.pack_command(command) for command in commands])
        # What `send_command` does, less its checks, which take as long as all the rest.
        connection.send_packed_command((packed,), check_health=False)
    except BaseException:
        connection.disconnect()
        raise


def _receive(connection: ConnectionInterface, count: int) -> list[Any]:
    """That many replies; error replies are values here."""
    replies: list[Any] = []
    try:
        for _ in range(count):
            try:
                replies.append(connection.read_response())
            except redis.exceptions.ResponseError as error:
                replies.append(error)
    except BaseException:
        connection.disconnect()
        raise
    return replies


def _evalsha(call: Call[Any]) -> tuple[Any, ...]:
    return ("EVALSHA", sha_of(call.script), len(call.keys), *call.keys, *call.args)


class Exchange(Generic[T]):
    """One connection for scripts that are sent now and answered later. For one thread; retries nothing.

    What has come back by the time it is asked for costs no waiting, and no other thread to wait for it.
    """

    def __init__(self, bus: Bus, *, name: str) -> None:
        self._bus = bus
        self._connection = _factory(bus.url, name, _COMMAND_TIMEOUT_S).make_connection()
        self._calls: Sequence[Call[T]] = ()

    def send(self, calls: Sequence[Call[T]]) -> None:
        """Sends scripts, in order, in one write; what was sent before must have been answered or failed.

        Raises `BusDownError`; it may have happened all the same.
        """
        with mapped():
            _send(self._connection, [_evalsha(call) for call in calls])
        self._calls = calls

    def answers(self) -> list[T | MillstreamError]:
        """The answers to what was sent, as `Bus.run_many` returns them. Raises `BusDownError`."""
        with mapped():
            replies = _receive(self._connection, len(self._calls))
        return self._bus.outcomes(self._calls, replies)

    def close(self) -> None:
        self._connection.disconnect()


class BlockingBus:
    """One connection for blocking reads, synchronous, for one thread. Never retries by itself."""

    def __init__(self, url: str, *, name: str) -> None:
        self._connection = _factory(url, name, READ_TIMEOUT_S).make_connection()

    def do(self, *command: Any) -> Any:
        """Runs one command that may block up to `BLOCK_MS`; returns its raw reply."""
        with mapped():
            return _ask(self._connection, command)

    def ask(self, *command: Any) -> None:
        """`do` as far as the sending; `answer` is to follow."""
        with mapped():
            _send(self._connection, [command])

    def fileno(self) -> int:
        """The connection's file, for whoever waits for several answers at once; only after `ask`."""
        sock: socket.socket = self._connection._sock  # type: ignore[attr-defined]  # has no public name
        return sock.fileno()

    def answer(self) -> Any:
        """The raw reply to what was asked."""
        with mapped():
            return _one(_receive(self._connection, 1))

    def close(self) -> None:
        self._connection.disconnect()


class AsyncBus:
    """Asynchronous commands: what API processes write and read with."""

    def __init__(
        self, url: str, *, name: str, timeout_s: float = _COMMAND_TIMEOUT_S, retries: int = _RETRIES
    ) -> None:
        self.url = url
        self._retries = retries
        self._pipeline = Pipeline(
            lambda: blocking_connection(url, name=name), timeout_s=timeout_s, most=_MOST_UNDER_WAY
        )

    async def run(self, call: Call[T]) -> T:
        """`Bus.run`."""
        args = (len(call.keys), *call.keys, *call.args)
        with mapped():
            try:
                reply = await self._execute("EVALSHA", sha_of(call.script), *args)
            except redis.exceptions.NoScriptError:
                reply = await self._execute("EVAL", source_of(call.script), *args)
        return call.parse(reply)

    async def do(self, *command: Any) -> Any:
        """`Bus.do`."""
        with mapped():
            return await self._execute(*command)

    async def close(self) -> None:
        await self._pipeline.close()

    async def _execute(self, *command: Any) -> Any:
        """Sends a command until it is answered, at most 1 + retries times."""
        packed = hiredis.pack_command(command)
        for pause in _pauses(self._retries):
            try:
                return await self._pipeline.ask(packed)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")


def _pauses(retries: int) -> Iterator[float | None]:
    """What to wait between tries; None after the last one."""
    backoff = _BACKOFF_S
    for _ in range(retries):
        yield backoff * (0.5 + random.random() / 2)
        backoff = min(2 * backoff, _BACKOFF_CAP_S)
    yield None


def blocking_connection(url: str, *, name: str) -> aioredis.Connection:
    """An asynchronous connection of its own for blocking reads; the caller connects and reconnects it.

    The caller bounds its waits by `READ_TIMEOUT_S`, too: redis-py's own timeout makes a task of every write.
    """
    pool = aioredis.ConnectionPool.from_url(
        url, socket_timeout=None, retry=AsyncRetry(NoBackoff(), 0), **_options(name)
    )
    connection: aioredis.Connection = pool.make_connection()
    return connection
