"""One request inside an engine: its tokens, its counters, its life, and the rules by which it ends.

Pure bookkeeping. It knows neither the queue it waits in nor who gave it its row and blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from workers.engine.block_pool import chain_digest
from workers.engine.types import EngineRequest, Finish


class State(Enum):
    """Where a request is. It owns a row and blocks in RUNNING and PAUSED, and nothing elsewhere."""

    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()
    PARKED = auto()  #: paused without a row: paused while waiting, or retracted while paused
    ENDED = auto()


class Event(Enum):
    """What can happen to a request."""

    ADMIT = auto()
    RETRACT = auto()
    PAUSE = auto()
    RESUME = auto()
    END = auto()


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.WAITING: {Event.ADMIT: State.RUNNING, Event.PAUSE: State.PARKED, Event.END: State.ENDED},
    State.RUNNING: {Event.RETRACT: State.WAITING, Event.PAUSE: State.PAUSED, Event.END: State.ENDED},
    State.PAUSED: {Event.RETRACT: State.PARKED, Event.RESUME: State.RUNNING, Event.END: State.ENDED},
    State.PARKED: {Event.RESUME: State.WAITING, Event.END: State.ENDED},
    State.ENDED: {},
}


@dataclass(frozen=True, slots=True)
class Ending:
    """When a generation is over: the one rule that every engine shares."""

    limit: int  #: most tokens to generate; with 0 the prompt is only scored
    ends: frozenset[int]  #: ids that end it when generated

    @classmethod
    def of(cls, request: EngineRequest, *, max_model_len: int, eos_ids: Collection[int]) -> Ending:
        """The rule for ``request``; the context length bounds it whatever max_tokens says."""
        params, room = request.params, max_model_len - len(request.prompt_ids)
        ends = params.stop_token_ids if params.ignore_eos else (*eos_ids, *params.stop_token_ids)
        return cls(room if params.max_tokens is None else min(params.max_tokens, room), frozenset(ends))

    def after(self, generated: int, last: int | None) -> Finish | None:
        """Whether ``generated`` tokens, the last of them ``last``, are all there will be."""
        if last in self.ends:
            return Finish.STOP
        return Finish.LENGTH if generated >= self.limit else None

    def reached_by(self, request: EngineRequest) -> Finish | None:
        """Whether there is nothing to do: an earlier owner did it all (E7), or none was asked for."""
        if prompt_positions(request):
            return None
        output = request.output_ids
        return self.after(len(output), output[-1] if output else None)


def prompt_positions(request: EngineRequest) -> range:
    """Positions of the prompt tokens whose logprobs are to be brought, before any token is generated.

    The first token has none, since nothing stands before it. Who generated ``output_ids`` has sent them all.
    """
    wanted = request.params.prompt_logprobs is not None and not request.output_ids
    return range(1, len(request.prompt_ids) if wanted else 1)


def needs_token(request: EngineRequest) -> bool:
    """Whether there must be room for a token after the prompt: not if it is only scored (max_tokens 0)."""
    return request.params.max_tokens != 0


def defect(request: EngineRequest, *, max_model_len: int, vocab_size: int) -> str:
    """Why no engine of these limits could ever run ``request``; empty when one could.

    Ids are checked here although the tokenizer checked them: one that is out of range would not fail its
    own request but the whole batch it is computed in.
    """
    if not request.prompt_ids:
        return "the prompt is empty"
    if len(request.prompt_ids) + needs_token(request) > max_model_len:
        return f"the prompt has {len(request.prompt_ids)} tokens; the context length is {max_model_len}"
    for ids in (request.prompt_ids, request.output_ids):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"a token id is not in the vocabulary of {vocab_size}"
    return ""


@dataclass(slots=True, eq=False)
class Request:
    """A request that has not ended, and three counters of positions that say how far it is (E3).

    ::

        tokens      |<------- prompt ------->|<-- generated -->|<- pending ->|
        positions   |<----- committed ----->|<- in flight ->|
                    |<-------------- computed ------------->|<- remaining -->|

    ``computed`` moves when a step is planned, ``committed`` when it is committed, and ``in_flight`` is
    what lies between. ``pending`` tokens are being sampled by a step in flight (one at overlap depth 1).
    """

    source: EngineRequest
    ending: Ending
    arrival: int
    #: Ids masked while fewer than min_tokens were generated.
    masked: tuple[int, ...]
    #: Digest the first block is chained to.
    root: bytes
    block_size: int
    tokens: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    state: State = State.WAITING
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    registered: int = 0  #: leading blocks that are in the prefix cache
    computed: int = 0
    in_flight: int = 0
    committed: int = 0
    pending: int = 0
    last_step: int = 0  #: the latest step that touches the row and blocks
    cached_tokens: int = -1  #: prompt tokens found in the cache at first admission; -1 before it
    announced: bool = False  #: whether an output already told them
    #: Positions of the prompt whose logprobs no planned step brings yet; kept when retracted.
    unscored: range = field(init=False)
    _digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [*self.source.prompt_ids, *self.source.output_ids]
        self.prompt_len = len(self.source.prompt_ids)
        self.unscored = prompt_positions(self.source)

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of the queue."""
        return self.source.place(self.arrival)

    @property
    def generated(self) -> int:
        """Tokens generated and known here, forced prefix included."""
        return len(self.tokens) - self.prompt_len

    @property
    def total(self) -> int:
        """Tokens there are, those being sampled included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens no planned step computes yet; the last of them gives the next token."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def left(self) -> int:
        """Most tokens this request may still generate, beyond those being sampled."""
        return self.ending.limit - self.generated - self.pending

    def fire(self, event: Event) -> None:
        """Move along the transition table; an illegal move raises and changes nothing."""
        target = TRANSITIONS[self.state].get(event)
        assert target is not None, f"{self.source.key}: {event.name} in state {self.state.name}"
        self.state = target

    def score(self, computed: int) -> range:
        """The positions to be scored by a step after which ``computed`` tokens are computed."""
        stop = max(self.unscored.start, min(computed + 1, self.prompt_len))
        scored, self.unscored = range(self.unscored.start, stop), range(stop, self.prompt_len)
        return scored

    @property
    def only_scored(self) -> bool:
        """Whether all that it was here for is done, without a token: nothing follows the prompt's last."""
        return not self.ending.limit and self.committed >= self.prompt_len - 1

    def launch(self, step: int, count: int, *, sample: bool) -> None:
        """``step`` will compute the next ``count`` tokens, and sample one more if ``sample``."""
        self.computed += count
        self.in_flight += count
        self.pending += sample
        self.last_step = step

    def land(self, count: int, token: int | None) -> None:
        """A step that computed ``count`` tokens, and sampled ``token`` unless None, is committed."""
        self.in_flight -= count
        self.committed += count
        if token is not None:
            self.pending -= 1
            self.tokens.append(token)

    def digest(self, index: int) -> bytes:
        """Digest of block ``index``, which must be full of known tokens. Computed once, even if retracted."""
        digests = self._digests
        while len(digests) <= index:
            start = len(digests) * self.block_size
            tokens = self.tokens[start : start + self.block_size]
            assert len(tokens) == self.block_size, "only full blocks have a digest"
            digests.append(chain_digest(digests[-1] if digests else self.root, tokens))
        return digests[index]

    @property
    def max_hits(self) -> int:
        """Most blocks a prefix hit may take: the last token is always computed, to have its logits.

        So is the one before the first whose logprob is still to be brought.
        """
        last = self.unscored.start if self.unscored else len(self.tokens)
        return (last - 1) // self.block_size

    def digests(self) -> Iterator[bytes]:
        """Digests a prefix hit may use, computed as far as they are asked for."""
        return (self.digest(index) for index in range(self.max_hits))

    def vacate(self) -> None:
        """Forget row, blocks and positions; tokens and digests stay (retraction recomputes)."""
        self.row = -1
        self.blocks = []  # a new list: plans in flight still read the old one
        self.registered = self.computed = self.in_flight = self.committed = self.pending = 0

    def check(self) -> None:
        """Prove the drawing above."""
        assert self.committed + self.in_flight == self.computed <= self.total
        assert self.committed <= len(self.tokens)
        assert self.registered * self.block_size <= self.committed
        assert self.generated + self.pending <= self.ending.limit
        if self.state in (State.RUNNING, State.PAUSED):
            assert self.row >= 0
            assert len(self.blocks) * self.block_size >= self.computed
        else:
            assert self.row < 0
            assert not self.blocks
            assert self.computed == 0
