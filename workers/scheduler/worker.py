"""The scheduler: takes choices from `sched`, drives the engine, sends each step's tokens with EMIT.

Ack policy: an entry stays pending for the whole generation and is acked by the EMIT that carries its end;
the pending list is the list of who owns what.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from common import errors
from common.bus import registry
from common.bus.client import Bus, FencedError
from common.bus.handoffs import EmitEnd, EmitRow, Emitted, Step
from common.bus.intake import Intake
from common.bus.keys import CLASSES, SCHEDULERS, Keys, partition_of
from common.bus.starting import Started
from common.bus.steadiness import Steadiness
from common.bus.streams import Entry, Place
from common.errors import MillstreamError, UnavailableError
from common.logging import Log
from common.messages import Request
from workers.engine.types import Engine, EngineRequest, Output
from workers.scheduler.claims import Claims, class_of
from workers.scheduler.control import Control
from workers.scheduler.emitter import TICK_S, Emitter
from workers.scheduler.jobs import Job, error_row, row_of
from workers.scheduler.suspects import Suspects

log = Log(__name__)

#: Crashes without progress after which a choice is given up (B8).
MAX_ATTEMPTS = 3
#: How often a worker that is to stop looks for a peer to hand its work to.
_LOOK_S = 0.5
#: Choices that are started in one exchange.
_STARTS = 64


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
        steadiness: Steadiness,
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
            bus,
            keys,
            SCHEDULERS,
            streams,
            worker=worker,
            lease_ms=lease_ms,
            steadiness=steadiness,
            wake=self.wake,
        )
        self._emitter = Emitter(bus, keys, partitions, worker=worker, on_reply=self._note)
        self._jobs: dict[str, Job] = {}
        #: Entries in hand, until the EMIT that acks them was answered; they are not stranded.
        self._held: set[Place] = set()
        self._claims = Claims(bus, keys, model=model, worker=worker)
        self._control = Control()
        self._paused: set[str] = set()
        self._suspects = Suspects()
        #: The last choice of which a token was committed while it was on trial.
        self._proven = ""
        self._stash: dict[int, Step] = {}
        self._draining = False
        self._leaving = False
        self._next_look = 0.0

    # -- life ---------------------------------------------------------------------------------------------

    def startup(self) -> None:
        self._engine = self._build_engine()
        self._intake.start()
        self._emitter.pump()  # so that what is paused or cancelled is known before anything is begun
        self._emitter.settle()
        self._announce()
        log.info("ready", model=self._model)

    def begin_drain(self) -> None:
        self._draining = True
        self._look_for_peers()

    def busy(self) -> bool:
        return not self._emitter.idle() or (bool(self._jobs or self._stash) and not self._leaving)

    def _look_for_peers(self) -> None:
        """With a peer there is nothing to finish: it goes on with all that is pending here, at once."""
        self._next_look = time.monotonic() + _LOOK_S
        try:
            peers = registry.serving(self._bus, self._keys, registry.SCHEDULER, self._model)
        except MillstreamError as error:
            log.warning("could not look for a peer", error=error.message)
            return
        if {*peers} - {self._worker}:
            self._leaving = True
            log.info("handing over", choices=len(self._jobs))

    def shutdown(self) -> None:
        self._intake.stop()
        self._emitter.stop(timeout_s=2.0)

    def stats(self) -> Mapping[str, Any]:
        """Readings for the registry; called from the lease thread."""
        if self._engine is None:
            return {"loading": True}
        stats = self._engine.stats()
        return {name: getattr(stats, name) for name in stats.__slots__} | {"suspects": len(self._suspects)}

    # -- loop ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        assert self._engine is not None
        engine, emitter = self._engine, self._emitter
        if self._draining and not self._leaving and time.monotonic() >= self._next_look:
            self._look_for_peers()
        if emitter.troubled or self._leaving:
            self._settle()
            if emitter.troubled or self._leaving:  # nothing else can be done before that is
                return
        self._obey(engine)
        self._take_in(engine)
        self._steer(engine)
        self._flush_stash()
        if engine.has_work() and not self._stash and not emitter.full():
            begun = time.monotonic()
            self._send(engine.step())
            emitter.pump()
            if time.monotonic() - begun > TICK_S:  # whom to cancel is known before another long step
                emitter.settle()
            if self._suspects.on_trial is None:
                self._suspects.others_ran()
        else:
            self._settle()

    def _settle(self) -> None:
        """Nothing can be computed now: takes what Redis has to say, then waits for news."""
        emitter = self._emitter
        emitter.pump()
        emitter.settle()
        if emitter.troubled or (emitter.idle() and not self._leaving):
            self.wake.wait(TICK_S)
            self.wake.clear()

    # -- in -----------------------------------------------------------------------------------------------

    def _take_in(self, engine: Engine) -> None:
        """Work of dead peers always, since without us nobody may be there; new work only as long as we stay.

        Beside a suspect nothing new is taken: a peer may have it meanwhile.
        """
        try:
            self._intake.take_recovered(self._held)
            if not self._draining and self._suspects.on_trial is None:
                self._intake.take_fresh([engine.room(priority) for priority in range(len(CLASSES))])
        finally:
            self._claims.ask(self._intake.next(_STARTS))
            self._intake.begin(lambda entry: self._start(engine, entry))
            self._claims.forget()

    def _start(self, engine: Engine, entry: Entry) -> None:
        """One entry becomes a job, or goes away because nobody wants it any more."""
        key, cls = f"{entry.uid}/{entry.choice}", class_of(entry)
        started = self._claims.claim(entry)
        if started is None or started.code == "ENDED":
            self._claims.drop(entry)
            return
        if key in self._jobs:
            return
        tokens = len(started.output_ids)
        job = Job(entry.uid, entry.choice, partition_of(entry.uid), cls, entry, started.log_size, tokens)
        self._jobs[key] = job
        self._held.add(entry.place)
        if started.code == "CANCELLED":
            self._end(key, errors.CancelledError())
        elif started.attempts >= MAX_ATTEMPTS:
            self._end(key, errors.WorkerCrashedError())
        elif started.attempts:
            log.warning("a request may have crashed a worker", uid=entry.uid, attempts=started.attempts)
            self._suspects.add(key, started.attempts)
        else:
            self._run(engine, key, started)

    def _run(self, engine: Engine, key: str, started: Started) -> None:
        job, request = self._jobs[key], started.request
        assert isinstance(request, Request)
        job.running = True
        engine.add(
            EngineRequest(
                key=key,
                prompt_ids=started.prompt_ids,
                params=request.params,
                seed=request.params.choice_seed(job.choice % request.n),
                output_ids=started.output_ids,
                priority=CLASSES.index(request.cls) if request.cls in CLASSES else 0,
                rank=request.priority,
                salt=request.cache_namespace,
            )
        )

    # -- suspects -----------------------------------------------------------------------------------------

    def _steer(self, engine: Engine) -> None:
        """Pauses what may not run now: as Redis said, or because a suspect is to run alone."""
        blocked = self._control.paused(self._jobs)
        suspects = self._suspects
        if suspects.on_trial == self._proven:
            suspects.discard(self._proven)
        if suspects.on_trial in blocked:
            suspects.put_back()
        self._pause(engine, blocked)
        if not suspects:
            return
        suspects.choose(blocked, others=engine.has_work())
        self._pause(engine, blocked)
        key = suspects.on_trial
        # What is still in flight ends first, so that nothing at all is beside it.
        if key is not None and not self._jobs[key].running and not engine.has_work():
            self._try_alone(engine, key)

    def _pause(self, engine: Engine, blocked: set[str]) -> None:
        trial = self._suspects.on_trial
        if trial is not None:
            wanted = {key for key, job in self._jobs.items() if job.running and key != trial}
        elif blocked or self._suspects:
            held_back = (key for key in self._jobs if key in blocked or key in self._suspects)
            wanted = {key for key in held_back if self._jobs[key].running}
        else:
            wanted = set()
        for key in wanted - self._paused:
            engine.pause(key)
        for key in self._paused - wanted:
            engine.resume(key)
        self._paused = wanted

    def _try_alone(self, engine: Engine, key: str) -> None:
        """START once more, now to run. Whatever is wrong with it holds up the others no longer than that."""
        job = self._jobs[key]
        try:
            started = self._claims.claim(job.entry, alone=True)
            if started is None or started.code == "ENDED":
                self._claims.drop(job.entry)
                self._held.discard(self._close(key).entry.place)
            elif started.code == "CANCELLED":
                self._end(key, errors.CancelledError())
            else:
                self._run(engine, key, started)
        except FencedError:
            raise
        except UnavailableError as error:
            log.warning("a suspect cannot be tried yet", uid=job.uid, error=error.message)
            self._suspects.put_back()
        except MillstreamError as error:
            # As in the intake: left to the search for stranded entries.
            log.warning("a suspect cannot be tried", uid=job.uid, error=error.message)
            self._held.discard(self._close(key).entry.place)

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
                    self._held.discard(self._close(output.key).entry.place)
                continue
            if output.finish is None and output.logprobs is None and output.prompt is None:
                # The plain token, by far the most common.
                record, piece = f"{uid} {choice} {output.index} {output.token}", f"{output.token},"
                row = EmitRow(uid, choice, record, piece, job.log_size)
            else:
                row = row_of(job, output)
                if output.finish is not None:
                    ends[job.partition].append(self._end_of(self._close(output.key)))
            rows[job.partition].append(row)
            job.log_size += len(row.piece)
            if output.cached_tokens:
                cached[job.partition].append((uid, choice, output.cached_tokens))
        self._emitter.submit(
            {
                partition: Step(tuple(some), tuple(ends[partition]), tuple(cached[partition]))
                for partition, some in rows.items()
            }
        )

    def _close(self, key: str) -> Job:
        self._paused.discard(key)
        self._suspects.discard(key)
        return self._jobs.pop(key)

    def _end_of(self, job: Job, dead_reason: str = "") -> EmitEnd:
        return EmitEnd(job.uid, job.choice, self._model, job.cls, job.entry.id, dead_reason)

    def _end(self, key: str, error: MillstreamError) -> None:
        """Ends a choice that the engine does not have; sent when the emitter has room."""
        job = self._close(key)
        crashed = errors.kind_of(error) == "crashed"
        row, end = error_row(job, error), self._end_of(job, error.message if crashed else "")
        waiting = self._stash.get(job.partition, Step())
        self._stash[job.partition] = Step((*waiting.rows, row), (*waiting.ends, end))

    def _flush_stash(self) -> None:
        if self._stash and not self._emitter.full():
            self._emitter.submit(self._stash)
            self._stash = {}

    # -- control ------------------------------------------------------------------------------------------

    def _note(self, partition: int, step: Step, reply: Emitted) -> None:
        """Called by the emitter for every answer."""
        self._control.note(partition, reply)
        for end in step.ends:
            self._held.discard((self._keys.sched(partition, end.model, end.cls), end.entry))
        if (trial := self._suspects.on_trial) is not None:
            committed = {
                f"{row.uid}/{row.choice}"
                for row in step.rows
                if row.piece and (row.uid, row.choice) not in reply.refused
            }
            self._proven = trial if trial in committed else self._proven
        if step.rows or reply.cancel or reply.pause or self._paused:
            self.wake.set()  # there may be something to compute, or to obey: no time to rest

    def _obey(self, engine: Engine) -> None:
        """Lets go of what is another worker's, and cancels what is flagged."""
        for key in self._control.refused():
            if (lost := self._jobs.get(key)) is not None and not lost.disowned:
                lost.disowned = True
                engine.cancel(key)
        for key in self._control.cancelled(self._jobs):
            if self._jobs[key].running:
                engine.cancel(key)
            else:
                self._end(key, errors.CancelledError())
