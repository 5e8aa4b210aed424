"""Workers reduced to their protocol: what they hold, and the hand-offs by which they get rid of it.

They generate and decode a text that is known beforehand, so that a test can tell any loss, gap or repeat.
Every step is taken by the test, in whatever order it likes; nothing here waits or retries by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.bus import handoffs, leases
from common.bus.handoffs import Emitted, Finished, Gate, Step, Text
from common.bus.keys import SCHEDULERS, TOKENIZERS
from common.bus.peers import claim_dead
from common.bus.scripts import Call
from common.bus.streams import Entry, GroupReader
from common.messages import OutEntry, Request, TokRecord, join_ids, parse_ids, parse_records
from tests.helpers.bus import Desk, Job
from tests.helpers.redis_state import contents

MAX_ATTEMPTS = 3
_LEASE_MS = 600_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a request that nobody disturbs: tokens of each choice, and where a stop string hits."""

    number: int
    lengths: tuple[int, ...]
    stops: tuple[int | None, ...]
    bad: bool = False

    def tokens(self, choice: int) -> list[int]:
        return [1000 + 100 * self.number + 20 * choice + index for index in range(self.lengths[choice])]

    def log(self, choice: int) -> str:
        return join_ids(self.tokens(choice))

    def text(self, choice: int, tokens: int | None = None) -> str:
        """The text of the first tokens; by default of all that the client is to see."""
        seen = self.covered(choice) if tokens is None else tokens
        return "".join(f"<{token}>" for token in self.tokens(choice)[:seen])

    def covered(self, choice: int) -> int:
        """Tokens up to the end, as the client counts them."""
        stop = self.stops[choice]
        return self.lengths[choice] if stop is None else min(stop, self.lengths[choice])

    def released(self, choice: int, tokens: int) -> str:
        """What a decoder has let go after ``tokens`` tokens: the last may become part of something longer."""
        return self.text(choice, tokens - tokens % 2)


@dataclass
class World:
    """What all actors know: the partition, and the plans by request id."""

    desk: Desk
    plans: dict[str, Plan] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)

    def open(self, worker: str) -> None:
        call = leases.renew(self.desk.keys, 0, worker, _LEASE_MS, opening=True)
        self.desk.bus.run(call)


class Consumer:
    """The part that tokenizers and schedulers share: a name in a group, and the entries in hand."""

    group = ""

    def __init__(self, world: World, name: str, stream: str) -> None:
        self.world = world
        self.desk = world.desk
        self.name = name
        self.reader: GroupReader = self.desk.reader(stream, self.group, name)
        self.held: dict[str, Entry] = {}
        world.open(name)

    def read(self, count: int, *, lost: bool = False) -> None:
        """Reads fresh entries; ``lost``: the reply never arrives."""
        entries = self.reader.read(count)
        if not lost:
            self._take(entries)

    def find_stranded(self) -> None:
        self._take(self.reader.stranded({entry.place for entry in self.held.values()}))

    def claim(self, dead: str, *, expired_ok: bool, lost: bool = False) -> bool:
        """One CLAIM_DEAD; whether the peer was dead."""
        call = claim_dead(
            self.desk.keys, 0, self.reader.stream, self.group, me=self.name, dead=dead, expired_ok=expired_ok
        )
        entries, was_dead = self.desk.bus.run(call)
        if not lost:
            self._take(entries)
        return was_dead

    def _take(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.id not in self.held:
                self.held[entry.id] = entry
                self.taken(entry)

    def taken(self, entry: Entry) -> None:
        """Something came into hand."""


class Tokenizer(Consumer):
    """Turns jobs into token ids, or into errors where the plan says so."""

    group = TOKENIZERS

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, world.desk.work_in)

    def finish(self, entry: Entry) -> Gate | None:
        """One job handed off, ended, or dropped."""
        fields = self.desk.req(entry.uid)
        plan, request = self.world.plans[entry.uid], self.world.requests[entry.uid]
        gate = None
        if not fields or "terminal" in fields:
            self.desk.drop(entry, TOKENIZERS)
        elif plan.bad:
            end = OutEntry("", end="error", error="context", message="Too long.")
            gate = self.desk.tok_end(request, entry, end)
        else:
            gate = self.desk.tok_done(request, entry)
        self.held.pop(entry.id, None)
        return gate


class Scheduler(Consumer):
    """Runs choices: one token of each a step, under one sequence number per step."""

    group = SCHEDULERS

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, world.desk.sched)
        self.jobs: dict[str, Job] = {}
        self.doomed: dict[str, str] = {}
        self.seq = 0
        self.sent: list[Call[Emitted]] = []
        self.flags: frozenset[str] = frozenset()

    def taken(self, entry: Entry) -> None:
        started = self.desk.start(entry, self.name)
        if started.code == "ENDED":
            self.held.pop(entry.id)
            self.desk.drop(entry)
            return
        plan = self.world.plans[entry.uid]
        tokens = list(started.output_ids)
        assert tokens == plan.tokens(entry.choice)[: len(tokens)], "a log with a gap or a repeat"
        assert started.code == "CANCELLED" or started.prompt_ids == (5, 6, 7)
        if 0 < started.attempts < MAX_ATTEMPTS:
            assert self.desk.start(entry, self.name, alone=True).attempts == started.attempts
        self.jobs[entry.id] = Job(entry, join_ids(tokens), len(tokens))
        if started.code == "CANCELLED":
            self.doomed[entry.id] = "cancelled"
        elif started.attempts >= MAX_ATTEMPTS:
            self.doomed[entry.id] = "crashed"

    def build(self, ids: Iterable[str]) -> Step:
        """The next row of each job; the last one ends its work."""
        rows, ends = [], []
        for entry_id in ids:
            job = self.jobs[entry_id]
            uid, choice = job.entry.uid, job.entry.choice
            tokens = self.world.plans[uid].tokens(choice)
            error = self.doomed.get(entry_id, "")
            if not error and {uid, f"{uid}/{choice}"} & self.flags:
                error = "cancelled"
            if error or job.tokens == len(tokens):
                rows.append(self.desk.row(job, None, "error", error or "internal"))
            else:
                last = job.tokens + 1 == len(tokens)
                rows.append(self.desk.row(job, tokens[job.tokens], "stop" if last else ""))
            if error or job.tokens == len(tokens):
                ends.append(self.desk.end(job, "3 crashes" if error == "crashed" else ""))
        return Step(tuple(rows), tuple(ends))

    def emit(self, ids: Iterable[str]) -> Emitted:
        return self.send(self.prepare(ids))

    def prepare(self, ids: Iterable[str]) -> Step:
        """The next step, under its number; `send` it until it is answered."""
        step = self.build(ids)
        self.seq += 1
        self.sent.append(self.desk.emit_call(step, self.seq, self.name))
        return step

    def send(self, step: Step) -> Emitted:
        """The last step, after whatever Redis has forgotten of those before it."""
        reply = self.desk.bus.run(self.sent[-1])
        while reply.code == "BEHIND":
            for call in self.sent[reply.stored : -1]:
                self.obey(self.desk.bus.run(call))
            reply = self.desk.bus.run(self.sent[-1])
        self.obey(reply)
        for end in step.ends:
            self.let_go(end.entry)
        return reply

    def tick(self) -> None:
        self.obey(self.desk.tick(self.name))

    def obey(self, reply: Emitted) -> None:
        self.flags = reply.cancel
        for uid, choice in reply.refused:
            for job in [j for j in self.jobs.values() if (j.entry.uid, j.entry.choice) == (uid, choice)]:
                self.let_go(job.entry.id)

    def let_go(self, entry_id: str) -> None:
        self.jobs.pop(entry_id, None)
        self.held.pop(entry_id, None)
        self.doomed.pop(entry_id, None)


class Detokenizer:
    """Owns the partition under an epoch, decodes from the committed offset, commits with PUB."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.desk = world.desk
        self.name = name
        self.epoch = 0
        self.forget()
        self.last: Call[handoffs.Published] | None = None
        world.open(name)

    def forget(self) -> None:
        self.offset = ""
        self.states: dict[tuple[str, int], int] = {}
        self.unwanted: set[tuple[str, int]] = set()

    def take(self) -> bool:
        call = leases.own_partition(self.desk.keys, 0, self.name, _LEASE_MS, take=True)
        held = self.desk.bus.run(call)
        if held.epoch and held.epoch != self.epoch:
            self.forget()
        self.epoch = held.epoch or self.epoch
        return bool(held.epoch)

    def prepare(self, count: int) -> Call[handoffs.Published] | None:
        """Reads and decodes up to ``count`` steps; the commit is not sent yet."""
        self.offset = self.offset or self.desk.stored()
        reply = self.desk.bus.do("XREAD", "COUNT", count, "STREAMS", self.desk.tok, self.offset)
        if not reply:
            return None
        texts: list[Text] = []
        finished: list[Finished] = []
        for _, fields in reply[0][1]:
            for record in parse_records(fields[3].decode()):
                made = self.decode(record)
                if isinstance(made, Text):
                    texts.append(made)
                elif made is not None:
                    finished.append(made)
        offset = reply[0][1][-1][0].decode()
        return self.desk.pub_call(texts, finished, epoch=self.epoch, expected=self.offset, offset=offset)

    def commit(self, call: Call[handoffs.Published], *, lost: bool = False) -> handoffs.Published:
        self.last = call
        reply = self.desk.bus.run(call)
        if lost or reply.code != "OK":
            self.forget()
        else:
            self.offset = reply.offset
        return reply

    def decode(self, record: TokRecord) -> Text | Finished | None:
        uid, choice = key = record.uid, record.choice
        if key in self.unwanted:
            return None
        if self.states.get(key) != record.index and not self._load(record):
            self.unwanted.add(key)
            return None
        plan = self.world.plans[uid]
        choices = len(plan.lengths)
        if record.error:
            self.unwanted.add(key)
            return self.desk.finished(uid, choice, choices, error=record.error, message=record.message)
        before = plan.released(choice, record.index)
        self.states[key] = n = record.index + 1
        assert record.token == plan.tokens(choice)[record.index]
        if n == plan.covered(choice):
            self.unwanted.add(key)
            rest = plan.text(choice)[len(before) :]
            end = {"n": n, "at": len(before), "text": rest, "finish": "stop"}
            return self.desk.finished(uid, choice, choices, halt=not record.end, **end)
        fresh = plan.released(choice, n)[len(before) :]
        return Text(uid, choice, n, len(before), fresh) if fresh else None

    def _load(self, record: TokRecord) -> bool:
        """Whether the choice is wanted; its state is what the log before the record makes."""
        fields = self.desk.req(record.uid)
        if not fields or "terminal" in fields or f"finish:{record.choice}" in fields:
            return False
        log = parse_ids((self.desk.gen(record.uid, record.choice) or "").encode())
        assert len(log) >= record.index, "a record without its token in the log"
        self.states[record.uid, record.choice] = record.index
        return True


def check_ended(world: World, may_fail: Mapping[str, set[str]]) -> None:
    """Every request has ended, once, whole or with an error it may have; and nothing is left of it."""
    desk = world.desk
    for uid, plan in world.plans.items():
        out = desk.out(uid)
        [end] = [entry for entry in out if entry.end]
        assert end.usage is not None
        assert desk.req(uid)["terminal"] == end.end
        if end.end == "done":
            choices = range(len(plan.lengths))
            assert [published(out, choice) for choice in choices] == list(map(plan.text, choices))
            assert end.usage.completion_tokens == sum(map(plan.covered, choices))
            assert [entry.finish for entry in out].count("stop") == len(plan.lengths)
        elif end.error == "crashed":
            letters = desk.bus.do("XRANGE", desk.keys.dead(0), "-", "+")
            assert uid.encode() in [fields[1] for _, fields in letters]
        else:
            assert end.error in may_fail.get(uid, set()), end
    desk.assert_empty()
    assert desk.bus.do("XLEN", desk.tok) == 0
    for key, (_, ttl) in contents(desk.bus).items():
        assert ttl or not any(kind in key for kind in (b":req:", b":out:", b":gen:"))


def published(out: Iterable[OutEntry], choice: int) -> str:
    """The text of a choice in a reply; fails on a gap or a repeat."""
    text = ""
    for entry in out:
        if entry.choice == choice:
            assert entry.at == len(text) or not entry.text, "a gap, or a repeat"
            text += entry.text
    return text
