"""A hundred clients that read a kilobyte a second, beside ten that read: the slow ones slow only themselves.

Their streams are long, and their connections' segments as short as over the Internet, so that what is sent
to them fills every buffer on the way. Then their rows must be paused, and the API must hold little for them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from tests.helpers.asking import Body, completion
from tests.helpers.inside import Inside
from tests.helpers.stack import Stack
from tests.soak.client import Answer, ask, read_slowly
from tests.soak.measure import Memory, Row, exactly, memory_of, told, within

_STEP_MS, _TOKENS = 20.0, 8000
_NORMAL, _NORMAL_TOKENS = 10, 100
_BYTES_PER_S = 1024
_FLAGS = ("--engine", "null", "--null-step-ms", str(_STEP_MS))
#: Of the API's memory, for each slow connection.
_MOST_KB = 512
_MORE = 1.2
_LOOK_S = 0.5


def run(slow: int, seconds: float, *, slack: float = 1.0) -> list[Row]:
    """Within ``seconds`` they must have filled what is between them and their scheduler."""
    with Stack(*_FLAGS) as stack, stack.redis() as client:
        inside = Inside(client)
        return asyncio.run(_scenes(stack, inside, slow, seconds, slack))


async def _scenes(stack: Stack, inside: Inside, slow: int, seconds: float, slack: float) -> list[Row]:
    alone = await _normal(stack.port)
    before = await asyncio.to_thread(memory_of, stack)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        readers = [
            group.create_task(read_slowly(stack.port, _long(number), bytes_per_s=_BYTES_PER_S, stop=stop))
            for number in range(slow)
        ]
        busy = await _normal(stack.port)
        await _all_paused(inside, slow, seconds)
        beside = await _normal(stack.port)
        after = await asyncio.to_thread(memory_of, stack)
        paused, generated = await asyncio.to_thread(_progress, inside)
        stop.set()
    await asyncio.to_thread(inside.wait_free, 30.0)
    read = sum(reader.result() for reader in readers)
    return [
        told("slow readers / bytes each has read", f"{slow} / {read // max(1, slow)}"),
        exactly("normal streams that failed", sum(_failed(answer) for answer in (*alone, *busy, *beside)), 0),
        told("time per token, alone", f"{1000 * _tpot(alone):.1f} ms"),
        *[
            within(f"time per token, {name}", 1000 * _tpot(some), 1000 * _tpot(alone) * _MORE * slack, "ms")
            for name, some in (("while they still run", busy), ("beside them, paused", beside))
        ],
        within("API memory per slow connection", _per_connection(before, after, slow), _MOST_KB, "KB"),
        Row("rows that are paused", f"{paused} of {slow}", f">= {slow}", paused >= slow),
        told("tokens generated for a slow reader, median", generated),
    ]


async def _all_paused(inside: Inside, slow: int, seconds: float) -> None:
    """Waits until the rows of all slow readers are paused, or the time is over."""
    for _ in range(int(seconds / _LOOK_S)):
        if (await asyncio.to_thread(_progress, inside))[0] >= slow:
            return
        await asyncio.sleep(_LOOK_S)


def _progress(inside: Inside) -> tuple[int, int]:
    """How many requests are paused, and how far those in flight have come."""
    paused = sum(inside.redis.scard(inside.keys.pause(partition)) for partition in inside.partitions)
    generated = [inside.generated(uid) for uid in inside.in_flight()]
    return paused, int(statistics.median(generated or [0]))


def _long(number: int) -> Body:
    """A long answer in large events."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    return completion("slow", max_tokens=_TOKENS, seed=number, ignore_eos=True, stream_options=options)


async def _normal(port: int) -> list[Answer]:
    bodies = [completion("normal", max_tokens=_NORMAL_TOKENS, seed=1000 + n) for n in range(_NORMAL)]
    return list(await asyncio.gather(*(ask(port, body) for body in bodies)))


def _failed(answer: Answer) -> bool:
    return answer.status != 200 or bool(answer.error) or not answer.done


def _tpot(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.tpot for answer in answers)


def _per_connection(before: Memory, after: Memory, slow: int) -> float:
    return (after.resident["api"] - before.resident["api"]) / 1024 / max(1, slow)
