"""The engine: requests in, tokens out, over any runner. One loop for every overlap depth.

It knows no torch and no I/O. What happens to a request happens here and in order; which rows run is the
planner's business, and what comes out of the numbers is the runner's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count

from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.plan import Runner
from workers.engine.planner import Decision, Planner
from workers.engine.request import Ending, Request, State, defect, needs_token
from workers.engine.types import EngineRequest, EngineStats, Finish, Output, PromptLogprobs, TokenLogprobs


class NativeEngine:
    """`Engine` over a `Runner`.

    Step k is planned and launched before step k - overlap is collected and committed. Plans may therefore
    rest on tokens nobody has seen yet, but nothing is registered, sent or given back before the commit of
    the step it came from. A request that turns out to have ended in step k may be in step k + 1 already;
    that row's result is dropped, and its row and blocks stay untouched until k + 1 is committed.

    ``model_id`` names the weights and the cache's number format: it is the namespace of the prefix cache.
    After `step` has raised, the engine is broken and must not be used again.
    """

    def __init__(
        self, runner: Runner, *, config: EngineConfig, eos_ids: Sequence[int], model_id: str
    ) -> None:
        if runner.block_size != config.block_size:
            raise ValueError(f"the runner's blocks hold {runner.block_size} tokens, not {config.block_size}")
        self._runner = runner
        self._config = config
        self._eos_ids = tuple(eos_ids)
        self._pool = BlockPool(
            runner.num_blocks,
            runner.block_size,
            namespace=model_id,
            verify=config.verify_hits,
        )
        self._total_tokens = runner.num_blocks * runner.block_size
        self._capacity = f"the KV cache of {self._total_tokens} tokens"
        self._planner = Planner(config, self._pool)
        self._requests: dict[str, Request] = {}
        self._arrivals = count()
        self._next_step = 1
        self._launched: deque[tuple[Decision, object]] = deque()
        self._outputs: list[Output] = []

    def add(self, request: EngineRequest) -> None:
        """See `Engine.add`. A key may be used again once its request has ended."""
        if request.key in self._requests:
            raise ValueError(f"request {request.key} is already here")
        index = len(request.output_ids)
        if error := self._defect(request):
            self._outputs.append(Output(request.key, index, None, Finish.ERROR, error))
            return
        ending = Ending.of(request, max_model_len=self._config.max_model_len, eos_ids=self._eos_ids)
        if finish := ending.reached_by(request):
            self._outputs.append(Output(request.key, index, None, finish))
            return
        added = Request(
            source=request,
            ending=ending,
            arrival=next(self._arrivals),
            masked=self._masked(request),
            root=self._pool.root(request.salt),
            block_size=self._config.block_size,
        )
        self._requests[request.key] = added
        self._planner.enqueue(added)

    def cancel(self, key: str) -> None:
        """See `Engine.cancel`. What a step in flight still brings for it is dropped."""
        if request := self._requests.get(key):
            self._end(request, Finish.CANCELLED)

    def pause(self, key: str) -> None:
        """See `Engine.pause`. A step in flight still brings its token."""
        if request := self._requests.get(key):
            self._planner.pause(request)

    def resume(self, key: str) -> None:
        """See `Engine.resume`."""
        if request := self._requests.get(key):
            self._planner.resume(request)

    def step(self) -> list[Output]:
        """See `Engine.step`."""
        decision = self._planner.plan(self._next_step, busy=bool(self._launched))
        if decision:
            self._next_step += 1
            self._launched.append((decision, self._runner.launch(decision.plan)))
        if len(self._launched) > (self._config.overlap if decision else 0):
            self._commit(*self._launched.popleft())
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_work(self) -> bool:
        """See `Engine.has_work`."""
        return bool(self._outputs or self._launched or self._planner.running or self._planner.waiting)

    def room(self, priority: int = 0) -> int:
        """See `Engine.room`."""
        return self._planner.room(priority)

    def stats(self) -> EngineStats:
        """See `EngineStats`."""
        planner = self._planner
        running, waiting = len(planner.running), len(planner.waiting)
        return EngineStats(
            running=running,
            waiting=waiting,
            kv_blocks_total=self._pool.num_blocks,
            kv_blocks_used=planner.ownership.num_used_blocks,
            prefix_queries=planner.prefix_queries,
            prefix_hits=planner.prefix_hits,
            preemptions=planner.preemptions,
            paused=len(self._requests) - running - waiting,
            rows=self._config.max_num_seqs,
        )

    def check(self) -> None:
        """See `Engine.check`."""
        self._planner.check()
        planner = self._planner
        placed = {*planner.waiting, *planner.running.values(), *planner.paused.values()}
        for key, request in self._requests.items():
            assert request.source.key == key
            assert request in placed or request.state is State.PARKED
            request.check()
        assert len(placed) == sum(r.state is not State.PARKED for r in self._requests.values())
        if not self._launched:
            assert not any(request.in_flight or request.pending for request in self._requests.values())

    def _defect(self, request: EngineRequest) -> str:
        config = self._config
        if error := defect(request, max_model_len=config.max_model_len, vocab_size=self._runner.vocab_size):
            return error
        needed = len(request.prompt_ids) + len(request.output_ids) + needs_token(request)
        return f"{needed} tokens do not fit {self._capacity}" if needed > self._total_tokens else ""

    def _masked(self, request: EngineRequest) -> tuple[int, ...]:
        if not request.params.min_tokens:
            return ()
        ids = {*self._eos_ids, *request.params.stop_token_ids}
        return tuple(sorted(token for token in ids if 0 <= token < self._runner.vocab_size))

    def _commit(self, decision: Decision, launched: object) -> None:
        plan, result = decision.plan, self._runner.collect(launched)
        assert result.step == plan.step, "steps are collected in the order of their launch"
        for place, (row, request) in enumerate(zip(plan.rows, decision.requests, strict=True)):
            if request.state is State.ENDED:
                continue  # cancelled meanwhile, or ended by the step before this one
            if place in result.errors:
                self._end(request, Finish.ERROR, error=result.errors[place])
                continue
            token = result.tokens[place]
            assert (token is not None) == row.sample, "a token comes from a row that samples"
            if row.targets is not None:
                self._score(request, PromptLogprobs(row.targets.start, result.prompts[place]))
            request.land(len(row.tokens), token)
            self._register(request)
            if token is not None:
                self._emit(request, token, result.logprobs.get(place))
            elif request.only_scored:
                self._end(request, Finish.LENGTH)
        self._planner.ownership.settle(plan.step)

    def _register(self, request: Request) -> None:
        """Offer the blocks that are full and computed now; earlier, a hit could read what is not there."""
        size = self._config.block_size
        while self._config.enable_prefix_caching and (request.registered + 1) * size <= request.committed:
            index = request.registered
            tokens = request.tokens[index * size : (index + 1) * size]
            self._pool.register(request.blocks[index], request.digest(index), tokens)
            request.registered += 1

    def _score(self, request: Request, prompt: PromptLogprobs) -> None:
        self._outputs.append(self._output(request, None, prompt=prompt))

    def _emit(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        finish = request.ending.after(request.generated, token)
        if finish:
            self._end(request, finish, token=token, logprobs=logprobs)
            return
        self._outputs.append(self._output(request, token, logprobs=logprobs))
        if len(request.tokens) > self._total_tokens:
            # Not even alone could it go on; and no other has to give way before that is said.
            self._end(request, Finish.ERROR, error=f"the request has outgrown {self._capacity}")

    def _end(
        self,
        request: Request,
        finish: Finish,
        *,
        token: int | None = None,
        error: str = "",
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        self._outputs.append(self._output(request, token, finish, error=error, logprobs=logprobs))
        self._planner.end(request)
        del self._requests[request.source.key]

    @staticmethod
    def _output(
        request: Request,
        token: int | None,
        finish: Finish | None = None,
        *,
        error: str = "",
        logprobs: TokenLogprobs | None = None,
        prompt: PromptLogprobs | None = None,
    ) -> Output:
        index = request.generated - (token is not None)
        cached = 0 if request.announced else max(request.cached_tokens, 0)
        request.announced = True
        return Output(request.source.key, index, token, finish, error, cached, logprobs, prompt)
