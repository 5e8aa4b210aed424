"""An engine without a model: every running request gets one made-up token per step, at a set pace.

It exists to load and break the bus around it, so it costs next to nothing, and its tokens depend on seed and
index alone: any replica, before or after any crash, goes on with the very token another would have given.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from workers.engine.request import Ending, defect, prompt_positions
from workers.engine.types import (
    EngineRequest,
    EngineStats,
    Finish,
    Output,
    PromptLogprobs,
    TokenLogprobs,
)

#: Vocabularies in the manner of GPT-2 begin with the printable ASCII characters, in order, behind at most 17
#: special tokens. In every one of them each of these ids is one such character.
ASCII_IDS = range(17, 94)

#: All streams walk one ring of PERIOD places (a prime, so that the stride reaches them all) from a start of
#: their own. Neighbouring seeds start far apart, on the walk too: no stream soon becomes another one.
PERIOD = 1_000_003
STRIDE = 618_035

#: Most positions of one prompt whose logprobs come with one step.
STRETCH = 64


def _start(seed: int) -> int:
    return seed * 7_368_787 % PERIOD


def token_at(seed: int, index: int, *, ids: Collection[int] = ASCII_IDS) -> int:
    """The token that a `NullEngine` with these ids generates at ``index``."""
    return tuple(ids)[(_start(seed) + index * STRIDE) % PERIOD % len(ids)]


def logprobs_at(token: int, place: int, top: int, *, vocab_size: int) -> TokenLogprobs:
    """What a `NullEngine` says of ``token``, the ``place``-th of its prompt or of its output, from 0.

    The token is always the likeliest; its neighbours follow. The numbers are exact in few decimals.
    """
    best = -(1 + place % 15) / 16
    ranks = range(min(top, vocab_size))
    return TokenLogprobs(best, tuple(((token + rank) % vocab_size, best - rank) for rank in ranks))


@dataclass(slots=True, eq=False)
class _Generation:
    """A request that has not ended."""

    key: str
    order: tuple[int, int, int]
    ending: Ending
    min_tokens: int
    start: int
    generated: int
    logprobs: int | None
    prompt: Sequence[int]
    prompt_logprobs: int
    #: Positions of the prompt whose logprobs are still to come, if any.
    unscored: range | None


class NullEngine:
    """`Engine` that takes ``step_ms`` per step whatever it runs; 0 is as fast as it goes."""

    def __init__(
        self,
        *,
        step_ms: float,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        eos_ids: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.ids = tuple(token for token in ASCII_IDS if token < vocab_size and token not in eos_ids)
        if not self.ids:
            raise ValueError(f"a vocabulary of {vocab_size} has none of the ids {ASCII_IDS}")
        self._period = step_ms / 1000
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._clock = clock
        self._sleep = sleep
        #: When the next step is due; None when nothing ran.
        self._due: float | None = None
        self._arrivals = 0
        self._preemptions = 0
        self._waiting: list[_Generation] = []
        self._running: dict[str, _Generation] = {}
        self._paused: dict[str, _Generation] = {}
        self._outputs: list[Output] = []

    def add(self, request: EngineRequest) -> None:
        """See `Engine.add`."""
        if request.key in self._running or request.key in self._paused or self._queued(request.key):
            raise ValueError(f"request {request.key} is already here")
        generated = len(request.output_ids)
        if error := defect(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size):
            self._outputs.append(Output(request.key, generated, None, Finish.ERROR, error))
            return
        ending = Ending.of(request, max_model_len=self._max_model_len, eos_ids=self._eos_ids)
        if finish := ending.reached_by(request):
            self._outputs.append(Output(request.key, generated, None, finish))
            return
        order = request.place(self._arrivals)
        self._arrivals += 1
        params, unscored = request.params, prompt_positions(request)
        added = _Generation(
            request.key,
            order,
            ending,
            params.min_tokens,
            _start(request.seed),
            generated,
            params.logprobs,
            request.prompt_ids if unscored else (),
            params.prompt_logprobs or 0,
            unscored or None,
        )
        insort(self._waiting, added, key=_order)

    def cancel(self, key: str) -> None:
        """See `Engine.cancel`."""
        if found := self._leave(key) or self._paused.pop(key, None):
            self._outputs.append(Output(key, found.generated, None, Finish.CANCELLED))

    def pause(self, key: str) -> None:
        """See `Engine.pause`. There is nothing to keep but the place in the queue."""
        if found := self._leave(key):
            self._paused[key] = found

    def resume(self, key: str) -> None:
        """See `Engine.resume`."""
        if found := self._paused.pop(key, None):
            insort(self._waiting, found, key=_order)

    def step(self) -> list[Output]:
        """See `Engine.step`."""
        running = self._running
        if not running:
            self._due = None
        if self._waiting:
            self._admit()
        if running:
            self._pace()
        outputs, self._outputs = self._outputs, []
        ids, size, ended = self.ids, len(self.ids), []
        for one in running.values():
            if one.unscored is not None:
                outputs.append(self._score(one, one.unscored))
                if one.unscored is None and not one.ending.limit:
                    outputs.append(Output(one.key, 0, None, Finish.LENGTH))
                    ended.append(one.key)
                continue
            index = one.generated
            token = ids[(one.start + index * STRIDE) % PERIOD % size]
            one.generated = index + 1
            ending = one.ending
            if token in ending.ends or index + 1 >= ending.limit:
                finish = ending.after(index + 1, token if index >= one.min_tokens else None)
                output = Output(one.key, index, token, finish)
                if finish:
                    ended.append(one.key)
            else:
                output = Output(one.key, index, token)
            if one.logprobs is not None:
                output.logprobs = logprobs_at(token, index, one.logprobs, vocab_size=self._vocab_size)
            outputs.append(output)
        for key in ended:
            del running[key]
        return outputs

    def has_work(self) -> bool:
        """See `Engine.has_work`."""
        return bool(self._outputs or self._running or self._waiting)

    def room(self, priority: int = 0) -> int:
        """See `Engine.room`. Paused requests hold no row, and those of a higher number would give theirs."""
        here = (*self._running.values(), *self._waiting)
        return max(0, self._max_num_seqs - sum(one.order[0] <= priority for one in here))

    def stats(self) -> EngineStats:
        """See `EngineStats`; there is no KV cache."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_total=0,
            kv_blocks_used=0,
            prefix_queries=0,
            prefix_hits=0,
            preemptions=self._preemptions,
            paused=len(self._paused),
            rows=self._max_num_seqs,
        )

    def check(self) -> None:
        """See `Engine.check`."""
        queued = [one.key for one in self._waiting]
        keys = [*queued, *self._running, *self._paused]
        assert len(set(keys)) == len(keys), "a request is in two places"
        assert len(self._running) <= self._max_num_seqs
        assert self._waiting == sorted(self._waiting, key=_order)

    def _score(self, one: _Generation, unscored: range) -> Output:
        """Logprobs of the next stretch of a prompt."""
        stretch, one.unscored = unscored[:STRETCH], unscored[STRETCH:] or None
        tokens = [
            logprobs_at(one.prompt[at], at, one.prompt_logprobs, vocab_size=self._vocab_size)
            for at in stretch
        ]
        return Output(one.key, 0, None, prompt=PromptLogprobs(stretch.start, tokens))

    def _admit(self) -> None:
        """Give rows to those who wait, in order; the more urgent take them from the less, last come first."""
        waiting, running = self._waiting, self._running
        while waiting:
            if len(running) >= self._max_num_seqs:
                last = max(running.values(), key=_order)
                if last.order[0] <= waiting[0].order[0]:
                    return
                insort(waiting, running.pop(last.key), key=_order)
                self._preemptions += 1
            one = waiting.pop(0)
            running[one.key] = one

    def _pace(self) -> None:
        """Wait until the step is due. The times form a grid, so that late steps add up to no drift."""
        if not self._period:
            return
        now = self._clock()
        due = now + self._period if self._due is None else self._due
        if now < due:
            self._sleep(due - now)
        else:
            due += (now - due) // self._period * self._period  # steps that were missed are not made up for
        self._due = due + self._period

    def _queued(self, key: str) -> _Generation | None:
        return next((one for one in self._waiting if one.key == key), None)

    def _leave(self, key: str) -> _Generation | None:
        """Take a running or waiting request out of the steps."""
        if found := self._running.pop(key, None):
            return found
        if found := self._queued(key):
            del self._waiting[bisect_left(self._waiting, found.order, key=_order)]
        return found


def _order(one: _Generation) -> tuple[int, int, int]:
    return one.order
