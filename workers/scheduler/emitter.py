"""Sends the engine's steps to one partition, strictly in order, from a thread of its own.

The engine computes step k+1 while EMIT k is on its way; it is never sent before the answer. A reply that was
lost is asked for again under the same sequence number; a Redis that rolled back gets the lost steps again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from common.bus import handoffs
from common.bus.client import Bus, FencedError
from common.bus.handoffs import Emitted, Step
from common.bus.keys import Keys
from common.bus.leases import Progress
from common.errors import MillstreamError, UnavailableError
from common.logging import Log

log = Log(__name__)

#: Steps that may wait behind the one on its way; the engine is slowed beyond that.
QUEUE = 2
#: How often an idle partition is asked for cancels (B9).
TICK_S = 0.1
#: How long sent steps are kept for a Redis that lost its last seconds (AOF everysec loses up to two).
KEEP_S = 10.0
_RETRY_S = 0.1
#: Answers that are errors, though Redis is there, after which the worker gives up and comes back anew.
_REFUSALS = 50


class Emitter:
    """The only writer of one (worker, partition) sequence. ``on_reply`` is called from its thread."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        partition: int,
        *,
        worker: str,
        progress: Progress,
        on_reply: Callable[[int, Step, Emitted], None],
        on_fenced: Callable[[FencedError], None],
    ) -> None:
        self._bus = bus
        self._keys = keys
        self.partition = partition
        self._worker = worker
        self._progress = progress
        self._on_reply = on_reply
        self._on_fenced = on_fenced
        self._seq = 0
        #: None is no step, but wakes the thread.
        self._steps: queue.Queue[Step | None] = queue.Queue(QUEUE)
        self._sent: deque[tuple[float, int, Step]] = deque()
        self._stop = threading.Event()
        self._name = f"emit-{partition}"
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def full(self) -> bool:
        """Whether `submit` would have to wait."""
        return self._steps.full()

    def idle(self) -> bool:
        """Whether everything submitted has been answered."""
        return self._steps.unfinished_tasks == 0

    def submit(self, step: Step) -> None:
        """Queues a step; the caller has seen that there is room (`full`), and is the only one to call."""
        self._steps.put(step, timeout=_RETRY_S)

    def stop(self, timeout_s: float) -> None:
        """Sends what is queued, then ends; gives up after ``timeout_s``."""
        self._stop.set()
        with contextlib.suppress(queue.Full):  # then it is awake
            self._steps.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while True:
            self._progress.beat(self._name)
            try:
                step = self._steps.get(timeout=TICK_S)
            except queue.Empty:
                step = None
            else:
                if step is None:
                    self._steps.task_done()
            if step is None and self._stop.is_set():
                self._progress.end(self._name)
                return
            try:
                self._send(step)
            except FencedError as error:
                self._progress.end(self._name)
                self._on_fenced(error)
                return
            finally:
                if step is not None:
                    self._steps.task_done()

    def _send(self, step: Step | None) -> None:
        """Sends one step (or the tick) until it is answered; a fence is the only way out without."""
        seq = 0
        if step is not None:
            self._seq += 1
            seq = self._seq
            self._remember(seq, step)
        refusals = 0
        while True:
            self._progress.beat(self._name)
            try:
                reply = self._exchange(seq, step or Step())
            except FencedError:
                raise
            except MillstreamError as error:
                log.warning("a step could not be sent, trying again", error=error.message, seq=seq)
                refusals = 0 if isinstance(error, UnavailableError) else refusals + 1
                if refusals >= _REFUSALS:
                    raise FencedError(f"Redis refuses every step: {error.message}") from error
                time.sleep(_RETRY_S)
            else:
                self._on_reply(self.partition, step or Step(), reply)
                return

    def _exchange(self, seq: int, step: Step) -> Emitted:
        """One EMIT, with what Redis has lost sent again: before it if it is BEHIND, or after a tick."""
        while True:
            reply = self._bus.run(handoffs.emit(self._keys, self.partition, self._worker, seq, step))
            if reply.code == "BEHIND":
                self._replay(reply.stored, seq)
            elif reply.stored < self._seq:
                self._replay(reply.stored, self._seq + 1)
            else:
                return reply

    def _remember(self, seq: int, step: Step) -> None:
        now = time.monotonic()
        self._sent.append((now, seq, step))
        while len(self._sent) > 1 and self._sent[0][0] < now - KEEP_S:
            self._sent.popleft()

    def _replay(self, stored: int, upto: int) -> None:
        """Redis rolled back: sends every step from stored + 1 to just before ``upto`` again."""
        steps = [(seq, step) for _, seq, step in self._sent if stored < seq < upto]
        if [seq for seq, _ in steps] != list(range(stored + 1, upto)):
            raise FencedError(f"Redis lost more than {KEEP_S:.0f} s of steps: {stored} of {upto}")
        log.warning("Redis rolled back, sending steps again", stored=stored, steps=len(steps))
        for seq, step in steps:
            self._bus.run(handoffs.emit(self._keys, self.partition, self._worker, seq, step))
