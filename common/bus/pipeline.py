"""One asynchronous connection that carries the commands of many callers at once, answered in order.

A pool gives each command a connection, a lock and two timeouts of its own; together they cost more than the
command. Here commands that are asked in one turn of the event loop leave in one write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import redis
import redis.asyncio as aioredis

#: Looks per timeout at how long the oldest command has been waiting.
_LOOKS = 5


class Pipeline:
    """Connects when asked, and again after a failure, which fails everything that was under way.

    ``connect`` makes a connection without timeouts of its own. A command that is not answered within
    ``timeout_s`` counts as a failure of the connection; at most ``most`` are under way at a time.
    """

    def __init__(self, connect: Callable[[], aioredis.Connection], *, timeout_s: float, most: int) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(most)
        self._outbox: list[bytes] = []
        #: Since when, and for whom: commands without an answer, oldest first.
        self._pending: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._bell = asyncio.Event()
        self._session: asyncio.Task[None] | None = None

    async def ask(self, packed: bytes) -> Any:
        """One command, as the protocol writes it; returns the raw reply.

        Raises redis-py's exceptions. A caller that is cancelled does not cut short what it has sent.
        """
        async with self._places:
            if self._session is None:
                self._session = asyncio.create_task(self._live())
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[Any] = loop.create_future()
            self._pending.append((loop.time(), answer))
            self._outbox.append(packed)
            self._bell.set()
            return await answer

    async def close(self) -> None:
        """Ends the session; what is under way fails."""
        if self._session is not None:
            self._session.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._session

    async def _live(self) -> None:
        """One connection's life. Whatever ends it fails what is under way; the next `ask` begins another."""
        reason: Exception = redis.exceptions.ConnectionError("The connection was closed.")
        connection = self._connect()
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()
            async with asyncio.TaskGroup() as group:
                for loop in (self._write(connection), self._read(connection), self._watch()):
                    group.create_task(loop)
        except* (redis.exceptions.RedisError, OSError) as errors:
            reason = errors.exceptions[0]
        except* RuntimeError:  # uvloop's word for a connection that was closed before the write
            pass
        finally:
            self._session = None  # first: what is asked from here on needs another one
            pending, self._pending = self._pending, deque()
            self._outbox = []
            for _, answer in pending:
                if not answer.done():
                    answer.set_exception(reason)
            await connection.disconnect(nowait=True)

    async def _write(self, connection: aioredis.Connection) -> None:
        while True:
            await self._bell.wait()
            self._bell.clear()
            outbox, self._outbox = self._outbox, []
            await connection.send_packed_command(outbox, check_health=False)

    async def _read(self, connection: aioredis.Connection) -> None:
        while True:
            try:
                reply = await connection.read_response()
            except redis.exceptions.ResponseError as error:
                reply = error
            _, answer = self._pending.popleft()
            if answer.done():  # its caller was cancelled
                continue
            if isinstance(reply, Exception):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._timeout_s / _LOOKS)
            if self._pending and loop.time() - self._pending[0][0] > self._timeout_s:
                raise redis.exceptions.TimeoutError("Redis did not answer in time.")
