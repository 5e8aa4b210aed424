"""All three worker roles in one thread, playing a script through the real hand-offs.

For tests of the API alone: what a reply consists of, and when it comes, is up to the test. Redis is real, and
so is every script of the bus.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from common.bus import handoffs, leases, registry, starting
from common.bus.client import Bus
from common.bus.handoffs import EmitEnd, EmitRow, Finished, Step, Text
from common.bus.keys import DETOKENIZERS, INTERACTIVE, SCHEDULERS, TOKENIZERS, Keys, partition_of
from common.bus.streams import Entry, GroupReader
from common.errors import InvalidRequestError, MillstreamError, UnavailableError, kind_of
from common.messages import OutEntry, Request, TokRecord, format_record

MODEL = "test-model"
#: Most choices that are played at once.
_PLAYERS = 80
ROLES = (registry.TOKENIZER, registry.SCHEDULER, registry.DETOKENIZER)


@dataclass
class Play:
    """What happens to the choices of one request."""

    #: Texts of every choice, one token each.
    texts: Sequence[str] = ("Hello", ", ", "world")
    finish: str = "stop"
    #: JSON, as the detokenizer writes it.
    stop: str = ""
    #: Called before each token; blocks as long as the test wants.
    before: Callable[[Request, int], None] = lambda request, index: None
    #: The request ends with this after its texts.
    error: MillstreamError | None = None
    #: Tokens a choice has, when its texts are not all of them (an end id has no text).
    silent_tokens: int = 1


@dataclass
class FakeWorkers:
    """Serves `MODEL` until closed. ``script`` says what happens to a request; it may raise to refuse one."""

    url: str
    script: Callable[[Request], Play] = lambda request: Play()
    partitions: int = 2
    model: registry.ModelInfo = field(
        default_factory=lambda: registry.ModelInfo(
            MODEL, max_model_len=4096, vocab_size=1000, created=1_700_000_000, aliases=("alias/of-it",)
        )
    )
    roles: tuple[str, ...] = ROLES
    #: Whether jobs are taken at all: without, requests stay in the tokenizers' queue.
    working: bool = True
    seen: list[Request] = field(default_factory=list)
    #: (uid, choice) of choices that were cancelled while they ran.
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = Keys()
        self.bus = Bus(self.url, name="fake")
        self._stop = threading.Event()
        self._seq = dict.fromkeys(range(self.partitions), 0)
        self._epoch: dict[int, int] = {}
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self.failure: BaseException | None = None
        # Each thread has a connection of its own, of which there may be a hundred: threads are used again.
        self._pool = ThreadPoolExecutor(_PLAYERS)
        self._players: list[Future[None]] = []
        self._plays: dict[str, Play] = {}
        self._lock = threading.Lock()
        self._taking = threading.Lock()

    def __enter__(self) -> Self:
        self.prepare()
        self._thread.start()
        return self

    def prepare(self) -> None:
        """Everything that must be in Redis; again, after a test emptied it."""
        self._seq = dict.fromkeys(range(self.partitions), 0)
        self.bus.do("HSET", self.keys.models(), self.model.id, self.model.to_json())
        for partition in range(self.partitions):
            self.bus.run(leases.renew(self.keys, partition, "fake", 600_000, opening=True))
            held = self.bus.run(leases.own_partition(self.keys, partition, "fake", 600_000, take=True))
            self._epoch[partition] = held.epoch
            for stream, group in (
                (self.keys.tok(partition), DETOKENIZERS),
                (self._stream("in", partition), TOKENIZERS),
                (self._stream("sched", partition), SCHEDULERS),
            ):
                GroupReader(self.bus, stream, group, "fake").ensure()
        self.announce()

    def pause(self) -> None:
        """From now on nothing is taken; what was being taken has been."""
        with self._taking:
            self.working = False

    def forget_failure(self) -> None:
        """The test broke the bus on purpose."""
        wait(self._players, 10)
        self.failure = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)
        wait(self._players, 10)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.bus.close()
        if kind is None and self.failure is not None:
            raise self.failure

    def announce(self) -> None:
        """Signs of life of all roles."""
        for role in self.roles:
            registry.announce(
                self.bus,
                self.keys,
                worker=f"{role}-1",
                role=role,
                model=self.model.id,
                draining=False,
                stats={},
            )

    def _stream(self, kind: str, partition: int) -> str:
        make = self.keys.work_in if kind == "in" else self.keys.sched
        return make(partition, self.model.id, INTERACTIVE)

    def _loop(self) -> None:
        announced = 0.0
        while not self._stop.wait(0.002):
            try:
                if time.monotonic() - announced > 1:
                    self.announce()
                    announced = time.monotonic()
                with self._taking:
                    if self.working:
                        self._take()
            except UnavailableError:
                continue  # the test took Redis away
            except BaseException as error:
                self.failure = error
                return

    def _take(self) -> None:
        for partition in range(self.partitions):
            jobs = GroupReader(self.bus, self._stream("in", partition), TOKENIZERS, "fake")
            for entry in jobs.read(16):
                self._tokenize(entry)
            work = GroupReader(self.bus, self._stream("sched", partition), SCHEDULERS, "fake")
            for entry in work.read(16):
                self._players.append(self._pool.submit(self._guarded, entry))

    def _tokenize(self, entry: Entry) -> None:
        reply = self.bus.do("HGETALL", self.keys.req(entry.uid))
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        if b"kind" not in fields or b"terminal" in fields:
            self._drop(entry, TOKENIZERS)
            return
        request = Request.from_fields(entry.uid, fields)
        self.seen.append(request)
        try:
            prompts, answer = self._render(request)
        except MillstreamError as error:
            end = OutEntry(
                "", end="error", error=kind_of(error), message=error.message, param=error.param or ""
            )
            self.bus.run(handoffs.tok_end(self.keys, request, entry.id, end, ttl_ms=60_000, worker="fake"))
            return
        if answer:
            end = OutEntry("", answer=answer, end="done")
            self.bus.run(handoffs.tok_end(self.keys, request, entry.id, end, ttl_ms=60_000, worker="fake"))
        else:
            self.bus.run(handoffs.tok_done(self.keys, request, entry.id, prompts, 60_000))

    def _render(self, request: Request) -> tuple[list[list[int]], str]:
        """One token per word; refuses what the script refuses."""
        payload = request.payload
        if request.kind == "detokenize":
            return [], json.dumps({"prompt": " ".join(map(str, payload["tokens"]))})
        if request.kind == "tokenize":
            words = str(payload.get("prompt", "")).split()
            return [], json.dumps(
                {"count": len(words), "max_model_len": 4096, "tokens": list(range(len(words)))}
            )
        self._plays[request.uid] = self.script(request)  # now: the payload is dropped at the hand-off
        if request.kind == "completion":
            prompts = [p if isinstance(p, list) else list(range(len(p.split()))) for p in payload["prompt"]]
        else:
            prompts = [[1] * sum(len(m["content"].split()) for m in payload["messages"])]
        if not all(prompts):
            raise InvalidRequestError("prompt must not be empty", param="prompt")
        return prompts, ""

    def _guarded(self, entry: Entry) -> None:
        try:
            self._play(entry)
        except BaseException as error:
            self.failure = error

    def _play(self, entry: Entry) -> None:
        key = {"model": self.model.id, "cls": INTERACTIVE}
        started = self.bus.run(starting.start(self.keys, entry.uid, entry.choice, worker="fake", **key))
        if started.code == "ENDED":
            self._drop(entry, SCHEDULERS)
            return
        request, play = started.request, self._plays[entry.uid]
        at, cancelled = 0, request is None
        for index, text in enumerate(play.texts):
            if request is None or cancelled:
                break
            play.before(request, index)
            cancelled = self._step(entry, index, text, at)
            at += len(text)
        self._end(entry, play, len(play.texts), at, cancelled=cancelled)

    def _step(self, entry: Entry, index: int, text: str, at: int) -> bool:
        """One token through EMIT and PUB; whether the request is to be cancelled."""
        record = format_record(TokRecord(entry.uid, entry.choice, index, 7))
        row = EmitRow(entry.uid, entry.choice, record, "7,", self._log_size(entry))
        flags = self._commit(entry, Step((row,)), [Text(entry.uid, entry.choice, index + 1, at, text)], [])
        return bool({entry.uid, f"{entry.uid}/{entry.choice}"} & flags)

    def _end(self, entry: Entry, play: Play, tokens: int, at: int, *, cancelled: bool) -> None:
        error = play.error
        if cancelled:
            self.cancelled.append(f"{entry.uid}/{entry.choice}")
            error = InvalidRequestError("cancelled")
        total = int(self.bus.do("HGET", self.keys.req(entry.uid), "choices") or 1)
        end = Finished(
            entry.uid,
            entry.choice,
            total,
            self.model.id,
            INTERACTIVE,
            n=tokens + play.silent_tokens,
            at=at,
            finish="" if error else play.finish,
            stop="" if error else play.stop,
            error=kind_of(error) if error else "",
            message=error.message if error else "",
        )
        record = format_record(TokRecord(entry.uid, entry.choice, tokens, None, "stop"))
        done = EmitEnd(entry.uid, entry.choice, self.model.id, INTERACTIVE, entry.id)
        row = EmitRow(entry.uid, entry.choice, record, "", self._log_size(entry))
        self._commit(entry, Step((row,), (done,)), [], [end])

    def _log_size(self, entry: Entry) -> int:
        return int(self.bus.do("STRLEN", self.keys.gen(entry.uid, entry.choice)))

    def _commit(
        self, entry: Entry, step: Step, texts: Sequence[Text], finished: Sequence[Finished]
    ) -> frozenset[str]:
        partition = partition_of(entry.uid)
        time.sleep(0.0005)  # locks are not fair: let another request's thread have its turn
        with self._lock:
            self._seq[partition] += 1
            emitted = self.bus.run(handoffs.emit(self.keys, partition, "fake", self._seq[partition], step))
            assert emitted.code == "OK", emitted
            tok = self.keys.tok(partition)
            newest = self.bus.do("XREVRANGE", tok, "+", "-", "COUNT", 1)[0][0].decode()
            info = self.bus.do("XINFO", "GROUPS", tok)[0]
            stored = dict(zip(info[::2], info[1::2], strict=True))[b"last-delivered-id"].decode()
            published = self.bus.run(
                handoffs.pub(
                    self.keys, partition, epoch=self._epoch[partition], expected=stored, offset=newest,
                    entries=1, ttl_ms=60_000, texts=texts, finished=finished, group=DETOKENIZERS,
                )
            )  # fmt: skip
            assert published.code == "OK", published
        return emitted.cancel

    def _drop(self, entry: Entry, group: str) -> None:
        self.bus.run(
            handoffs.drop(
                self.keys, entry.uid, entry.choice, stream=entry.stream, group=group, entry=entry.id,
                model=self.model.id, cls=INTERACTIVE,
            )
        )  # fmt: skip
