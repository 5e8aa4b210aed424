"""What goes into an engine and what comes out: the contract between an engine and whoever drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from common.sampling import SamplingParams

#: How many later arrivals whose rank is better by 1 overtake a request. It is a number, lest some overtake
#: it for ever.
RANK_PLACES = 100


class Finish(StrEnum):
    """Why a generation ended, as the engine sees it (stop strings are the detokenizer's)."""

    STOP = "stop"  #: an end id or a stop token id was generated; it is the last token
    LENGTH = "length"  #: max_tokens or the context length was reached
    CANCELLED = "cancelled"  #: `Engine.cancel`; carries no token
    ERROR = "error"  #: this request alone failed; carries no token, `Output.error` says why


#: Stands for the logprob of what cannot be: of an id that the model rules out, -inf.
LOWEST = -9999.0


class TokenLogprobs(NamedTuple):
    """How likely a token was: natural logarithm, of the raw distribution (E6), never below `LOWEST`."""

    logprob: float
    #: The likeliest ids with theirs, best first, equal ones by id; as many as were asked for.
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """How likely a stretch of a prompt's tokens was; the first of them stands at position ``start``."""

    start: int
    tokens: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One choice to generate.

    ``output_ids`` is what an earlier owner already generated (E7): a forced prefix that counts towards
    max_tokens, penalties and positions, and is never sent again. Nor are logprobs of the prompt, which that
    owner sent before. ``seed`` is the choice's own seed.
    """

    key: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    output_ids: Sequence[int] = ()
    #: Lower runs earlier, and takes from the higher what it needs; 0 is interactive, 1 is batch.
    priority: int = 0
    #: Namespace of the prefix cache: requests share cached blocks only within the same salt.
    salt: str = ""
    #: Among those of one priority, lower is begun earlier. Whoever has begun gives way to nobody for it.
    rank: int = 0

    def place(self, arrival: int) -> tuple[int, int, int]:
        """Sort key of a queue, for the ``arrival``-th request: priority, then rank, then first come."""
        return self.priority, arrival + RANK_PLACES * self.rank, arrival


@dataclass(slots=True)  # not frozen, but never changed: one is made per token, and freezing costs four times
class Output:
    """One committed event of one request: a token, the end, or both; or else logprobs of its prompt.

    ``index`` counts generated tokens from 0, forced prefix included; it is the index of ``token``, or,
    when there is no token (prompt, cancel, error), the number of tokens generated.
    """

    key: str
    index: int
    token: int | None
    finish: Finish | None = None
    error: str = ""
    #: Prompt tokens that came from the prefix cache; set on the first output of a request.
    cached_tokens: int = 0
    #: Of ``token``, where asked for.
    logprobs: TokenLogprobs | None = None
    #: The next stretch of the prompt, where asked for: from position 1 on without a gap, before any token.
    prompt: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges at one moment."""

    running: int  #: hold a row and take part in steps
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int  #: owned by requests; cached blocks nobody owns are free
    prefix_queries: int  #: prompt tokens looked up since the start
    prefix_hits: int  #: prompt tokens found since the start
    preemptions: int
    paused: int = 0  #: with or without a row; counted in neither of the first two
    rows: int = 0  #: most that can run at once


class Engine(Protocol):
    """A continuous-batching engine, driven by one thread.

    `step` runs one step of whatever is runnable and returns what it committed, in order; cancellations
    and single-request errors come out of the next `step` as outputs without a token. It never blocks
    on anything but its own computation, and raises only when the engine as a whole is broken.
    """

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run comes back from `step` as `Finish.ERROR`."""

    def cancel(self, key: str) -> None:
        """End a request (running, waiting or paused); unknown keys are ignored."""

    def pause(self, key: str) -> None:
        """Leave a request out of the steps, keeping what it has; unknown keys are ignored."""

    def resume(self, key: str) -> None:
        """Undo `pause`; unknown keys are ignored."""

    def step(self) -> list[Output]:
        """Run one step (see above)."""

    def has_work(self) -> bool:
        """Whether a `step` would do or report anything (paused requests alone are no work)."""

    def room(self, priority: int = 0) -> int:
        """How many more requests of ``priority`` it would start soon: what the scheduler may read now."""

    def stats(self) -> EngineStats:
        """What the engine is doing now."""

    def check(self) -> None:
        """Prove the ownership invariants (E3) or raise AssertionError; cheap enough for every test step."""
