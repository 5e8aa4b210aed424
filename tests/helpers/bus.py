"""One partition of the bus in the hands of a test: every role's hand-offs, by their typed faces.

Nothing here decides anything: it only saves tests from repeating keys, models and times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.bus import handoffs, leases, starting
from common.bus.admission import Admission, Limits, admit
from common.bus.client import Bus
from common.bus.handoffs import EmitEnd, EmitRow, Emitted, Finished, Gate, Step, Text
from common.bus.holding import Hold, attach
from common.bus.keys import DETOKENIZERS, INTERACTIVE, SCHEDULERS, TOKENIZERS, Keys, new_uid
from common.bus.steadiness import Steadiness
from common.bus.streams import Entry, GroupReader
from common.messages import Kind, OutEntry, Request, TokRecord, format_record, parse_out
from common.sampling import SamplingParams

#: A model id with all that may hurt in a key: a slash, a colon, a space, a percent sign, other scripts.
MODEL = "org/Größe 漢字:7b%2F{1}"
TTL_MS = 60_000
LEASE_MS = 3_000


class Steady(Steadiness):
    """Of a worker that never failed to renew its lease."""

    def __init__(self) -> None:
        super().__init__(LEASE_MS)

    def holds(self) -> bool:
        return True


@dataclass(slots=True)
class Job:
    """A choice in a scheduler's hands, and how many of its tokens were emitted."""

    entry: Entry
    log: str = ""
    tokens: int = 0


@dataclass
class Desk:
    """The hand-offs of one partition, with one worker of each role by default."""

    bus: Bus
    keys: Keys = field(default_factory=Keys)
    partition: int = 0
    model: str = MODEL
    cls: str = INTERACTIVE
    epoch: int = 0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(seed=7))
    seq: dict[str, int] = field(default_factory=dict)

    # -- requests ---------------------------------------------------------------------------------------

    def request(self, n: int = 1, payload: str = "Héllo 世界", uid: str = "", **more: Any) -> Request:
        return Request(
            uid=uid or new_uid(self.partition),
            kind=Kind.COMPLETION,
            model=self.model,
            params=self.params,
            payload={"prompt": payload},
            reply={"stream": True},
            n=n,
            cls=self.cls,
            tenant="tenant",
            salt="salt",
            priority=3,
            api="api-1",
            **more,
        )

    def admit(self, request: Request, *, stale: str = "", **limits: int) -> Admission:
        return self.bus.run(admit(self.keys, request, self.limits(**limits), stale=stale))

    def limits(self, **changes: int) -> Limits:
        defaults = {
            "max_queued": 100,
            "max_bytes": 1 << 20,
            "timeout_ms": 30_000,
            "queue_timeout_ms": 10_000,
            "ttl_ms": TTL_MS,
            "idem_ttl_ms": 2 * TTL_MS,
        }
        return Limits(**{**defaults, **changes})

    # -- workers ----------------------------------------------------------------------------------------

    def open(self, *workers: str) -> None:
        for worker in workers:
            self.bus.run(leases.renew(self.keys, self.partition, worker, LEASE_MS, opening=True))

    def expire_lease(self, worker: str) -> None:
        self.bus.do("HSET", self.keys.lease(self.partition, worker), "expiry", 0)

    def take_partition(self, worker: str = "detokenizer-1") -> int:
        self.open(worker)
        held = self.bus.run(leases.own_partition(self.keys, self.partition, worker, LEASE_MS, take=True))
        self.epoch = held.epoch or self.epoch
        return held.epoch

    def reader(self, stream: str, group: str, consumer: str) -> GroupReader:
        reader = GroupReader(self.bus, stream, group, consumer)
        reader.ensure()
        return reader

    @property
    def work_in(self) -> str:
        return self.keys.work_in(self.partition, self.model, self.cls)

    @property
    def sched(self) -> str:
        return self.keys.sched(self.partition, self.model, self.cls)

    @property
    def inflight(self) -> str:
        return self.keys.inflight(self.partition, self.model, self.cls)

    @property
    def bytes(self) -> str:
        return self.keys.bytes(self.partition, self.model, self.cls)

    @property
    def tok(self) -> str:
        return self.keys.tok(self.partition)

    # -- tokenizer --------------------------------------------------------------------------------------

    def read_in(self, worker: str = "tokenizer-1", count: int = 1) -> list[Entry]:
        return self.reader(self.work_in, TOKENIZERS, worker).read(count)

    def tok_done(
        self,
        request: Request,
        entry: Entry,
        prompts: Sequence[Sequence[int]] = ((5, 6, 7),),
        echo: str = "",
    ) -> Gate:
        return self.bus.run(handoffs.tok_done(self.keys, request, entry.id, prompts, TTL_MS, echo=echo))

    def tok_end(self, request: Request, entry: Entry, end: OutEntry, dead_reason: str = "") -> Gate:
        call = handoffs.tok_end(
            self.keys, request, entry.id, end, ttl_ms=TTL_MS, worker="tokenizer-1", dead_reason=dead_reason
        )
        return self.bus.run(call)

    # -- scheduler --------------------------------------------------------------------------------------

    def read_sched(self, worker: str = "scheduler-1", count: int = 1000) -> list[Entry]:
        return self.reader(self.sched, SCHEDULERS, worker).read(count)

    def start_call(
        self, entry: Entry, worker: str = "scheduler-1", *, owner: str = "", alone: bool = False
    ) -> Any:
        return starting.start(
            self.keys, entry.uid, entry.choice,
            model=self.model, cls=self.cls, worker=worker, owner=owner, alone=alone,
        )  # fmt: skip

    def start(self, entry: Entry, worker: str = "scheduler-1", *, alone: bool = False) -> starting.Started:
        """START, asked again with the last owner if there was one."""
        started = self.bus.run(self.start_call(entry, worker, alone=alone))
        if started.code == "OWNER":
            started = self.bus.run(self.start_call(entry, worker, owner=started.owner, alone=alone))
        return started

    def drop(self, entry: Entry, group: str = SCHEDULERS) -> int:
        call = handoffs.drop(
            self.keys, entry.uid, entry.choice,
            stream=entry.stream, group=group, entry=entry.id, model=self.model, cls=self.cls,
        )  # fmt: skip
        return self.bus.run(call)

    def row(self, job: Job, token: int | None, end: str = "", error: str = "") -> EmitRow:
        """The next row of a job, which counts it as sent."""
        uid, choice = job.entry.uid, job.entry.choice
        record = format_record(TokRecord(uid, choice, job.tokens, token, end, error, error and "Why, 世界|."))
        piece = "" if token is None else f"{token},"
        row = EmitRow(uid, choice, record, piece, len(job.log))
        job.log += piece
        job.tokens += token is not None
        return row

    def end(self, job: Job, dead_reason: str = "") -> EmitEnd:
        return EmitEnd(job.entry.uid, job.entry.choice, self.model, self.cls, job.entry.id, dead_reason)

    def emit_call(self, step: Step, seq: int, worker: str = "scheduler-1") -> Any:
        return handoffs.emit(self.keys, self.partition, worker, seq, step)

    def emit(self, step: Step, worker: str = "scheduler-1") -> Emitted:
        """The worker's next step."""
        self.seq[worker] = self.seq.get(worker, 0) + 1
        return self.bus.run(self.emit_call(step, self.seq[worker], worker))

    def tick(self, worker: str = "scheduler-1") -> Emitted:
        return self.bus.run(self.emit_call(Step(), 0, worker))

    def generate(
        self, job: Job, tokens: int, end: str = "", error: str = "", worker: str = "scheduler-1"
    ) -> None:
        """Emits tokens one a step; with ``end`` the last of them ends the work."""
        for left in range(tokens, 0, -1):
            last = left == 1 and end and not error
            row = self.row(job, 100 + job.tokens, end if last else "")
            self.emit(Step((row,), (self.end(job),) if last else ()), worker)
        if error:
            self.emit(Step((self.row(job, None, "error", error),), (self.end(job),)), worker)

    # -- detokenizer ------------------------------------------------------------------------------------

    def stored(self) -> str:
        """The committed offset."""
        reply = self.bus.do("XINFO", "GROUPS", self.tok)[0]
        offset = dict(zip(reply[::2], reply[1::2], strict=True))[b"last-delivered-id"]
        return str(offset.decode())

    def newest(self) -> str:
        """The offset after the last step there is."""
        steps = self.bus.do("XREVRANGE", self.tok, "+", "-", "COUNT", 1)
        return str(steps[0][0].decode()) if steps else self.stored()

    def open_tok(self) -> None:
        self.reader(self.tok, DETOKENIZERS, "unused")

    def pub_call(
        self,
        texts: Sequence[Text] = (),
        finished: Sequence[Finished] = (),
        *,
        expected: str | None = None,
        offset: str | None = None,
        epoch: int | None = None,
    ) -> Any:
        return handoffs.pub(
            self.keys,
            self.partition,
            epoch=self.epoch if epoch is None else epoch,
            expected=self.stored() if expected is None else expected,
            offset=self.newest() if offset is None else offset,
            entries=1,
            ttl_ms=TTL_MS,
            texts=texts,
            finished=finished,
            group=DETOKENIZERS,
        )

    def pub(self, texts: Sequence[Text] = (), finished: Sequence[Finished] = (), **options: Any) -> Any:
        return self.bus.run(self.pub_call(texts, finished, **options))

    def finished(self, uid: str, choice: int = 0, choices: int = 1, **fields: Any) -> Finished:
        return Finished(uid, choice, choices, self.model, self.cls, **fields)

    # -- API --------------------------------------------------------------------------------------------

    def cancel(self, uid: str, *, abandoned: bool = False) -> str:
        call = handoffs.cancel(
            self.keys, uid, model=self.model, cls=self.cls, ttl_ms=TTL_MS, error="cancelled",
            message="Nobody waits.", abandoned=abandoned,
        )  # fmt: skip
        return self.bus.run(call)

    def attach(self, *holds: Hold, ttl_ms: int = TTL_MS) -> int:
        return self.bus.run(attach(self.keys, holds, ttl_ms))

    def expire(self, uid: str, owner: str = "") -> str:
        call = handoffs.expire(
            self.keys, uid, model=self.model, cls=self.cls, owner=owner, ttl_ms=TTL_MS, lost_ms=2 * LEASE_MS
        )
        return self.bus.run(call)

    def overdue(self, uid: str) -> None:
        """Sets the request's deadlines back."""
        self.bus.do("HSET", self.keys.req(uid), "deadline", 1, "queue_deadline", 1)
        self.bus.do("ZADD", self.inflight, "XX", 1, uid)

    # -- stages -----------------------------------------------------------------------------------------

    def queued(self, n: int = 1) -> Request:
        request = self.request(n)
        assert self.admit(request).code == "OK"
        return request

    def waiting(self, n: int = 1) -> Request:
        request = self.queued(n)
        [entry] = self.read_in()
        assert self.tok_done(request, entry) is Gate.OK
        return request

    def running(self, n: int = 1, worker: str = "scheduler-1") -> tuple[Request, list[Job]]:
        request = self.waiting(n)
        if not self.bus.do("EXISTS", self.keys.lease(self.partition, worker)):
            self.open(worker)
        jobs = [Job(entry) for entry in self.read_sched(worker)]
        assert [self.start(job.entry, worker).code for job in jobs] == ["OK"] * n
        return request, jobs

    # -- what can be seen -------------------------------------------------------------------------------

    def req(self, uid: str) -> dict[str, str]:
        reply = self.bus.do("HGETALL", self.keys.req(uid))
        return {k.decode(): v.decode() for k, v in zip(reply[::2], reply[1::2], strict=True)}

    def out(self, uid: str) -> list[OutEntry]:
        return [parse_out(i, f) for i, f in self.bus.do("XRANGE", self.keys.out(uid), "-", "+")]

    def gen(self, uid: str, choice: int = 0) -> str | None:
        log = self.bus.do("GET", self.keys.gen(uid, choice))
        return None if log is None else log.decode()

    def records(self) -> list[str]:
        """The records in `tok`, oldest first."""
        steps = self.bus.do("XRANGE", self.tok, "-", "+")
        return [row for _, fields in steps for row in fields[3].decode().split("|")]

    def members(self, key: str) -> set[str]:
        return {member.decode() for member in self.bus.do("SMEMBERS", key)}

    def pending(self, stream: str, group: str) -> int:
        return int(self.bus.do("XPENDING", stream, group)[0])

    def assert_empty(self) -> None:
        """All has ended: nothing is queued, owned, counted or flagged."""
        for stream, group in ((self.work_in, TOKENIZERS), (self.sched, SCHEDULERS)):
            assert self.bus.do("XLEN", stream) == 0, stream
            assert not self.bus.do("EXISTS", stream) or self.pending(stream, group) == 0, stream
        assert self.bus.do("ZCARD", self.inflight) == 0
        assert self.bus.do("HGETALL", self.bytes) in ([], [b"total", b"0"])
        for key in (self.keys.cancel(self.partition), self.keys.pause(self.partition)):
            assert self.bus.do("SCARD", key) == 0, key
