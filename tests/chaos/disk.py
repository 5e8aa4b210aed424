"""What becomes of a server's append-only file: a disk sync that takes for ever, a tail that never reached the
disk, and a witness who knows which writes were acknowledged and are gone.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.bus.embedded import EmbeddedRedis
from tests.helpers.waiting import until

_SYNCER = "bio_aof"
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ANY_THREAD = 0x40000000  # __WALL
_POLL_S = 0.02
#: Older sizes of the file are not needed: no more than the last two seconds are ever lost.
_SIZES = 400


class HeldSync:
    """Stops the one thread of the server that syncs its file: what a disk does that has too much to do.

    A server that syncs every second then answers for up to two seconds without having written anything.
    """

    def __init__(self, server: EmbeddedRedis) -> None:
        assert server.pid is not None
        self._thread_id = next(
            int(each.name)
            for each in Path(f"/proc/{server.pid}/task").iterdir()
            if (each / "comm").read_text().startswith(_SYNCER)
        )
        self._held, self._release = threading.Event(), threading.Event()
        self._error = ""
        # The kernel knows the thread that traces, not the process.
        self._thread = threading.Thread(target=self._hold, name="held sync", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._held.wait(10), "the syncing thread does not stop"
        assert not self._error, self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release.set()
        self._thread.join(10)

    def _hold(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long] * 4
        for request in (_SEIZE, _INTERRUPT):
            if libc.ptrace(request, self._thread_id, 0, 0) < 0:
                self._error = f"this system lets nobody trace: {os.strerror(ctypes.get_errno())}"
                self._held.set()
                return
        os.waitpid(self._thread_id, _ANY_THREAD)
        self._held.set()
        while not self._release.wait(_POLL_S):
            # A server that is killed is not gone before its tracer has taken note.
            if os.waitpid(self._thread_id, _ANY_THREAD | os.WNOHANG)[0]:
                return
        libc.ptrace(_DETACH, self._thread_id, 0, 0)


class Tail:
    """Remembers how long the append-only file was, to cut off later what a lost host would have lost."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._folder = server.data_dir / "appendonlydir"
        self._sizes: deque[tuple[float, Path, int]] = deque(maxlen=_SIZES)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tail", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            newest = max(self._folder.glob("*.incr.aof"), key=lambda path: int(path.suffixes[-3][1:]))
            self._sizes.append((time.monotonic(), newest, newest.stat().st_size))

    def cut(self, seconds: float) -> int:
        """Cuts the dead server's file to what it was so long ago; returns how many bytes that takes away.

        Anywhere: the server itself goes back to the end of the last whole command or transaction.
        """
        now = time.monotonic()
        _, path, size = [each for each in self._sizes if each[0] <= now - seconds][-1]
        lost = path.stat().st_size - size
        os.truncate(path, size)
        return lost


class Witness:
    """Writes all the time, and counts what was acknowledged."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._url = server.url
        self._key = f"witness:{time.monotonic_ns()}"
        self._acknowledged = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="witness", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)

    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(self._url, socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def _write(self) -> None:
        with self._client() as client:
            while not self._stop.wait(0.002):
                try:
                    self._acknowledged = client.incr(self._key)
                except redis.RedisError:
                    return

    def lost(self) -> int:
        """How many acknowledged writes the server, back again, knows nothing of."""
        until(lambda: not self._thread.is_alive(), "the witness saw the server die")
        with self._client() as client:
            until(lambda: client.info("persistence")["loading"] == 0, "the server has loaded its data")
            # More may be there than was acknowledged: the last answer may have been on its way.
            return max(0, self._acknowledged - int(client.get(self._key) or 0))
