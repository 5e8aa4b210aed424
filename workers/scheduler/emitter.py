"""Sends the engine's steps to their partitions, strictly in order.

The engine computes step k+1 while EMIT k is on its way, and its answer is taken when step k+1 is to be sent,
never before that answer: by then it has long been there, so nobody has to wait for it. The EMITs of one step
travel together. A reply that was lost is asked for again under the same sequence number; a Redis that rolled
back gets the lost steps again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from common.bus import handoffs
from common.bus.client import Bus, Exchange, FencedError
from common.bus.handoffs import Emitted, Step
from common.bus.keys import Keys
from common.bus.scripts import Call
from common.errors import MillstreamError, UnavailableError
from common.logging import Log

log = Log(__name__)

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


#: A step of a partition on its way, with its number.
_Sent = tuple[_Lane, int, Step]


class Emitter:
    """The only writer of a worker's sequences. For one thread, which calls `pump`; it calls ``on_reply``."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        partitions: int,
        *,
        worker: str,
        on_reply: Callable[[int, Step, Emitted], None],
    ) -> None:
        self._lanes = [_Lane(bus, keys, partition, worker) for partition in range(partitions)]
        self._exchange: Exchange[Emitted] = Exchange(bus, name=f"{worker}-emit")
        self._on_reply = on_reply
        #: What has not been answered; ``_sent``: it is on its way, or else to be sent again at ``_again_at``.
        self._open: list[_Sent] = []
        self._sent = False
        self._again_at = 0.0
        #: Answers in a row that are errors.
        self._refusals = 0
        self._fenced = False

    @property
    def troubled(self) -> bool:
        """Whether something could not be sent, or was not answered. Until it is, nothing else is sent."""
        return bool(self._open) and not self._sent

    def full(self) -> bool:
        """Whether a step waits behind one on its way: another must not be submitted now."""
        return any(len(lane.steps) > 1 for lane in self._lanes)

    def idle(self) -> bool:
        """Whether everything submitted has been answered."""
        return not any(lane.steps for lane in self._lanes)

    def submit(self, steps: Mapping[int, Step]) -> None:
        """Queues a step of each of some partitions; the caller has seen that there is room (`full`)."""
        for partition, step in steps.items():
            self._lanes[partition].steps.append(step)

    def pump(self) -> None:
        """Takes the answers to what is on its way, and sends what is due: waiting steps, or the tick.

        `troubled` says that it was in vain. Raises `FencedError`.
        """
        self.settle()
        if self._open:
            return
        overdue = time.monotonic() - TICK_S
        due = [lane for lane in self._lanes if lane.steps or lane.asked_at <= overdue]
        if due:
            self._open = [(lane, *lane.begin()) for lane in due]
            self._send()

    def stop(self, timeout_s: float) -> None:
        """Sends what is queued; gives up after ``timeout_s`` and the command under way, or when fenced."""
        deadline = time.monotonic() + timeout_s
        try:
            while not self._fenced and not self.idle() and time.monotonic() < deadline:
                self.pump()
                if self.troubled:
                    time.sleep(_RETRY_S)
        except FencedError as error:
            log.warning("fenced while stopping", reason=error.message)
        self._exchange.close()

    def _send(self) -> None:
        try:
            self._exchange.send([lane.call(seq, step) for lane, seq, step in self._open])
            self._sent = True
        except UnavailableError as error:
            self._fail(error)

    def settle(self) -> None:
        """Takes the answers to what is on its way, if Redis gives them, and sends nothing new.

        Waits for Redis as long as one command may take; longer only when steps have to be replayed.
        """
        while self._open:
            if not self._sent:
                if time.monotonic() < self._again_at:
                    return
                self._send()
            if not self._sent:
                return
            try:
                replies = self._exchange.answers()
            except UnavailableError as error:
                self._fail(error)
                return
            failure = self._take(replies)
            if failure is not None:
                self._fail(failure)
                return

    def _take(self, replies: list[Emitted | MillstreamError]) -> MillstreamError | None:
        """What then is still open is to be sent again: at once, or later because of the error returned."""
        left: list[_Sent] = []
        failure: MillstreamError | None = None
        for (lane, seq, step), reply in zip(self._open, replies, strict=True):
            try:
                if isinstance(reply, MillstreamError):
                    raise reply
                done = lane.caught_up(seq, reply)
            except FencedError:
                self._fenced = True
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
        self._open, self._sent = left, False
        if not left:
            self._refusals = 0
        return failure

    def _fail(self, error: MillstreamError) -> None:
        """Has what is open sent again after a pause."""
        log.warning("a step could not be sent, trying again", error=error.message)
        self._sent = False
        self._again_at = time.monotonic() + _RETRY_S
        self._refusals = 0 if isinstance(error, UnavailableError) else self._refusals + 1
        if self._refusals >= _REFUSALS:
            raise FencedError(f"Redis refuses every step: {error.message}") from error
