"""An answer that takes long to put together holds up nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import orjson

from api.replies import Reply
from api.routes.generation import _collect
from common.messages import Kind, OutEntry, Request, Usage
from common.sampling import SamplingParams

TOKENS = 6_000
REPLY = {
    "model": "m",
    "created": 7,
    "fingerprint": "f",
    "usage": False,
    "running_usage": False,
    "logprobs": 20,
    "prompt_logprobs": 20,
    "echo": True,
}


class Ended:
    """A reply whose entries have all come."""

    request = Request("0-" + "a" * 32, Kind.COMPLETION, "m", SamplingParams(), {}, REPLY, choices=1)
    restarts = 0

    async def pour(self, take: Callable[[list[OutEntry]], bool]) -> None:
        raise AssertionError("nothing more comes")


def entries() -> list[OutEntry]:
    best = [[f" {rank}", -1.5 - rank, rank] for rank in range(20)]
    row = orjson.dumps({"id": 9, "token": " 9", "logprob": -0.5, "at": 0, "top": best}).decode()
    stretches = [f'{{"from":{at},"end":0,"rows":[{",".join([row] * 100)}]}}' for at in range(0, TOKENS, 100)]
    end: dict[str, Any] = {"finish": "length", "end": "done", "usage": Usage(TOKENS, 1, 0)}
    return [
        OutEntry("1-0", accepted=TOKENS, echo='[["x",0]]'),
        *(OutEntry("2-0", 0, prompt_logprobs=stretch) for stretch in stretches),
        OutEntry("3-0", 0, 1, 0, "x", **end),
    ]


def test_others_go_on_while_it_is_put_together() -> None:
    asyncio.run(_others_go_on())


async def _others_go_on() -> None:
    gaps: list[float] = []

    async def others() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    turning = asyncio.create_task(others())
    await asyncio.sleep(0)
    begun = time.monotonic()
    body = await _collect(cast("Reply", Ended()), entries())
    took = time.monotonic() - begun
    await asyncio.sleep(0)
    turning.cancel()
    assert len(orjson.loads(body)["choices"][0]["prompt_logprobs"]) == TOKENS
    assert max(gaps) < took / 3
