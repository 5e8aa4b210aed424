"""The whole contract between planning and running: one `StepPlan` in, one `StepResult` out, no torch.

The planner decides which rows run and where their KV entries live; the runner computes and samples.
Blocks hold `block_size` tokens; token position t of a request lives in block ``blocks[t // block_size]``
at offset ``t % block_size``. The planner hands out blocks 0 to num_blocks-1; a backend that needs a
block of its own (padding) allocates it beyond these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.sampling import SamplingParams
from workers.engine.types import TokenLogprobs

#: In `Row.tokens` with overlap depth 1: the token this row sampled in the step before, which the host may
#: not have collected yet. The runner takes it from where its sampler put it. Never seen at depth 0.
PENDING = -1


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row: everything its sampling needs, given once before its first step.

    A request that was retracted and comes back starts again with what it had generated in ``output_ids``.
    """

    row: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Targets:
    """Prompt ``tokens`` whose logprobs are wanted, at positions start, start+1, ...

    The step computes what stands before each of them, and so has the logits it was to come from.
    """

    start: int
    tokens: Sequence[int]
    top: int  #: how many of the likeliest ids to report beside each


@dataclass(slots=True)  # not frozen, but never changed: one is made per token, and freezing costs four times
class Row:
    """One request's part of a step: compute ``tokens`` at positions start, start+1, ...

    ``row`` is the request's stable slot (0 to max_num_seqs-1) while it runs. ``blocks`` covers at least
    ``start + len(tokens)`` tokens; it is the request's own append-only table, which may grow after the
    plan was made (copying it would cost more than the rest of the plan), so read no further. With
    ``sample`` the logits of the last token give the next token, whose absolute position (the sampler's
    counter) is ``start + len(tokens)``.
    """

    row: int
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool
    #: Ids whose logits are masked in this step (end ids while fewer than min_tokens were generated).
    masked: Sequence[int] = ()
    #: How many of the likeliest ids to report with the sampled one and its logprob; None reports nothing.
    logprobs: int | None = None
    targets: Targets | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Decode rows (one token, sampled) come first: a backend splits the batch with a slice."""

    step: int
    starts: tuple[RowStart, ...]
    rows: tuple[Row, ...]
    num_decode: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled token of each row of the plan, in the plan's order; None where ``sample`` was False.

    ``errors`` maps a row's place in the plan to why that row alone failed (e.g. logits not finite).
    ``logprobs`` and ``prompts`` map the places of rows that ask to what they get: of the sampled token, and
    of each of the targets.
    """

    step: int
    tokens: tuple[int | None, ...]
    errors: Mapping[int, str]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompts: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)


class Runner(Protocol):
    """Computes steps. `launch` may return before the device is done; `collect` waits for that step.

    Steps are collected in the order they were launched (overlap depth 0: collect follows launch at once).
    """

    vocab_size: int
    num_blocks: int
    block_size: int

    def launch(self, plan: StepPlan) -> object:
        """Start a step; what comes back is only good for `collect`."""

    def collect(self, launched: object) -> StepResult:
        """Wait for a step and give its tokens."""
