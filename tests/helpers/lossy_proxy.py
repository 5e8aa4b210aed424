"""A TCP proxy before Redis that loses what a network may lose: requests, replies, halves of replies.

What happens to the n-th message depends on the seed alone (per run of the proxy, whichever client sends it).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from types import TracebackType
from typing import Self


class Fault(StrEnum):
    """What can happen to one message."""

    REQUEST_LOST = "request lost"  #: the connection is cut before Redis sees the command
    REPLY_LOST = "reply lost"  #: Redis has executed it, and the connection is cut
    REPLY_TORN = "reply torn"  #: half of the reply arrives, then the connection is cut
    REPLY_SILENT = "reply silent"  #: the reply never arrives, and the connection stays open


_ON_REQUEST = frozenset({Fault.REQUEST_LOST})


class LossyProxy:
    """Forwards to ``upstream_port``; each message meets each fault of ``rates`` with its probability."""

    def __init__(self, upstream_port: int, *, seed: int, rates: Mapping[Fault, float]) -> None:
        self._upstream_port = upstream_port
        self._random = random.Random(seed)
        self._rates = rates
        self.faults: Counter[Fault] = Counter()
        self.port = 0
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="lossy-proxy", daemon=True
        )
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def storm(self, rates: Mapping[Fault, float]) -> None:
        """These faults from now on."""
        self._rates = rates

    def calm(self) -> None:
        """No faults from now on."""
        self._rates = {}

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fault(self, *, request: bool) -> Fault | None:
        for fault, rate in self._rates.items():
            if (fault in _ON_REQUEST) == request and self._random.random() < rate:
                self.faults[fault] += 1
                return fault
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream: asyncio.StreamWriter | None = None
        try:
            replies, upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            ways = [
                asyncio.ensure_future(self._forward(reader, upstream, request=True)),
                asyncio.ensure_future(self._forward(replies, writer, request=False)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass
        finally:
            for end in filter(None, (writer, upstream)):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()
            self._tasks.discard(task)

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, request: bool
    ) -> None:
        """Returns when the connection is to be cut."""
        while data := await source.read(1 << 16):
            fault = self._fault(request=request)
            if fault is Fault.REPLY_SILENT:
                continue
            if fault is Fault.REPLY_TORN:
                sink.write(data[: len(data) // 2])
                await sink.drain()
            if fault is not None:
                return
            sink.write(data)
            await sink.drain()
