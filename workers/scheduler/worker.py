"""The scheduler: takes choices from `sched`, drives the engine, sends each step's tokens with EMIT.

Ack policy: an entry stays pending for the whole generation and is acked by the EMIT that carries its end;
the pending list is the list of who owns what.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common import errors
from common.bus import handoffs
from common.bus.client import Bus, FencedError
from common.bus.handoffs import EmitEnd, EmitRow, Emitted, Started, Step
from common.bus.intake import Intake
from common.bus.keys import CLASSES, SCHEDULERS, Keys, partition_of
from common.bus.leases import Progress
from common.bus.streams import Entry
from common.logging import Log
from common.messages import Request, TokRecord, format_record
from workers.engine.types import Engine, EngineRequest, Finish, Output
from workers.scheduler.emitter import TICK_S, Emitter

log = Log(__name__)

#: Crashes without progress after which a choice is given up (B8).
MAX_ATTEMPTS = 3
#: A partition is paused while more steps than this await its detokenizer.
BACKLOG = 200


@dataclass(slots=True)
class Job:
    """One choice in hand: where its entry is pending, and how long its token log is."""

    uid: str
    choice: int
    partition: int
    cls: str
    entry: str
    #: Length of the log once all that was sent is applied.
    log_size: int
    #: Redis refused a row of it: the log is gone, or another worker's. Nothing of it is sent any more.
    disowned: bool = False


class SchedulerWorker:
    """A `workers.runner.Worker` around one engine."""

    def __init__(
        self,
        bus: Bus,
        keys: Keys,
        build_engine: Callable[[], Engine],
        *,
        model: str,
        worker: str,
        partitions: int,
        lease_ms: int,
        progress: Progress,
        announce: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._keys = keys
        self._build_engine = build_engine
        self._model = model
        self._worker = worker
        self._announce = announce
        self._engine: Engine | None = None
        self.wake = threading.Event()
        streams = {p: [keys.sched(p, model, cls) for cls in CLASSES] for p in range(partitions)}
        self._intake = Intake(
            bus, keys, SCHEDULERS, streams, worker=worker, lease_ms=lease_ms, wake=self.wake
        )
        self._emitters = [
            Emitter(
                bus, keys, p, worker=worker, progress=progress, on_reply=self._note, on_fenced=self._on_fenced
            )
            for p in range(partitions)
        ]
        self._jobs: dict[str, Job] = {}
        #: Entries in hand, until the EMIT that acks them was answered; they are not stranded.
        self._held: set[str] = set()
        self._refused: deque[str] = deque()
        self._replies: dict[int, Emitted] = {}
        self._paused: set[str] = set()
        self._stash: dict[int, Step] = {}
        self._fence: FencedError | None = None
        self._draining = False

    # -- life ---------------------------------------------------------------------------------------------

    def startup(self) -> None:
        self._engine = self._build_engine()
        self._intake.start()
        for emitter in self._emitters:
            emitter.start()
        self._announce()
        log.info("ready", model=self._model)

    def begin_drain(self) -> None:
        self._draining = True

    def busy(self) -> bool:
        return bool(self._jobs or self._stash) or not all(emitter.idle() for emitter in self._emitters)

    def shutdown(self) -> None:
        self._intake.stop()
        for emitter in self._emitters:
            emitter.stop(timeout_s=2.0)

    def stats(self) -> Mapping[str, Any]:
        """Readings for the registry; called from the lease thread."""
        if self._engine is None:
            return {"loading": True}
        stats = self._engine.stats()
        return {name: getattr(stats, name) for name in stats.__slots__}

    # -- loop ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        if self._fence is not None:
            raise self._fence
        assert self._engine is not None
        engine = self._engine
        self._obey(engine)
        if not self._draining:
            self._take_in(engine)
        self._flush_stash()
        if engine.has_work() and not self._stash and not self._clogged():
            self._send(engine.step())
        else:
            self.wake.wait(TICK_S)
            self.wake.clear()

    def _clogged(self) -> bool:
        """Whether a step's results could not be sent now."""
        return any(emitter.full() for emitter in self._emitters)

    def _take_in(self, engine: Engine) -> None:
        for entry in self._intake.recovered(self._held):
            self._start(engine, entry)
        room = engine.room()
        if room > 0:
            for entry in self._intake.fresh(room):
                self._start(engine, entry)

    def _start(self, engine: Engine, entry: Entry) -> None:
        """One entry becomes a job, or goes away because nobody wants it any more."""
        cls = entry.stream.rpartition(":")[2]
        uid, choice = entry.uid, entry.choice
        counts = entry.claimed and not entry.drained
        call = handoffs.start(
            self._keys, uid, choice, model=self._model, cls=cls, worker=self._worker, counts=counts
        )
        try:
            started = self._bus.run(call)
        except (AttributeError, KeyError, ValueError):
            # Crashing on it would only hand it to a peer, to crash on. Its reply ends with its deadline.
            log.exception("a request cannot be read", uid=uid)
            self._drop(entry, cls)
            return
        if started.code == "ENDED":
            self._drop(entry, cls)
            return
        key = f"{uid}/{choice}"
        if key in self._jobs:
            return
        self._jobs[key] = Job(uid, choice, partition_of(uid), cls, entry.id, started.log_size)
        self._held.add(entry.id)
        if started.code == "CANCELLED":
            self._end(key, len(started.output_ids), errors.CancelledError())
        elif started.attempts >= MAX_ATTEMPTS:
            self._end(key, len(started.output_ids), errors.WorkerCrashedError())
        else:
            engine.add(self._engine_request(key, choice, started))

    def _drop(self, entry: Entry, cls: str) -> None:
        call = handoffs.drop(
            self._keys,
            entry.uid,
            entry.choice,
            stream=entry.stream,
            group=SCHEDULERS,
            entry=entry.id,
            model=self._model,
            cls=cls,
        )
        self._bus.run(call)

    def _engine_request(self, key: str, choice: int, started: Started) -> EngineRequest:
        request = started.request
        assert isinstance(request, Request)
        return EngineRequest(
            key=key,
            prompt_ids=started.prompt_ids,
            params=request.params,
            seed=request.params.choice_seed(choice % request.n),
            output_ids=started.output_ids,
            priority=CLASSES.index(request.cls) if request.cls in CLASSES else 0,
            salt=request.tenant,
        )

    # -- out ----------------------------------------------------------------------------------------------

    def _send(self, outputs: list[Output]) -> None:
        """One step's outputs, grouped by partition."""
        rows: dict[int, list[EmitRow]] = defaultdict(list)
        ends: dict[int, list[EmitEnd]] = defaultdict(list)
        cached: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        for output in outputs:
            job = self._jobs[output.key]
            uid, choice = job.uid, job.choice
            if job.disowned:
                if output.finish is not None:
                    self._held.discard(self._close(output.key).entry)
                continue
            if output.finish is None:  # the plain token, by far the most common
                record, piece = f"{uid} {choice} {output.index} {output.token}", f"{output.token},"
                rows[job.partition].append(EmitRow(uid, choice, record, piece, job.log_size))
                job.log_size += len(piece)
            else:
                rows[job.partition].append(_end_row(job, output))
                ends[job.partition].append(self._close(output.key))
            if output.cached_tokens:
                cached[job.partition].append((uid, choice, output.cached_tokens))
        for partition, some in rows.items():
            step = Step(tuple(some), tuple(ends[partition]), tuple(cached[partition]))
            self._emitters[partition].submit(step)

    def _close(self, key: str, dead_reason: str = "") -> EmitEnd:
        job = self._jobs.pop(key)
        self._paused.discard(key)
        return EmitEnd(job.uid, job.choice, self._model, job.cls, job.entry, dead_reason)

    def _end(self, key: str, index: int, error: errors.MillstreamError) -> None:
        """Ends a choice that never reached the engine; sent when its partition's emitter has room."""
        job = self._jobs[key]
        kind = errors.kind_of(error)
        record = TokRecord(job.uid, job.choice, index, None, "error", kind, error.message)
        row = EmitRow(job.uid, job.choice, format_record(record), "", job.log_size)
        end = self._close(key, error.message if kind == "crashed" else "")
        waiting = self._stash.get(job.partition, Step())
        self._stash[job.partition] = Step((*waiting.rows, row), (*waiting.ends, end))

    def _flush_stash(self) -> None:
        for partition in list(self._stash):
            if not self._emitters[partition].full():
                self._emitters[partition].submit(self._stash.pop(partition))

    # -- control ------------------------------------------------------------------------------------------

    def _note(self, partition: int, step: Step, reply: Emitted) -> None:
        """Called from an emitter's thread."""
        self._replies[partition] = reply
        self._refused.extend(f"{uid}/{choice}" for uid, choice in reply.refused)
        self._held.difference_update([end.entry for end in step.ends])
        if step.rows or reply.cancel or reply.pause or self._paused:
            self.wake.set()  # there is room for the next step, or something to obey

    def _on_fenced(self, error: FencedError) -> None:
        """Called from an emitter's thread."""
        self._fence = error
        self.wake.set()

    def _obey(self, engine: Engine) -> None:
        """Cancels and pauses what the control sets say; the sets may also name others' requests.

        A partition whose detokenizer is behind is paused as well, and no other with it.
        """
        replies = list(self._replies.values())
        while self._refused:
            key = self._refused.popleft()
            if (lost := self._jobs.get(key)) is not None and not lost.disowned:
                lost.disowned = True
                engine.cancel(key)
        cancels = frozenset().union(*(reply.cancel for reply in replies))
        if cancels:
            for key, job in list(self._jobs.items()):
                if key in cancels or job.uid in cancels:
                    engine.cancel(key)
        pauses = frozenset().union(*(reply.pause for reply in replies))
        behind = {p for p, reply in self._replies.items() if reply.backlog > BACKLOG}
        if not pauses and not behind and not self._paused:
            return
        wanted = {key for key, job in self._jobs.items() if job.uid in pauses or job.partition in behind}
        for key in wanted - self._paused:
            engine.pause(key)
        for key in self._paused - wanted:
            engine.resume(key)
        self._paused = wanted


def _end_row(job: Job, output: Output) -> EmitRow:
    """The record of an engine's end: a token with stop or length, or an error without one."""
    if output.finish is Finish.CANCELLED:
        end, kind, message = "error", "cancelled", errors.CancelledError().message
    elif output.finish is Finish.ERROR:
        end, kind, message = "error", "internal", output.error
    else:
        end, kind, message = str(output.finish), "", ""
    record = TokRecord(job.uid, job.choice, output.index, output.token, end, kind, message)
    piece = "" if output.token is None else f"{output.token},"
    return EmitRow(job.uid, job.choice, format_record(record), piece, job.log_size)
