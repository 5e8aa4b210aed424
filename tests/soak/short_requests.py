"""Very many short requests, some left in the middle and some invalid: nothing grows, and nothing stays."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.helpers.asking import Body, completion
from tests.helpers.inside import Inside
from tests.helpers.stack import Stack
from tests.helpers.waiting import until
from tests.soak.client import ask, leave
from tests.soak.measure import Memory, Row, exactly, flat, memory_of, told, within

_REPLY_TTL_S = 3
_CLIENTS = 32
_TOKENS = 4
_MOST_GROWTH = 4 << 20
#: Samples per run, of which the second quarter is compared with the fourth.
_SAMPLES = 16
_FLAGS = ("--engine", "null", "--null-step-ms", "0", "--reply-ttl", str(_REPLY_TTL_S))
#: What the API refuses, and what only the tokenizer can refuse.
_INVALID: tuple[Body, ...] = (
    completion("x", max_tokens=-1),
    completion("x", temperature=9),
    completion({"no": "prompt"}, max_tokens=1),
    completion("word " * 9000, max_tokens=1),
    completion("", max_tokens=1),
)


@dataclass(slots=True)
class _Tally:
    done: int = 0
    left: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def all(self) -> int:
        return self.done + self.left + self.refused


def run(requests: int) -> list[Row]:
    with Stack(*_FLAGS) as stack, stack.redis() as client:
        inside = Inside(client)
        asyncio.run(_load(stack, requests // 10, []))
        base = _rest(stack, inside)
        samples: list[Memory] = []
        start = time.monotonic()
        tally = asyncio.run(_load(stack, requests, samples))
        seconds = time.monotonic() - start
        end = _rest(stack, inside)
    quarter = len(samples) // 4
    second, fourth = (_mean(samples[n * quarter : (n + 1) * quarter]) for n in (1, 3))
    return [
        told("requests / seconds", f"{tally.all} / {seconds:.0f}"),
        told("answered / left / refused with 400", f"{tally.done} / {tally.left} / {tally.refused}"),
        exactly("wrong answers", len(tally.wrong), 0),
        *[told("the first", wrong) for wrong in tally.wrong[:1]],
        *flat("grown, second to fourth quarter", fourth.growth(second), _MOST_GROWTH),
        within("keys, before and after", end.keys, base.keys, ""),
        *flat("grown, before to after", {"redis": end.redis - base.redis}, _MOST_GROWTH),
    ]


def _rest(stack: Stack, inside: Inside) -> Memory:
    """What is there once the last reply has expired."""
    inside.wait_free(30)
    patterns = [f"{inside.keys.prefix}:*:{kind}:*" for kind in ("req", "out", "gen")]

    def gone() -> bool:
        return not any(next(inside.redis.scan_iter(each, count=1000), None) for each in patterns)

    until(gone, "every reply expires", _REPLY_TTL_S + 30, every=0.2)
    return memory_of(stack)


async def _load(stack: Stack, requests: int, samples: list[Memory]) -> _Tally:
    tally, numbers = _Tally(), iter(range(requests))
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(_client(stack.port, numbers, tally)) for _ in range(_CLIENTS)]
        for step in range(_SAMPLES):
            while tally.all < requests * (step + 1) // _SAMPLES and not all(map(asyncio.Task.done, clients)):
                await asyncio.sleep(0.05)
            samples.append(await asyncio.to_thread(memory_of, stack))
    return tally


async def _client(port: int, numbers: Iterator[int], tally: _Tally) -> None:
    for number in numbers:
        rng = random.Random(number)
        draw = rng.random()
        body = completion(f"request {number}", max_tokens=_TOKENS, seed=number)
        if draw < 0.1:
            await leave(port, body | {"max_tokens": 200, "stream": number % 2 == 0}, rng.uniform(0, 0.02))
            tally.left += 1
        elif draw < 0.2:
            answer = await ask(port, rng.choice(_INVALID))
            tally.refused += 1
            if answer.status != 400:
                tally.wrong.append(f"an invalid request got {answer.status}: {answer.error[:200]}")
        else:
            answer = await ask(port, body)
            tally.done += 1
            if answer.status != 200 or answer.error or answer.tokens != _TOKENS or not answer.done:
                tally.wrong.append(f"{answer.status}: {answer.error[:200]}, {answer.tokens} tokens")


def _mean(samples: list[Memory]) -> Memory:
    roles = samples[0].resident.keys()
    size = len(samples)
    return Memory(
        {role: sum(one.resident.get(role, 0) for one in samples) // size for role in roles},
        sum(one.redis for one in samples) // size,
        sum(one.keys for one in samples) // size,
    )
