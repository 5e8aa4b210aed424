"""Sends the engine's steps to their partitions, strictly in order, from a thread of its own.

The engine computes step k+1 while EMIT k is on its way; it is never sent before the answer. The EMITs of one
step travel together. A reply that was lost is asked for again under the same sequence number; a Redis that
rolled back gets the lost steps again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from common.bus import handoffs
from common.bus.client import Bus, FencedError
from common.bus.handoffs import Emitted, Step
from common.bus.keys import Keys
from common.bus.leases import Progress
from common.bus.scripts import Call
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
_TICK = Step()


class _Lane:
    """One partition's sequence of steps. The oldest of `steps` is on its way, or the next to be."""

    def __init__(self, bus: Bus, keys: Keys, partition: int, worker: str) -> None:
        self._bus = bus
        self._keys = keys
        self.partition = partition
        self._worker = worker
        self.steps: deque[Step] = deque()
        #: The last step that was sent; and when anything was.
        self._seq = 0
        self.asked_at = 0.0
        self._sent: deque[tuple[float, int, Step]] = deque()

    def begin(self) -> tuple[int, Step]:
        """The next step with its number, or the tick."""
        self.asked_at = time.monotonic()
        if not self.steps:
            return 0, _TICK
        step = self.steps[0]
        self._seq += 1
        self._sent.append((self.asked_at, self._seq, step))
        while len(self._sent) > 1 and self._sent[0][0] < self.asked_at - KEEP_S:
            self._sent.popleft()
        return self._seq, step

    def call(self, seq: int, step: Step) -> Call[Emitted]:
        return handoffs.emit(self._keys, self.partition, self._worker, seq, step)

    def caught_up(self, seq: int, reply: Emitted) -> bool:
        """Whether Redis has all it should; what it lost is sent again: before ``seq``, or after a tick."""
        if reply.code == "BEHIND":
            self._replay(reply.stored, seq)
            return False
        if reply.stored < self._seq:
            self._replay(reply.stored, self._seq + 1)
            return False
        return True

    def _replay(self, stored: int, upto: int) -> None:
        """Redis rolled back: sends every step from stored + 1 to just before ``upto`` again."""
        steps = [(seq, step) for _, seq, step in self._sent if stored < seq < upto]
        if [seq for seq, _ in steps] != list(range(stored + 1, upto)):
            raise FencedError(f"Redis lost more than {KEEP_S:.0f} s of steps: {stored} of {upto}")
        log.warning("Redis rolled back, sending steps again", stored=stored, steps=len(steps))
        for seq, step in steps:
            self._bus.run(self.call(seq, step))


class Emitter:
    """The only writer of a worker's sequences. ``on_reply`` and ``on_fenced`` are called from its thread."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        partitions: int,
        *,
        worker: str,
        progress: Progress,
        on_reply: Callable[[int, Step, Emitted], None],
        on_fenced: Callable[[FencedError], None],
    ) -> None:
        self._bus = bus
        self._lanes = [_Lane(bus, keys, partition, worker) for partition in range(partitions)]
        self._progress = progress
        self._on_reply = on_reply
        self._on_fenced = on_fenced
        self._bell = threading.Event()
        self._stopping = False
        self._name = "emit"
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def full(self) -> bool:
        """Whether some partition has as many steps waiting as it may."""
        return any(len(lane.steps) > QUEUE for lane in self._lanes)

    def idle(self) -> bool:
        """Whether everything submitted has been answered."""
        return not any(lane.steps for lane in self._lanes)

    def submit(self, steps: Mapping[int, Step]) -> None:
        """Queues a step of each of some partitions; the caller has seen that there is room (`full`)."""
        for partition, step in steps.items():
            self._lanes[partition].steps.append(step)
        self._bell.set()

    def stop(self, timeout_s: float) -> None:
        """Sends what is queued, then ends; gives up after ``timeout_s``."""
        self._stopping = True
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        try:
            while not (self._stopping and self.idle()):
                self._progress.beat(self._name)
                overdue = time.monotonic() - TICK_S
                due = [lane for lane in self._lanes if lane.steps or lane.asked_at <= overdue]
                if due:
                    self._send(due)
                else:
                    self._bell.wait(TICK_S)
                    self._bell.clear()
        except FencedError as error:
            self._on_fenced(error)
        finally:
            self._progress.end(self._name)

    def _send(self, lanes: list[_Lane]) -> None:
        """One step (or the tick) of each, until all are answered; a fence is the only way out without."""
        open_ = [(lane, *lane.begin()) for lane in lanes]
        refusals = 0
        while True:
            self._progress.beat(self._name)
            left, failure = self._exchange(open_)
            if not left:
                return
            open_ = left
            if failure is None:
                continue
            log.warning("a step could not be sent, trying again", error=failure.message)
            refusals = 0 if isinstance(failure, UnavailableError) else refusals + 1
            if refusals >= _REFUSALS:
                raise FencedError(f"Redis refuses every step: {failure.message}") from failure
            time.sleep(_RETRY_S)

    def _exchange(
        self, open_: list[tuple[_Lane, int, Step]]
    ) -> tuple[list[tuple[_Lane, int, Step]], MillstreamError | None]:
        """Asks once. Returns what has to be asked again, and an error that was met. Raises `FencedError`."""
        try:
            replies = self._bus.run_many([lane.call(seq, step) for lane, seq, step in open_])
        except UnavailableError as error:
            return open_, error
        left: list[tuple[_Lane, int, Step]] = []
        failure: MillstreamError | None = None
        for (lane, seq, step), reply in zip(open_, replies, strict=True):
            try:
                if isinstance(reply, MillstreamError):
                    raise reply
                done = lane.caught_up(seq, reply)
            except FencedError:
                raise
            except MillstreamError as error:
                failure, done = error, False
            if not done:
                left.append((lane, seq, step))
                continue
            if seq:
                lane.steps.popleft()
            assert isinstance(reply, Emitted)
            self._on_reply(lane.partition, step, reply)
        return left, failure
