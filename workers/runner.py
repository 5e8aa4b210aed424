"""The life of a worker process, shared by all three: start-up, loop, drain, shutdown.

Signals only set flags. The loop runs `Worker.step` until told to stop; then it drains within the grace (it
finishes, or leaves what it holds to peers) and retires its leases, so that peers take over at once. A fenced
worker exits and comes back under a new id.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from common import collector
from common.bus.client import FencedError
from common.bus.leases import Lease, Progress
from common.errors import MillstreamError
from common.exitcodes import ExitCode
from common.logging import Log

log = Log(__name__)

_ERROR_PAUSE_S = 0.2


class Worker(Protocol):
    """What a role does; all methods are called from the main thread."""

    #: Set it to cut short whatever `step` waits for.
    wake: threading.Event

    def startup(self) -> None:
        """Load, create groups, start threads; the leases are open by now. May raise `MillstreamError`."""

    def step(self) -> None:
        """One bounded pass of the loop: at most about a second, waiting included."""

    def begin_drain(self) -> None:
        """Take no new work from now on."""

    def busy(self) -> bool:
        """Whether work in hand is unfinished."""

    def shutdown(self) -> None:
        """Stop threads and flush what must not be lost; bounded."""


class Runner:
    """Runs one worker. ``burst``: stop by itself once there is nothing to do, for tests."""

    def __init__(
        self, worker: Worker, lease: Lease, progress: Progress, *, grace_s: float, burst: bool = False
    ) -> None:
        self._worker = worker
        self._lease = lease
        self._progress = progress
        self._grace_s = grace_s
        self._burst = burst
        self._stopping = threading.Event()
        self._forced = threading.Event()

    def run(self) -> int:
        """The whole life; returns the exit code."""
        # Until it has work there is nothing to finish: a signal during a long load ends the process as it is.
        self._on_signals(signal.SIG_DFL)
        orderly = False
        try:
            self._lease.open()
            self._worker.startup()
            collector.settle()
            self._on_signals(self._stop)
            self._lease.announce()
            self._loop()
            finished = self._drain()
            orderly = True
        except FencedError as error:
            log.warning("exiting, to come back under a new id", reason=error.message)
            return ExitCode.RESTART
        finally:
            self._worker.shutdown()
            self._lease.close(drained=orderly)
        log.info("stopped", finished=finished)
        return ExitCode.OK

    def _on_signals(self, action: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, action)
            signal.signal(signal.SIGINT, action)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()
        self._worker.wake.set()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._step()
            if self._burst and not self._worker.busy():
                return

    def _step(self) -> None:
        if self._lease.fenced.is_set():
            raise FencedError("this worker was declared dead")
        self._progress.beat("main")
        try:
            self._worker.step()
        except FencedError:
            raise
        except MillstreamError as error:
            # Redis is away or full; what is in hand stays in hand, and the next pass tries again.
            log.warning("a step failed, trying again", error=error.message)
            time.sleep(_ERROR_PAUSE_S)

    def _drain(self) -> bool:
        self._lease.draining = True
        try:
            # Before anything else: of two that stop at once, one at least must not rely on the other.
            self._lease.announce()
        except MillstreamError as error:
            log.warning("could not say that this worker stops", error=error.message)
        self._worker.begin_drain()
        deadline = time.monotonic() + self._grace_s
        while self._worker.busy() and time.monotonic() < deadline and not self._forced.is_set():
            self._step()
        return not self._worker.busy()
