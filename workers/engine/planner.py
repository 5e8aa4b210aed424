"""Decides, step by step, which request computes which tokens in which row: one token budget, no phases.

Pure: it reads counters and hands out numbers. It knows no tensors, no I/O, no outputs, and no wall clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import merge

from workers.engine.admission import Admission
from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.ownership import Ownership
from workers.engine.plan import PENDING, Row, RowStart, StepPlan, Targets
from workers.engine.request import Event, Request, State


@dataclass(frozen=True, slots=True)
class Decision:
    """A step to launch, and the requests behind its rows, in their order."""

    plan: StepPlan
    requests: tuple[Request, ...]


class Batch:
    """A step being put together."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.starts: list[RowStart] = []
        #: Digests of the blocks that rows of this step will add to the cache next.
        self.leaders: set[bytes] = set()
        self._decode: list[tuple[Row, Request]] = []
        self._prefill: list[tuple[Row, Request]] = []

    def start(self, request: Request) -> None:
        """``request`` just took its row."""
        source, outputs = request.source, request.tokens[request.prompt_len :]
        self.starts.append(RowStart(request.row, source.prompt_ids, outputs, source.params, source.seed))

    def add(self, request: Request) -> None:
        """Compute as much of ``request`` as the budget allows."""
        count, start = min(request.remaining, self.budget), request.computed
        sample = count == request.remaining and request.ending.limit > 0
        known, params = start < len(request.tokens), request.source.params
        tokens = request.tokens[start : start + count] if known else (PENDING,)
        early = sample and request.generated + request.pending < params.min_tokens
        row = Row(
            request.row,
            tokens,
            start,
            request.blocks,
            sample,
            request.masked if early else (),
            params.logprobs if sample else None,
            self._targets(request, start + count) if request.unscored else None,
        )
        (self._decode if sample and count == 1 else self._prefill).append((row, request))
        request.launch(self.step, count, sample=sample)
        self.budget -= count

    @staticmethod
    def _targets(request: Request, computed: int) -> Targets | None:
        scored = request.score(computed)
        tokens = request.tokens[scored.start : scored.stop]
        return Targets(scored.start, tokens, request.source.params.prompt_logprobs or 0) if scored else None

    def decision(self) -> Decision | None:
        """The finished plan; None if there is nothing to compute."""
        rows = self._decode + self._prefill
        if not rows:
            return None
        plan = StepPlan(self.step, tuple(self.starts), tuple(row for row, _ in rows), len(self._decode))
        return Decision(plan, tuple(request for _, request in rows))


class Planner:
    """The queue, the rows in use, and the rules between them."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.pool = pool
        self.ownership = Ownership(pool, config.max_num_seqs)
        self.admission = Admission(config.block_size, config.new_token_ratio)
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        #: Sorted by `Request.order`. The other two go by arrival.
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.paused: dict[int, Request] = {}
        self._config = config

    # What happens to requests.

    def enqueue(self, request: Request) -> None:
        """A new request came."""
        if not self.running and not self.waiting:
            self.admission.reset()
        self.admission.met(request)
        insort(self.waiting, request, key=_order)

    def pause(self, request: Request) -> None:
        """Leave ``request`` out of the steps. It keeps row and blocks until someone else needs them."""
        if request.state is State.RUNNING:
            self.paused[request.arrival] = self.running.pop(request.arrival)
            request.fire(Event.PAUSE)
        elif request.state is State.WAITING:
            self._leave_queue(request)
            request.fire(Event.PAUSE)

    def resume(self, request: Request) -> None:
        """Undo `pause`; without its row the request queues again, at the place of its arrival."""
        if request.state is State.PAUSED:
            self.running[request.arrival] = self.paused.pop(request.arrival)
            request.fire(Event.RESUME)
        elif request.state is State.PARKED:
            insort(self.waiting, request, key=_order)
            request.fire(Event.RESUME)

    def end(self, request: Request) -> None:
        """``request`` finished, failed or was cancelled."""
        if request.state is State.WAITING:
            self._leave_queue(request)
        self.running.pop(request.arrival, None)
        self.paused.pop(request.arrival, None)
        request.fire(Event.END)
        self.ownership.release(request)

    def _retract(self, request: Request) -> None:
        """Take row and blocks from ``request``; it keeps its tokens and recomputes when it comes back."""
        assert not request.in_flight, "a step in flight would bring a token to a request that left"
        self.preemptions += 1
        self.running.pop(request.arrival, None)
        self.paused.pop(request.arrival, None)
        request.fire(Event.RETRACT)
        self.ownership.release(request)
        if request.state is State.WAITING:
            insort(self.waiting, request, key=_order)

    def _leave_queue(self, request: Request) -> None:
        del self.waiting[bisect_left(self.waiting, request.order, key=_order)]

    # The next step.

    def plan(self, step: int, *, busy: bool) -> Decision | None:
        """Plan step number ``step``; ``busy`` says that the step before is not committed yet.

        Class by class: decode rows first, so that no prompt delays the tokens of others by more than one
        budget; then prompts in the order of the queue, whether they are half computed or new; several may
        share a step. What the more urgent classes leave of the budget is for the others.
        """
        decoding = [
            request for request in self.running.values() if request.remaining == 1 and request.left > 0
        ]
        if busy and (self._blocks_short(decoding) > 0 or self._must_yield()):
            # A bubble is cheaper than taking the blocks of a request whose token is on its way;
            # besides, requests that end with the step in flight may make room by themselves.
            return None
        retracted = 0
        while self._blocks_short(decoding) > 0:
            self._retract(self._victim())
            retracted += 1
        if retracted:
            self.admission.retracted(self.running.values())
        elif decoding:
            self.admission.decay()
        batch = Batch(step, self._config.max_num_batched_tokens)
        # What was just retracted would come straight back: new ones wait for a step without trouble.
        admitting = not retracted
        for priority in sorted({r.source.priority for r in (*self.running.values(), *self.waiting)}):
            before = self.preemptions
            self._add_decoding(batch, decoding, priority)
            self._add_prompts(batch, priority, admitting=admitting)
            admitting = admitting and self.preemptions == before
        return batch.decision()

    def _add_decoding(self, batch: Batch, decoding: Iterable[Request], priority: int) -> None:
        for request in decoding:
            # One of a less urgent class may have given way, or be left out: it keeps what it has.
            if request.source.priority != priority or request.state is not State.RUNNING or not batch.budget:
                continue
            if request.computed == len(request.blocks) * self.pool.block_size:
                if not self.pool.num_free:
                    continue  # a more urgent prompt took the last block
                self.ownership.grow(request)
            batch.add(request)
            if self.waiting:
                batch.leaders.update(self._next_digest(request))

    def _blocks_short(self, decoding: Iterable[Request]) -> int:
        full = (
            request.state is State.RUNNING and request.computed == len(request.blocks) * self.pool.block_size
            for request in decoding
        )
        return sum(full) - self.pool.num_free

    def _victim(self) -> Request:
        """Who gives way: paused ones first, then the least important, the least far, the last to come.

        Never the only one left. The one that is furthest is thus never touched, so some request always
        gets to its end, however tight the cache.
        """
        candidates = self.paused or self.running
        # One alone could only lack a block if it had them all, and then it has been ended (`NativeEngine`).
        assert self.paused or len(self.running) > 1, "a request outgrew the KV cache"
        return max(candidates.values(), key=_readiness_to_give_way)

    def _add_prompts(self, batch: Batch, priority: int, *, admitting: bool) -> None:
        running = [r for r in self.running.values() if r.source.priority == priority]
        prefilling = sorted((request for request in running if request.remaining > 1), key=_order)
        waiting = tuple(request for request in self.waiting if request.source.priority == priority)
        admitting = admitting and bool(waiting)
        reserved = self._reserved(priority) if admitting else 0
        for request in merge(prefilling, waiting, key=_order):
            if not batch.budget:
                break
            if request.row < 0:
                if not admitting:
                    continue
                hits = self._hits(request)
                if len(hits) < request.max_hits and request.digest(len(hits)) in batch.leaders:
                    continue  # another row computes that very block in this step: hit it in the next
                found = self._room_for(request, hits, reserved)
                if found is None:
                    admitting = False  # whoever is behind waits too, else small ones would starve it
                    continue
                self._admit(request, found)
                batch.start(request)
                reserved += self.admission.growth(request)
            batch.add(request)
            batch.leaders.update(self._next_digest(request))

    def _next_digest(self, request: Request) -> tuple[bytes, ...]:
        """Digest of the block that a prompt in this step will add to the cache next, if any."""
        index, size = request.committed // self.pool.block_size, self.pool.block_size
        if not self._config.enable_prefix_caching or request.committed >= len(request.tokens) - 1:
            return ()
        return (request.digest(index),) if (index + 1) * size <= len(request.tokens) else ()

    def _hits(self, request: Request) -> list[int]:
        if not self._config.enable_prefix_caching:
            return []
        return self.pool.match(request.digests(), request.tokens)

    def _room_for(self, request: Request, hits: list[int], reserved: int) -> list[int] | None:
        """The prefix hits to start ``request`` with, or None while there is no room for it.

        Others give way if that makes the room: first the paused, since nobody waits for a reader who does not
        read; then the less urgent.
        """
        yielding = self._yielding_to(request)
        if not self._would_fit(request, hits, reserved, yielding):
            return None
        while not self._would_fit(request, hits, reserved, ()):
            if not yielding:
                return None  # the blocks in the way were shared ones
            self._retract(yielding.pop())
            hits = self._hits(request)
        return hits

    def _reserved(self, priority: int) -> int:
        """Blocks that those from whom ``priority`` cannot take are expected to ask for."""
        return self.admission.reserved(r for r in self.running.values() if r.source.priority <= priority)

    def _yielding_to(self, request: Request, *, in_flight: bool = False) -> list[Request]:
        """Who would give way to ``request``, the first to do so last; ``in_flight``: after this step."""
        less = (r for r in self.running.values() if r.source.priority > request.source.priority)
        ordered = [
            *sorted(less, key=_readiness_to_give_way),
            *sorted(self.paused.values(), key=_readiness_to_give_way),
        ]
        return [other for other in ordered if in_flight or not other.in_flight]

    def _would_fit(
        self, request: Request, hits: list[int], reserved: int, without: Collection[Request]
    ) -> bool:
        """Whether there are a row and blocks to start ``request``, once those of ``without`` are free."""
        if not (self.ownership.num_free_rows or without):
            return False
        wanted = self.pool.blocks_for(request.total) - len(hits) + self.pool.num_idle(hits)
        if any(r.source.priority <= request.source.priority for r in self.running.values()):
            # With the prospect of getting it to its end. Alone, or beside those that give way, it may try:
            # there is nobody to retract it for, and `Engine.add` saw that its tokens fit.
            wanted += self.admission.growth(request) + reserved
        return wanted <= self.pool.num_free + sum(len(other.blocks) for other in without)

    def _must_yield(self) -> bool:
        """Whether the first in the queue could start, if the step in flight did not hold what it needs."""
        head = self.waiting[0] if self.waiting else None
        if head is None or not any(r.source.priority > head.source.priority for r in self.running.values()):
            return False
        ahead = sum(r.remaining for r in self.running.values() if r.order < head.order)
        if ahead >= self._config.max_num_batched_tokens:
            return False  # its turn has not come
        hits, reserved = self._hits(head), self._reserved(head.source.priority)
        now, then = self._yielding_to(head), self._yielding_to(head, in_flight=True)
        return not self._would_fit(head, hits, reserved, now) and self._would_fit(head, hits, reserved, then)

    def _admit(self, request: Request, hits: list[int]) -> None:
        self.ownership.take(request, hits)
        self._leave_queue(request)
        self.running[request.arrival] = request
        request.fire(Event.ADMIT)
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.computed, request.prompt_len)
            self.prefix_queries += request.prompt_len
            self.prefix_hits += request.cached_tokens

    # What others may know.

    def room(self, priority: int) -> int:
        """How many more requests of ``priority`` would start soon. Who gives way to them does not count."""
        running = [r for r in self.running.values() if r.source.priority <= priority]
        waiting = [r for r in self.waiting if r.source.priority <= priority]
        rows = self._config.max_num_seqs - len(running) - len(waiting)
        if rows <= 0:
            return 0
        if not running and not waiting:
            return max(1, min(rows, self.admission.newcomers(self.pool.num_blocks)))
        yielding = [r for r in self.running.values() if r.source.priority > priority]
        spare = self.pool.num_free + sum(len(r.blocks) for r in (*yielding, *self.paused.values()))
        spare -= self.admission.reserved(running)
        spare -= sum(self.admission.need(request) for request in waiting)
        return min(rows, self.admission.newcomers(spare))

    def check(self) -> None:
        """Prove who is where and who owns what."""
        assert self.waiting == sorted(self.waiting, key=_order)
        for requests, state in (
            (self.waiting, State.WAITING),
            (self.running.values(), State.RUNNING),
            (self.paused.values(), State.PAUSED),
        ):
            for request in requests:
                assert request.state is state
                request.check()
        self.ownership.check([*self.running.values(), *self.paused.values()])


def _order(request: Request) -> tuple[int, int, int]:
    return request.order


def _readiness_to_give_way(request: Request) -> tuple[int, int, int]:
    return request.source.priority, -request.generated, request.arrival
