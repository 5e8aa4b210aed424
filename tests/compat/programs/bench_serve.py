"""The requests that `vllm bench serve` sends with random prompts, read and counted as it does."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time

import aiohttp

URL, MODEL = os.environ["COMPAT_URL"] + "/v1/completions", os.environ["COMPAT_MODEL"]
REQUESTS, RATE, INPUT, OUTPUT = 200, 60.0, 64, 48


async def one(session: aiohttp.ClientSession, ids: list[int]) -> tuple[int, float, float]:
    """One stream: output tokens, seconds to the first of them, seconds between two."""
    body = {
        "model": MODEL,
        "prompt": ids,
        "repetition_penalty": 1.0,
        "temperature": 0.0,
        "max_tokens": OUTPUT,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    begun = time.perf_counter()
    first = last = 0.0
    tokens = 0
    buffer = b""
    headers = {"Authorization": "Bearer none"}
    async with session.post(URL, json=body, headers=headers) as response:
        response.raise_for_status()
        async for chunk in response.content.iter_any():
            buffer += chunk
            while b"\n\n" in buffer:
                message, _, buffer = buffer.partition(b"\n\n")
                data = message.decode().removeprefix("data: ")
                if data == "[DONE]":
                    continue
                event = json.loads(data)
                if event["choices"]:
                    last = time.perf_counter()
                    first = first or last
                elif usage := event.get("usage"):
                    tokens = usage["completion_tokens"]
    return tokens, first - begun, (last - first) / max(1, tokens - 1)


async def main() -> None:
    """All of them, at times of a Poisson process."""
    draw = random.Random(0)
    tasks = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        for _ in range(REQUESTS):
            ids = [draw.randrange(17, 49_000) for _ in range(INPUT)]
            tasks.append(asyncio.create_task(one(session, ids)))
            await asyncio.sleep(draw.expovariate(RATE))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    good = [each for each in ended if not isinstance(each, BaseException)]
    for each in ended:
        if isinstance(each, BaseException):
            print(repr(each))
    said = {
        "requests": REQUESTS,
        "failed": REQUESTS - len(good),
        "output_tokens": sum(tokens for tokens, _, _ in good),
        "wanted_tokens": REQUESTS * OUTPUT,
        "median_ttft_ms": statistics.median(first for _, first, _ in good) * 1000 if good else 0,
        "median_tpot_ms": statistics.median(each for _, _, each in good) * 1000 if good else 0,
    }
    print(json.dumps(said))


asyncio.run(main())
