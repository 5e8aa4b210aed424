"""Whatever is added, cancelled, paused and resumed, and however tight the cache: every request gets exactly
the tokens and logprobs it would get alone, at overlap depth 0 and 1, and everything it held comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from common.sampling import SamplingParams
from tests.helpers.fake_runner import VOCAB, FakeRunner, RowStart, reference, scores
from workers.engine.config import EngineConfig
from workers.engine.core import NativeEngine
from workers.engine.types import EngineRequest, Finish, Output, TokenLogprobs

EOS = (7, 11)
MAX_MODEL_LEN = 40
#: Prompts are cut from few texts, so that they share prefixes and whole prompts.
TEXTS = [[(seed * 31 + i * i) % VOCAB for i in range(MAX_MODEL_LEN)] for seed in (1, 2)]

prompts = st.tuples(st.sampled_from(TEXTS), st.integers(1, MAX_MODEL_LEN - 1)).map(lambda t: t[0][: t[1]])
params = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([None, 0, 1, 2, 5, 17]),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (3, 4)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, 0, 2]),
)


def fault(start: RowStart, position: int) -> str:
    """Requests of one seed fail at their third token."""
    return "not finite" if start.seed == 6 and position == len(start.prompt_ids) + 2 else ""


@dataclass
class Expected:
    """What a request must bring, worked out without an engine."""

    request: EngineRequest
    tokens: list[int]
    finish: Finish
    at_once: bool = False  #: over before it began: a cancel comes too late
    prompt: Sequence[TokenLogprobs] = ()
    logprobs: Sequence[TokenLogprobs | None] = field(init=False)

    def __post_init__(self) -> None:
        top, prompt = self.request.params.logprobs, self.request.prompt_ids
        self.logprobs = [None] * len(self.tokens) if top is None else scores(prompt, top, self.tokens)

    @classmethod
    def of(cls, request: EngineRequest, capacity: int) -> Expected:
        expected = cls._generation(request, capacity)
        top, refused = request.params.prompt_logprobs, expected.at_once and expected.finish is Finish.ERROR
        if top is not None and not request.output_ids and not refused:
            expected.prompt = scores(request.prompt_ids, top)
            expected.at_once = expected.at_once and not expected.prompt
        return expected

    @classmethod
    def _generation(cls, request: EngineRequest, capacity: int) -> Expected:
        params, prompt, given = request.params, list(request.prompt_ids), list(request.output_ids)
        scoring = params.max_tokens == 0
        if len(prompt) - scoring >= MAX_MODEL_LEN or len(prompt) + len(given) - scoring >= capacity:
            return cls(request, given, Finish.ERROR, at_once=True)
        if scoring:
            return cls(request, [], Finish.LENGTH, at_once=True)
        limit = min(MAX_MODEL_LEN - len(prompt), params.max_tokens or MAX_MODEL_LEN)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
        masked = (*EOS, *params.stop_token_ids)
        tokens = reference(prompt, request.seed, limit, min_tokens=params.min_tokens, masked=masked)
        assert tokens[: len(given)] == given
        for count in range(len(given), limit):
            if count and tokens[count - 1] in ends:
                return cls(request, tokens[:count], Finish.STOP, at_once=count == len(given))
            failing = request.seed == 6 and count == 2
            if failing or len(prompt) + count > capacity:
                return cls(request, tokens[:count], Finish.ERROR)
        finish = Finish.STOP if tokens[-1] in ends else Finish.LENGTH
        return cls(request, tokens, finish, at_once=len(given) == limit)


@dataclass
class Seen:
    """What came out for a request so far."""

    expected: Expected
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cancelled: bool = False
    #: How many of the prompt's logprobs.
    scored: int = 0

    def take(self, output: Output) -> None:
        assert self.finish is None, "an output after the end"
        if output.prompt is not None:
            self.take_prompt(output)
            return
        if output.token is not None:
            assert output.logprobs == self.expected.logprobs[len(self.tokens)]
            assert output.index == len(self.tokens)
            self.tokens.append(output.token)
            assert not self.cancelled, "a token after the cancel"
        assert output.index == len(self.tokens) - (output.token is not None)
        assert self.tokens == self.expected.tokens[: len(self.tokens)]
        self.finish = output.finish
        if self.cancelled:
            assert output.finish is Finish.CANCELLED
        elif output.finish:
            assert (output.finish, self.tokens) == (self.expected.finish, self.expected.tokens)
            assert self.scored == len(self.expected.prompt)

    def take_prompt(self, output: Output) -> None:
        """Stretches follow each other without gap or repeat, and come before everything else."""
        assert output.prompt is not None
        assert (output.index, output.token, output.finish) == (0, None, None)
        assert not self.tokens, "prompt logprobs after a token"
        assert not self.cancelled, "prompt logprobs after the cancel"
        assert output.prompt.tokens, "an empty stretch"
        assert output.prompt.start == self.scored + 1
        self.scored += len(output.prompt.tokens)
        assert list(output.prompt.tokens) == self.expected.prompt[output.prompt.start - 1 : self.scored]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 4, 16]),
        tightness=st.integers(0, 30),
        rows=st.integers(1, 5),
        spare_budget=st.integers(0, 12),
        overlap=st.integers(0, 1),
        caching=st.sampled_from([True, True, False]),
        ratio=st.sampled_from([0.05, 0.7]),
    )
    def build(self, block_size, tightness, rows, spare_budget, overlap, caching, ratio):
        num_blocks = -(-(8 + 3 * tightness) // block_size)
        config = EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + spare_budget,
            block_size=block_size,
            enable_prefix_caching=caching,
            overlap=overlap,
            new_token_ratio=ratio,
            verify_hits=True,
        )
        runner = FakeRunner(
            num_blocks, block_size, overlap=overlap, budget=config.max_num_batched_tokens, fault=fault
        )
        self.engine = NativeEngine(runner, config=config, eos_ids=EOS, model_id="fake")
        self.capacity = num_blocks * block_size
        self.rows = rows
        self.live: dict[str, Seen] = {}
        self.ended: list[Seen] = []
        self.paused: set[str] = set()
        self.count = 0

    @rule(
        prompt=prompts,
        params=params,
        seed=st.integers(0, 6),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "a"]),
        rank=st.sampled_from([0, 0, -1, 2]),
        copies=st.sampled_from([1, 1, 1, 3]),
    )
    def add(self, prompt, params, seed, priority, salt, rank, copies):
        for copy in range(copies):
            key = f"r{self.count}"
            self.count += 1
            self._add(EngineRequest(key, prompt, params, seed + 10 * copy, (), priority, salt, rank))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def take_over(self, data):
        """A cancelled request comes back with what it had generated (E7)."""
        seen = data.draw(st.sampled_from(self.ended))
        if seen.finish is Finish.CANCELLED and seen.expected.request.key not in self.live:
            self._add(replace(seen.expected.request, output_ids=tuple(seen.tokens)))

    def _add(self, request):
        seen = Seen(Expected.of(request, self.capacity), list(request.output_ids))
        self.live[request.key] = seen
        self.engine.add(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), what=st.sampled_from(["cancel", "pause", "pause", "resume"]))
    def steer(self, data, what):
        key = data.draw(st.sampled_from(sorted(self.live)))
        if self.live[key].cancelled:
            return
        getattr(self.engine, what)(key)
        if what == "cancel":
            self.live[key].cancelled = not self.live[key].expected.at_once
            self.paused.discard(key)
        elif what == "pause":
            self.paused.add(key)
        else:
            self.paused.discard(key)
        self.engine.check()

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self._step()

    def _step(self):
        assert 0 <= self.engine.room(1) <= self.engine.room(0) <= self.rows
        for output in self.engine.step():
            seen = self.live[output.key]
            seen.take(output)
            if seen.finish:
                self.ended.append(self.live.pop(output.key))
                self.paused.discard(output.key)
        self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for key in sorted(self.paused):
            self.engine.resume(key)
        # A request's turn may have to wait for all others, and be taken from it by the ones further on.
        bound = 4 * MAX_MODEL_LEN * (len(self.live) + 1)
        while self.engine.has_work():
            self._step()
            bound -= 1
            assert bound > 0, "livelock"
        assert not self.live, "requests that never end"
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.paused, stats.kv_blocks_used) == (0, 0, 0, 0)
        assert self.engine.room() > 0
        assert self.engine.step() == []


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestEngineMachine = EngineMachine.TestCase
