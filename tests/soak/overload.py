"""Ten times more requests than can be served: who is admitted is served in time, the others are told at once.

The null engine's pace and the number of its rows set the capacity, so that both sides have cores to spare.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from tests.helpers.asking import completion
from tests.helpers.stack import Stack
from tests.soak.client import Answer, ask
from tests.soak.measure import Memory, Row, exactly, flat, memory_of, quantile, told, within

STEP_MS, ROWS = 20.0, 32
#: Answers differ in length, as real ones do, from so many tokens to so many: else all rows end at once.
SHORTEST, LONGEST = 64, 192
#: Requests a second that the engine can finish.
CAPACITY = ROWS * 1000 / STEP_MS / ((SHORTEST + LONGEST) / 2)
_CALM = 0.5
_FACTOR = 10
#: Replies go away within the run, or Redis would grow by them.
_FLAGS = (
    "--engine", "null", "--null-step-ms", str(STEP_MS), "--max-num-seqs", str(ROWS), "--reply-ttl", "3"
)  # fmt: skip
_MOST_GROWTH = 8 << 20
_REFUSED_S = 0.1


def run(seconds: float, *, slack: float = 1.0) -> list[Row]:
    """``slack`` multiplies the bounds that are times."""
    with Stack(*_FLAGS) as stack:
        calm = asyncio.run(_offer(stack.port, CAPACITY * _CALM, max(3.0, seconds / 4)))
        warm_s = max(2.0, seconds / 6)
        before, flood, after = asyncio.run(_flood(stack, warm_s, seconds))
    assert all(answer.status == 200 for answer in calm), "refused without need"
    served = [answer for answer in flood if answer.status == 200]
    refused = [answer for answer in flood if answer.status == 429]
    wrong = [answer for answer in flood if answer.status not in (200, 429)]
    wrong += [answer for answer in served if answer.error or not answer.done or not answer.tokens]
    rows = [
        told("offered, of the capacity", f"{len(flood) / seconds / CAPACITY:.1f} times for {seconds:.0f} s"),
        told("admitted / refused", f"{len(served)} / {len(refused)}"),
        exactly("anything else", len(wrong), 0),
        Row(
            "served, of the capacity", f"{len(served) / seconds / CAPACITY:.2f}", ">= 0.8",
            len(served) / seconds / CAPACITY >= 0.8,
        ),
    ]  # fmt: skip
    for name, what in (("whole answer", "seconds"), ("time per token", "tpot")):
        usual = quantile([getattr(answer, what) for answer in calm], 0.99)
        loaded = quantile([getattr(answer, what) for answer in served], 0.99)
        rows.append(told(f"{name}, p99, uncongested", f"{1000 * usual:.0f} ms"))
        rows.append(within(f"{name}, p99, admitted", 1000 * loaded, 2000 * usual * slack, "ms"))
    rows.append(_first_tokens(calm, served))
    waits = [answer.seconds for answer in refused]
    rows.append(told("refusals, p50", f"{1000 * quantile(waits, 0.5):.1f} ms"))
    rows.append(within("refusals, p99", 1000 * quantile(waits, 0.99), 1000 * _REFUSED_S * slack, "ms"))
    rows.append(told("refusals, longest", f"{1000 * max(waits, default=0):.0f} ms"))
    return rows + flat("grown after the warm-up", after.growth(before), _MOST_GROWTH)


def _first_tokens(calm: Sequence[Answer], served: Sequence[Answer]) -> Row:
    usual, loaded = (quantile([answer.ttft for answer in some], 0.99) for some in (calm, served))
    return told("first token, p99, uncongested / admitted", f"{1000 * usual:.0f} / {1000 * loaded:.0f} ms")


async def _flood(stack: Stack, warm_s: float, seconds: float) -> tuple[Memory, list[Answer], Memory]:
    rate = CAPACITY * _FACTOR
    await _offer(stack.port, rate, warm_s)
    before = await asyncio.to_thread(memory_of, stack)
    flood = await _offer(stack.port, rate, seconds)
    return before, flood, await asyncio.to_thread(memory_of, stack)


async def _offer(port: int, rate: float, seconds: float) -> list[Answer]:
    """``rate`` requests a second, whatever becomes of them."""
    rng = random.Random(7)
    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            tokens, seed = rng.randint(SHORTEST, LONGEST), rng.randrange(1 << 40)
            body = completion("overload", max_tokens=tokens, seed=seed)
            tasks.append(group.create_task(ask(port, body)))
    return [task.result() for task in tasks]
