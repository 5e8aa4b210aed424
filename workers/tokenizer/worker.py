"""The tokenizer's loop: jobs from `in`, token ids to `sched`.

Ack policy: an entry is acked by the hand-off itself (TOK_DONE, TOK_END); the first finisher wins, so a job
that two workers did is harmless. Jobs that came together are read together and handed off together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import errors
from common.bus import handoffs
from common.bus.client import Bus
from common.bus.handoffs import Gate
from common.bus.intake import Intake
from common.bus.keys import CLASSES, TOKENIZERS, Keys
from common.bus.registry import ModelInfo
from common.bus.scripts import Call
from common.bus.steadiness import Steadiness
from common.bus.streams import Entry
from common.errors import MillstreamError, UnavailableError
from common.logging import Log
from common.messages import OutEntry, Request

log = Log(__name__)

#: Tries a job gets over worker crashes (B8).
MAX_ATTEMPTS = 3
_READ_COUNT = 16
_IDLE_S = 0.5
#: How long a job that is done may wait for others to be handed off with, and a payload in bytes that is sure
#: to be done within that time; for a longer one nobody waits.
_TOGETHER_S = 0.005
_SHORT = 8192
#: How old the model's limits may be.
_LIMITS_S = 2.0

#: Does one job: (prompts of token ids, "") for the engine, or ((), JSON answer). Raises `MillstreamError`.
Work = Callable[[Request, int], tuple[Sequence[Sequence[int]], str]]


class TokenizerWorker:
    """A `workers.runner.Worker`; ``work`` is the text side, loaded by ``load`` at start-up."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        load: Callable[[], Work],
        *,
        model: str,
        max_model_len: int,
        worker: str,
        partitions: int,
        lease_ms: int,
        steadiness: Steadiness,
        ttl_ms: int,
        life_ms: int,
    ) -> None:
        self._bus = bus
        self._keys = keys
        self._load = load
        self._work: Work | None = None
        self._model = model
        self._max_model_len = max_model_len
        self._worker = worker
        #: Life of a reply after its end, and of one that never ends.
        self._ttl_ms = ttl_ms
        self._life_ms = life_ms
        self.wake = threading.Event()
        streams = {p: [keys.work_in(p, model, cls) for cls in CLASSES] for p in range(partitions)}
        self._intake = Intake(
            bus,
            keys,
            TOKENIZERS,
            streams,
            worker=worker,
            lease_ms=lease_ms,
            steadiness=steadiness,
            wake=self.wake,
        )
        #: Requests as they were read, until they are asked for.
        self._rows: dict[str, Any] = {}
        #: Hand-offs of what is done, and when the first is to be sent at the latest.
        self._outbox: list[Call[Gate]] = []
        self._send_by = 0.0
        self._next_limits = 0.0
        self._draining = False
        self._done = 0

    def startup(self) -> None:
        self._work = self._load()
        self._intake.start()
        log.info("ready", model=self._model)

    def begin_drain(self) -> None:
        self._draining = True

    def busy(self) -> bool:
        return bool(self._outbox)  # what could not be begun is for a peer

    def shutdown(self) -> None:
        self._intake.stop()

    def stats(self) -> Mapping[str, Any]:
        """Readings for the registry."""
        return {"jobs": self._done}

    def step(self) -> None:
        self._send()
        self._refresh_limits()
        self._intake.take_recovered(())  # what was begun is finished within the pass
        if not self._draining:
            self._intake.take_fresh([_READ_COUNT] * len(CLASSES))
        self._read(self._intake.next(_READ_COUNT))
        begun = self._intake.begin(self._do)
        self._rows.clear()
        self._send()
        if not begun:
            self.wake.wait(_IDLE_S)
            self.wake.clear()

    def _refresh_limits(self) -> None:
        """The scheduler decides how long a request may be (its KV cache may be smaller than the model)."""
        now = time.monotonic()
        if now >= self._next_limits:
            self._next_limits = now + _LIMITS_S
            text = self._bus.do("HGET", self._keys.models(), self._model)
            try:
                self._max_model_len = ModelInfo.from_json(text).max_model_len if text else self._max_model_len
            except (KeyError, TypeError, ValueError):
                log.warning("the model's description cannot be read", model=self._model)

    def _read(self, entries: Sequence[Entry]) -> None:
        """Reads the requests of jobs that came together, in one exchange; what fails is read alone."""
        if len(entries) > 1:
            rows = self._bus.do_many([("HGETALL", self._keys.req(entry.uid)) for entry in entries])
            self._rows = dict(zip([entry.uid for entry in entries], rows, strict=True))

    def _send(self) -> None:
        """Sends the hand-offs of what is done; what Redis cannot take now stays, for the next time.

        Raises `UnavailableError` then. None is made twice, however often it is sent.
        """
        if not self._outbox:
            return
        gates = self._bus.run_many(self._outbox)
        calls, self._outbox = self._outbox, []
        away: UnavailableError | None = None
        for call, gate in zip(calls, gates, strict=True):
            if isinstance(gate, UnavailableError):
                self._outbox.append(call)
                away = gate
            elif isinstance(gate, MillstreamError):  # the search for stranded entries finds it
                log.warning("a job could not be handed off", error=gate.message)
        if away is not None:
            raise away

    def _hand_off(self, call: Call[Gate]) -> None:
        if not self._outbox:
            self._send_by = time.monotonic() + _TOGETHER_S
        self._outbox.append(call)

    def _do(self, entry: Entry) -> None:
        reply = self._rows.pop(entry.uid, None)
        if not isinstance(reply, list):
            reply = self._bus.do("HGETALL", self._keys.req(entry.uid))
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        is_long = entry.claimed or len(fields.get(b"payload", b"")) > _SHORT
        if self._outbox and (is_long or time.monotonic() >= self._send_by):
            self._send()
        if b"kind" not in fields or b"terminal" in fields:
            self._drop(entry)
            return
        try:
            request = Request.from_fields(entry.uid, fields)
        except (KeyError, ValueError):
            log.exception("a request cannot be read", uid=entry.uid)
            self._refuse(entry)
            return
        if entry.claimed and not entry.drained:
            attempts = self._bus.run(handoffs.attempt(self._keys, entry.uid, self._worker))
            if attempts > MAX_ATTEMPTS:
                self._end(entry, request, errors.WorkerCrashedError())
                return
        assert self._work is not None
        try:
            prompts, text = self._work(request, self._max_model_len)
        except MillstreamError as error:
            self._end(entry, request, error)
        except Exception:
            log.exception("a job failed", uid=entry.uid)
            self._end(entry, request, MillstreamError("The request could not be tokenized."))
        else:
            if prompts:
                call = handoffs.tok_done(self._keys, request, entry.id, prompts, self._life_ms, echo=text)
                self._hand_off(call)
            else:
                self._answer(entry, request, OutEntry("", answer=text, end="done"))
        self._done += 1
        if entry.claimed:  # should the next one crash us as well, it takes with it nobody who has been tried
            self._send()

    def _end(self, entry: Entry, request: Request, error: MillstreamError) -> None:
        kind = errors.kind_of(error)
        end = OutEntry("", end="error", error=kind, message=error.message, param=error.param or "")
        self._answer(entry, request, end, dead_reason=error.message if kind == "crashed" else "")

    def _answer(self, entry: Entry, request: Request, end: OutEntry, *, dead_reason: str = "") -> None:
        """Ends a request here: nothing of it is for the engine."""
        self._hand_off(
            handoffs.tok_end(
                self._keys,
                request,
                entry.id,
                end,
                ttl_ms=self._ttl_ms,
                worker=self._worker,
                dead_reason=dead_reason,
            )
        )

    def _refuse(self, entry: Entry) -> None:
        """Ends a request of which nothing is known but where it was queued."""
        call = handoffs.cancel(
            self._keys,
            entry.uid,
            model=self._model,
            cls=entry.stream.rpartition(":")[2],
            ttl_ms=self._ttl_ms,
            error="internal",
            message="The request could not be read.",
        )
        self._bus.run(call)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        cls = entry.stream.rpartition(":")[2]
        self._bus.run(
            handoffs.drop(
                self._keys,
                entry.uid,
                0,
                stream=entry.stream,
                group=TOKENIZERS,
                entry=entry.id,
                model=self._model,
                cls=cls,
            )
        )
