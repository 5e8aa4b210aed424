"""Decides, step by step, which request computes which tokens in which row: one token budget, no phases.

Pure: it reads counters and hands out numbers. It knows no tensors, no I/O, no outputs, and no wall clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import merge

from workers.engine.admission import Admission
from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.ownership import Ownership
from workers.engine.plan import PENDING, Row, RowStart, StepPlan
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
        self._decode: list[tuple[Row, Request]] = []
        self._prefill: list[tuple[Row, Request]] = []

    def start(self, request: Request) -> None:
        """``request`` just took its row."""
        source, outputs = request.source, request.tokens[request.prompt_len :]
        self.starts.append(RowStart(request.row, source.prompt_ids, outputs, source.params, source.seed))

    def add(self, request: Request) -> None:
        """Compute as much of ``request`` as the budget allows."""
        count, start = min(request.remaining, self.budget), request.computed
        sample = count == request.remaining
        known = start < len(request.tokens)
        tokens = request.tokens[start : start + count] if known else (PENDING,)
        early = sample and request.generated + request.pending < request.source.params.min_tokens
        row = Row(request.row, tokens, start, request.blocks, sample, request.masked if early else ())
        (self._decode if sample and count == 1 else self._prefill).append((row, request))
        request.launch(self.step, count, sample=sample)
        self.budget -= count

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

        Decode rows come first and always run, so that no prompt delays the tokens of others by more than
        one budget. The rest of the budget goes to prompts in the order of the queue, whether they are
        half computed or new; several may share it.
        """
        decoding = [
            request for request in self.running.values() if request.remaining == 1 and request.left > 0
        ]
        retracted = 0
        while self._blocks_short(decoding) > 0:
            if busy:
                # A bubble is cheaper than taking the blocks of a request whose token is on its way;
                # besides, requests that end with the step in flight may make room by themselves.
                return None
            victim = self._victim()
            self._retract(victim)
            retracted += 1
        if retracted:
            self.admission.retracted(self.running.values())
        elif decoding:
            self.admission.decay()
        batch = Batch(step, self._config.max_num_batched_tokens)
        for request in decoding:
            if request.state is State.RUNNING:
                if request.computed == len(request.blocks) * self.pool.block_size:
                    self.ownership.grow(request)
                batch.add(request)
        # What was just retracted would come straight back: new ones wait for a step without trouble.
        self._add_prompts(batch, decoding, admitting=not retracted)
        return batch.decision()

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

    def _add_prompts(self, batch: Batch, decoding: list[Request], *, admitting: bool) -> None:
        prefilling = sorted((r for r in self.running.values() if r.remaining > 1), key=_order)
        admitting = admitting and bool(self.waiting)
        leaders: set[bytes] = set()
        reserved = 0
        if admitting:
            leaders.update(digest for request in decoding for digest in self._next_digest(request))
            reserved = self.admission.reserved(self.running.values())
        for request in merge(prefilling, tuple(self.waiting), key=_order):
            if not batch.budget:
                break
            if request.row < 0:
                if not admitting:
                    continue
                hits = self._hits(request)
                if leaders and len(hits) < request.max_hits and request.digest(len(hits)) in leaders:
                    continue  # another prompt computes that very block in this step: hit it in the next
                found = self._room_for(request, hits, reserved)
                if found is None:
                    admitting = False  # whoever is behind waits too, else small ones would starve it
                    continue
                self._admit(request, found)
                batch.start(request)
                reserved += self.admission.growth(request)
            batch.add(request)
            leaders.update(self._next_digest(request))

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

        Paused requests give way if that makes the room: nobody waits for a reader who does not read.
        """
        idle = [other for other in self.paused.values() if not other.in_flight]
        in_the_way = sum(len(other.blocks) for other in idle)
        if not (self.ownership.num_free_rows or idle):
            return None
        if self._blocks_wanted(request, hits, reserved) > self.pool.num_free + in_the_way:
            return None
        idle.sort(key=_readiness_to_give_way)
        while self._blocks_wanted(request, hits, reserved) > self.pool.num_free or (
            not self.ownership.num_free_rows
        ):
            if not idle:
                return None  # the blocks in the way were shared ones
            self._retract(idle.pop())
            hits = self._hits(request)
        return hits

    def _blocks_wanted(self, request: Request, hits: list[int], reserved: int) -> int:
        """Free blocks it takes to start ``request`` with the prospect of getting it to its end."""
        wanted = self.pool.blocks_for(request.total) - len(hits) + self.pool.num_idle(hits)
        # Alone it may try: there is nobody to retract it for, and `Engine.add` saw that its tokens fit.
        return wanted + self.admission.growth(request) + reserved if self.running else wanted

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

    def room(self) -> int:
        """How many more requests would start soon. Paused ones do not count: they give way."""
        held = len(self.running) + len(self.waiting)
        rows = self._config.max_num_seqs - held
        if rows <= 0:
            return 0
        if not held:
            return max(1, min(rows, self.admission.newcomers(self.pool.num_blocks)))
        spare = self.pool.num_free + sum(len(request.blocks) for request in self.paused.values())
        spare -= self.admission.reserved(self.running.values())
        spare -= sum(self.admission.need(request) for request in self.waiting)
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


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _readiness_to_give_way(request: Request) -> tuple[int, int, int]:
    return request.source.priority, -request.generated, request.arrival
