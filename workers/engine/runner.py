"""Computes steps: tokens through the model, the last hidden state of each sampling row through the sampler.

Knows tensors and one plan at a time. What a row is for and how long it lives is the planner's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch

from workers.engine.attention import AttentionBackend, Metadata
from workers.engine.logprobs import Distributions, of_prompts
from workers.engine.models import Model
from workers.engine.plan import PENDING, StepPlan, StepResult
from workers.engine.sampler import NOT_FINITE, Draw, Sampler
from workers.engine.types import TokenLogprobs


class ModelRunner(Generic[Metadata]):
    """`Runner` on the CPU: `launch` does the whole step, so `collect` has nothing to wait for."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend[Metadata],
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._model = model
        self._attention = attention
        self._sampler = Sampler(vocab_size, max_num_seqs)
        #: The token each row sampled last, for plans made before the host had seen it.
        self._sampled = [0] * max_num_seqs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        """See `Runner.launch`."""
        for start in plan.starts:
            self._sampler.start(start)
        hidden = self._forward(plan)
        prompts, errors = self._score(plan, hidden)
        places, ends = [], []
        end = 0
        for place, row in enumerate(plan.rows):
            end += len(row.tokens)
            if row.sample:
                places.append(place)
                ends.append(end - 1)
        tokens: list[int | None] = [None] * len(plan.rows)
        if not places:
            return StepResult(plan.step, tuple(tokens), errors, prompts=prompts)
        # The head is the widest product of a step: only rows that need it go through.
        wanted = hidden if len(ends) == len(hidden) else hidden[ends]
        rows = [plan.rows[place] for place in places]
        draws = [Draw(row.row, row.start + len(row.tokens), row.masked) for row in rows]
        logits = self._model.logits(wanted)
        raw = Distributions(logits, [row.logprobs for row in rows])
        chosen, failed = self._sampler.sample(logits, draws)
        for place, row, token in zip(places, rows, chosen, strict=True):
            tokens[place] = token
            self._sampled[row.row] = token or 0
        errors |= {places[at]: error for at, error in failed.items()}
        logprobs = {places[at]: report for at, report in raw.of(chosen).items()}
        return StepResult(plan.step, tuple(tokens), errors, logprobs, prompts)

    def collect(self, launched: object) -> StepResult:
        """See `Runner.collect`."""
        assert isinstance(launched, StepResult), "collect takes what launch returned"
        return launched

    def _score(
        self, plan: StepPlan, hidden: torch.Tensor
    ) -> tuple[dict[int, Sequence[TokenLogprobs]], dict[int, str]]:
        """Logprobs of the prompts that ask, and what is wrong with others, by the places of their rows."""
        places, asked = [], []
        begin = 0
        for place, row in enumerate(plan.rows):
            if row.targets is not None:
                places.append(place)
                asked.append((begin + row.targets.start - 1 - row.start, row.targets))
            begin += len(row.tokens)
        prompts: dict[int, Sequence[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        for place, scored in zip(places, of_prompts(hidden, self._model.logits, asked), strict=True):
            if scored is None:
                errors[place] = NOT_FINITE
            else:
                prompts[place] = scored
        return prompts, errors

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        for row in plan.rows:
            tokens += (self._sampled[row.row] if token == PENDING else token for token in row.tokens)
            positions += range(row.start, row.start + len(row.tokens))
        return self._model.forward(
            torch.tensor(tokens), torch.tensor(positions), self._attention, self._attention.prepare(plan)
        )
