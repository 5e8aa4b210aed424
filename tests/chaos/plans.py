"""What clients ask for under chaos, and what they must get: pure, made from a seed.

The null engine's token is a function of seed and index, and each of its tokens is one character, so the
answer to every request is known before it is asked.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.helpers.asking import Body, chat, completion, null_text

PROMPTS = ("hello", "Once upon a time", "The sea is", "Count to ten: one, two")
_NEVER = "never said"
#: Longer than any context: the tokenizer refuses it.
_TOO_LONG = "far too many words " * 4000


class Manner(StrEnum):
    """How the client behaves."""

    STAYS = "stays"
    LEAVES = "leaves"  #: closes the connection in the middle
    ERRS = "errs"  #: asks for what the tokenizer refuses


@dataclass(frozen=True, slots=True)
class Expected:
    """The only right answer; the same facts as `asking.Reply` in the same order."""

    texts: tuple[str, ...]
    finishes: tuple[str, ...]
    stops: tuple[str | None, ...]
    #: Tokens that each choice counts.
    tokens: tuple[int, ...]
    #: The token log of each choice, where it is not the null engine's.
    logs: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One request."""

    number: int
    manner: Manner
    prompts: tuple[str, ...]
    seed: int
    n: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    is_chat: bool = False
    is_stream: bool = True
    #: Events after which a client that leaves does so.
    leaves_after: int = 0
    temperature: float = 0.0
    #: What a run without faults has shown; else what the null engine says.
    shown: Expected | None = None
    expected: Expected = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "expected", self.shown or _expected(self))

    @property
    def body(self) -> Body:
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens, "seed": self.seed, "n": self.n, "temperature": self.temperature
        }  # fmt: skip
        if self.stop:
            fields["stop"] = list(self.stop)
        if self.is_stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat:
            return chat(self.prompts[0], **fields)
        return completion(list(self.prompts) if len(self.prompts) > 1 else self.prompts[0], **fields)

    @property
    def returns(self) -> bool:
        """Whether its client comes back when its connection is cut: one in five of those that stay."""
        return self.manner is Manner.STAYS and self.number % 5 == 0

    def choice_seed(self, choice: int) -> int:
        return self.seed + choice % self.n


def _expected(plan: Plan) -> Expected:
    texts: list[str] = []
    finishes: list[str] = []
    stops: list[str | None] = []
    tokens: list[int] = []
    for choice in range(len(plan.prompts) * plan.n):
        text = null_text(plan.choice_seed(choice), plan.max_tokens)
        assert len(text) == plan.max_tokens
        ends = [(text.index(stop) + len(stop), stop) for stop in plan.stop if stop in text]
        if ends:
            end, stop = min(ends)
            texts.append(text[: end - len(stop)])
            finishes.append("stop")
            stops.append(stop)
            tokens.append(end)
        else:
            texts.append(text)
            finishes.append("length")
            stops.append(None)
            tokens.append(plan.max_tokens)
    return Expected(tuple(texts), tuple(finishes), tuple(stops), tuple(tokens))


def endless_plans(seed: int, *, longest: int = 300, first: int = 0) -> Iterator[Plan]:
    """Requests of every kind; one in ten clients leaves, one in ten errs.

    ``first`` is the number of the first: their keys on one Redis must not be those of others.
    """
    rng = random.Random(seed)
    for number in itertools.count(first):
        yield _plan(number, rng, longest)


def make_plans(count: int, seed: int, *, longest: int = 300) -> list[Plan]:
    """The first ``count`` of `endless_plans`."""
    return list(itertools.islice(endless_plans(seed, longest=longest), count))


def _plan(number: int, rng: random.Random, longest: int) -> Plan:
    draw = rng.random()
    manner = Manner.LEAVES if draw < 0.1 else Manner.ERRS if draw < 0.2 else Manner.STAYS
    is_chat = rng.random() < 0.4
    seed, n = rng.randrange(1, 1 << 40), rng.choice((1, 1, 1, 1, 2, 3))
    max_tokens = rng.choice((1, rng.randint(2, 40), rng.randint(40, longest), rng.randint(40, longest)))
    prompts = tuple(rng.sample(PROMPTS, 1 if is_chat or rng.random() < 0.85 else 2))
    if manner is Manner.ERRS:
        prompts = (_TOO_LONG,)
    if manner is Manner.LEAVES:
        max_tokens = longest
    stop: tuple[str, ...] = ()
    if max_tokens > 10 and rng.random() < 0.4:
        place = rng.randrange(4, max_tokens - 4)
        text = null_text(seed + rng.randrange(n), max_tokens)
        stop = (_NEVER, text[place : place + rng.randint(2, 4)])
    is_stream = rng.random() < 0.75
    return Plan(
        number, manner, prompts, seed, n, max_tokens, stop, is_chat, is_stream, rng.randint(1, longest // 2)
    )
