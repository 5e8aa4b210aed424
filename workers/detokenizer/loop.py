"""The loop that reads, decodes and commits for all partitions of a worker, in one thread.

A scheduler's step reaches all partitions at once. Whoever takes them together is woken once, and wakes the
readers of the replies once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from common.bus.client import Bus, FencedError
from common.bus.handoffs import Published
from common.bus.leases import Progress
from common.bus.scripts import Call
from common.errors import MillstreamError
from workers.detokenizer.partition import Partition

T = TypeVar("T")

_NAME = "partitions"
#: Longest wait for news, so that what failed is tried again soon, and the loop is seen to live.
_WAIT_MS = 100
#: What another partition has to commit waits no longer than this for one that takes long to decode.
_TOGETHER_S = 0.05


class Loop:
    """Runs until told to stop or fenced. ``on_fenced`` is called from its thread."""

    def __init__(self, bus: Bus, *, progress: Progress, on_fenced: Callable[[FencedError], None]) -> None:
        self._bus = bus
        self._progress = progress
        self._on_fenced = on_fenced
        self._lock = threading.Lock()
        #: What is to be worked on, and what is being worked on, by number.
        self._wanted: dict[int, Partition] = {}
        self._held: dict[int, Partition] = {}
        self._stopping = False
        # What cuts a wait short: one end is waited on, something is written into the other.
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, partition: Partition) -> None:
        """Works on ``partition`` from now on."""
        with self._lock:
            self._wanted[partition.number] = partition
        self._ring()

    def leave(self, number: int) -> None:
        """Has a partition let go of, between two commits; `holds` says when that is done."""
        with self._lock:
            self._wanted.pop(number, None)
        self._ring()

    def holds(self, number: int) -> bool:
        """Whether the partition is being worked on, or about to be."""
        with self._lock:
            return number in self._wanted or number in self._held

    def stop(self, timeout_s: float) -> None:
        """Ends after the commit under way, waiting that long for it."""
        self._stopping = True
        self._ring()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._bell.close()
            self._ringer.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is ringing already
            self._ringer.send(b"!")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._progress.beat(_NAME)
                self._change()
                self._pass(list(self._held.values()))
        except FencedError as error:
            self._on_fenced(error)
        finally:
            self._progress.end(_NAME)
            for partition in self._held.values():
                partition.close()

    def _change(self) -> None:
        """Takes on and lets go what was asked for."""
        with self._lock:
            left = [one for one in self._held.values() if self._wanted.get(one.number) is not one]
            self._held = dict(self._wanted)
        for partition in left:
            partition.close()

    def _pass(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            self._progress.beat(_NAME)  # each may have to wait for a Redis that hangs
            _guarded(partition, partition.ask)
        ready = self._ready(partitions)
        for partition in partitions:
            if partition not in ready:
                _guarded(partition, partition.check)
        commits: list[tuple[Partition, Call[Published]]] = []
        begun = time.monotonic()
        for partition in ready:
            if commits and time.monotonic() - begun > _TOGETHER_S:
                self._commit(commits)
                commits = []
            self._progress.beat(_NAME)
            call = _guarded(partition, partition.take)
            if call is not None:
                commits.append((partition, call))
        if commits:
            self._commit(commits)

    def _commit(self, commits: list[tuple[Partition, Call[Published]]]) -> None:
        self._progress.beat(_NAME)
        try:
            outcomes = self._bus.run_many([call for _, call in commits])
        except MillstreamError as error:
            outcomes = [error] * len(commits)
        for (partition, _), outcome in zip(commits, outcomes, strict=True):
            _guarded(partition, partial(partition.settle, outcome))

    def _ready(self, partitions: list[Partition]) -> list[Partition]:
        """Those whose read has been answered, waiting for at least one, or for the bell."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        by_file = {one.fileno(): one for one in partitions if one.waiting}
        for file in by_file:
            poll.register(file, select.POLLIN)
        ready = [file for file, _ in poll.poll(_WAIT_MS)]
        if self._bell.fileno() in ready:
            self._bell.recv(1024)
        return [by_file[file] for file in ready if file in by_file]


def _guarded(partition: Partition, act: Callable[[], T]) -> T | None:
    """What ``act`` returns; None after an error, which is this partition's alone. A fence is all's."""
    try:
        return act()
    except FencedError:
        raise
    except MillstreamError as error:
        partition.recover(error)
        return None
