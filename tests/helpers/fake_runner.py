"""A runner whose "model" is a hash, and which distrusts every plan it gets.

A KV slot holds a digest of the whole prefix up to its position; the next token is a hash of all the digests
read back through the block table. A block given to two owners, reused too early, or hit under the wrong
prefix therefore changes tokens. Steps are executed only when they are collected, the latest moment there is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from workers.engine.plan import PENDING, Row, RowStart, StepPlan, StepResult
from workers.engine.types import TokenLogprobs

VOCAB = 50
Fault = Callable[[RowStart, int], str]


def sample(digests: Iterable[int], seed: int, position: int, masked: Sequence[int] = ()) -> int:
    """The "model": a token that depends on everything it may depend on."""
    token = hash((tuple(digests), seed, position)) % VOCAB
    while token in masked:
        token = (token + 1) % VOCAB
    return token


def score(digests: Iterable[int], token: int, top: int) -> TokenLogprobs:
    """How likely ``token`` was after everything before it. There are ties."""
    prefix = hash(tuple(digests))
    values = [-float(hash((prefix, one)) % 13) for one in range(VOCAB)]
    ranked = sorted(range(VOCAB), key=lambda one: (-values[one], one))
    return TokenLogprobs(values[token], tuple((one, values[one]) for one in ranked[:top]))


def scores(prompt: Sequence[int], top: int, output: Sequence[int] = ()) -> list[TokenLogprobs]:
    """What the tokens of a prompt get, from its second on; or those of its ``output``."""
    digests = digests_of([*prompt, *output])
    tokens = [*prompt, *output]
    places = range(len(prompt), len(tokens)) if output else range(1, len(prompt))
    return [score(digests[:at], tokens[at], top) for at in places]


def digests_of(tokens: Iterable[int]) -> list[int]:
    """What the KV slots of a sequence must hold."""
    chain, digests = 0, []
    for token in tokens:
        chain = hash((chain, token))
        digests.append(chain)
    return digests


def reference(
    prompt: Sequence[int], seed: int, count: int, *, min_tokens: int = 0, masked: Sequence[int] = ()
) -> list[int]:
    """The first ``count`` tokens of a request, without any engine."""
    digests, output = digests_of(prompt), []
    for index in range(count):
        token = sample(digests, seed, len(digests), masked if index < min_tokens else ())
        output.append(token)
        digests.append(hash((digests[-1], token)))
    return output


def no_fault(start: RowStart, position: int) -> str:
    return ""


@dataclass
class RowState:
    """What the device knows of a row."""

    start: RowStart
    known: list[int]
    computed: int | None = None  #: None until the first step says how much the prefix cache gave
    sampled: int | None = None


@dataclass
class Launched:
    plan: StepPlan
    used: dict[int, set[int]]  #: blocks each row reads or writes


class FakeRunner:
    """`Runner` with ``overlap`` steps in flight at most; ``fault`` makes rows fail."""

    vocab_size = VOCAB

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        overlap: int = 0,
        budget: int = 10**9,
        fault: Fault = no_fault,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.plans: list[StepPlan] = []
        self._overlap = overlap
        self._budget = budget
        self._fault = fault
        self._kv = [0] * (num_blocks * block_size)
        self._rows: dict[int, RowState] = {}
        self._launched: deque[Launched] = deque()

    def launch(self, plan: StepPlan) -> Launched:
        assert plan.rows, "an empty step"
        assert sum(len(row.tokens) for row in plan.rows) <= self._budget
        assert len({row.row for row in plan.rows}) == len(plan.rows), "a row is in the step twice"
        self._check_order(plan)
        for start in plan.starts:
            assert not any(start.row in other.used for other in self._launched), "a row in flight was reused"
            self._rows[start.row] = RowState(start, [*start.prompt_ids, *start.output_ids])
        launched = Launched(plan, {row.row: self._check_row(row) for row in plan.rows})
        self._check_writes(launched)
        self.plans.append(plan)
        self._launched.append(launched)
        assert len(self._launched) <= self._overlap + 1
        return launched

    def collect(self, launched: Launched) -> StepResult:
        assert self._launched.popleft() is launched, "steps are collected in order"
        tokens: list[int | None] = []
        errors: dict[int, str] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        for place, row in enumerate(launched.plan.rows):
            tokens.append(self._compute(row))
            if row.targets is not None:
                at, top = row.targets.start, row.targets.top
                prompts[place] = [
                    score(self._read(row, at + offset), token, top)
                    for offset, token in enumerate(row.targets.tokens)
                ]
            if row.logprobs is not None and (token := tokens[-1]) is not None:
                logprobs[place] = score(self._read(row, row.start + len(row.tokens)), token, row.logprobs)
            if row.sample and (error := self._fault(self._rows[row.row].start, row.start + len(row.tokens))):
                errors[place] = error
                tokens[-1] = None
        return StepResult(launched.plan.step, tuple(tokens), errors, logprobs, prompts)

    def _check_order(self, plan: StepPlan) -> None:
        decode = [len(row.tokens) == 1 and row.sample for row in plan.rows]
        assert decode == [True] * plan.num_decode + [False] * (len(plan.rows) - plan.num_decode)
        assert {start.row for start in plan.starts} <= {row.row for row in plan.rows}
        assert plan.step == (self.plans[-1].step + 1 if self.plans else 1)

    def _check_row(self, row: Row) -> set[int]:
        """The plan continues the row where it was; gives the blocks it touches."""
        state = self._rows[row.row]
        end = row.start + len(row.tokens)
        assert row.tokens
        if state.computed is None:
            assert row.start % self.block_size == 0, "a prefix hit is made of whole blocks"
            assert row.start < len(state.known), "a prefix hit leaves one token to compute"
        else:
            assert row.start == state.computed, "positions are contiguous"
        state.computed = end
        if list(row.tokens) == [PENDING]:
            assert self._launched, "the host knows this token"
            before = self._launched[-1].plan
            assert any(other.row == row.row and other.sample for other in before.rows)
        elif self._launched and end > len(state.known):
            raise AssertionError("the host cannot know this token")
        else:
            assert list(row.tokens) == state.known[row.start : end]
            assert row.sample == (end == len(state.known) and state.start.params.max_tokens != 0)
        assert row.logprobs == (state.start.params.logprobs if row.sample else None)
        if (targets := row.targets) is not None:
            until = targets.start + len(targets.tokens)
            assert row.start < targets.start < until <= end + 1, "what stands before them is not computed"
            assert list(targets.tokens) == list(state.start.prompt_ids[targets.start : until])
            assert targets.top == state.start.params.prompt_logprobs
        assert len(row.blocks) * self.block_size >= end, "blocks do not cover the tokens"
        blocks = row.blocks[: -(-end // self.block_size)]
        assert all(0 <= block < self.num_blocks for block in blocks)
        return set(blocks)

    def _check_writes(self, launched: Launched) -> None:
        """Nobody else in this step or one in flight touches a block that is written."""
        for row in launched.plan.rows:
            first, last = row.start // self.block_size, (row.start + len(row.tokens) - 1) // self.block_size
            written = set(row.blocks[first : last + 1])
            for other in (launched, *self._launched):
                for number, used in other.used.items():
                    assert number == row.row or not written & used, "a block in use is written by another row"

    def _compute(self, row: Row) -> int | None:
        state = self._rows[row.row]
        for offset, given in enumerate(row.tokens):
            position = row.start + offset
            token = state.sampled if given == PENDING else given
            assert token is not None
            before = self._kv[self._slot(row, position - 1)] if position else 0
            self._kv[self._slot(row, position)] = hash((before, token))
        if not row.sample:
            return None
        end = row.start + len(row.tokens)
        state.sampled = sample(self._read(row, end), state.start.seed, end, row.masked)
        state.known.append(state.sampled)
        return state.sampled

    def _read(self, row: Row, end: int) -> list[int]:
        return [self._kv[self._slot(row, position)] for position in range(end)]

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size
