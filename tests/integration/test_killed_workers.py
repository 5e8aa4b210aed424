"""kill -9 of workers in the middle of generations: clients see a pause, and the text they would have seen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from common.bus.embedded import EmbeddedRedis
from common.bus.keys import CLASSES, TOKENIZERS, Keys
from tests.helpers.asking import Body, Live, Reply, chat, completion, null_text, whole
from tests.helpers.servers import BOTH, binary_of
from tests.helpers.stack import Stack
from tests.helpers.text import BUNDLED
from tests.helpers.waiting import until

KEYS = Keys()
TOKENS = 300
WORKERS = ("tokenizer", "scheduler", "detokenizer")
#: Promised is a stall of 5 s; asserted is five times that, since the machine may be a slow one.
MOST_STALL_S = 25.0
#: Events by which every stream is in the middle.
MIDDLE = 60

Record = Callable[[str, object], None]


@pytest.fixture(scope="module", params=BOTH)
def slow_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The null engine at a pace that leaves time to kill; 300 tokens take some 3 s."""
    flags = ["--engine", "null", "--null-step-ms", "10"]
    with ExitStack() as stack:
        if request.param != "valkey":
            server = stack.enter_context(EmbeddedRedis(binary=binary_of(request.param)))
            flags += ["--redis-url", server.url]
        yield stack.enter_context(Stack(*flags))


@pytest.mark.parametrize("roles", [("scheduler",), ("detokenizer",), WORKERS], ids="+".join)
def test_a_worker_dies_in_the_middle(
    slow_stack: Stack, roles: tuple[str, ...], record_property: Record
) -> None:
    port, seed = slow_stack.port, 100 + len(roles[0])
    body = completion("hello", max_tokens=TOKENS, seed=seed)
    text = null_text(seed, TOKENS)
    stop = text[250:256]
    with ThreadPoolExecutor() as pool:
        expected = {
            (text,): (body, TOKENS),
            tuple(null_text(seed + sample, TOKENS) for sample in range(3)): (body | {"n": 3}, 3 * TOKENS),
            (text[: text.index(stop)],): (
                body | {"stop": ["never said", stop]},
                text.index(stop) + len(stop),
            ),
        }
        streams = [Live(port, asked) for asked, _ in expected.values()]
        answer = pool.submit(whole, port, body)
        for live in streams:
            live.wait_for(MIDDLE)
        for role in roles:
            slow_stack.kill(role)
        for live, (texts, (_, tokens)) in zip(streams, expected.items(), strict=True):
            assert live.result().texts == texts
            assert live.result().usage == (1, tokens)
        assert answer.result().text == text
    stall = max(live.stall for live in streams)
    record_property("stall_s", round(stall, 2))
    print(f"stall after kill -9 of {roles}: {stall:.2f} s")
    assert stall < MOST_STALL_S
    slow_stack.wait_ready()


def test_a_tokenizer_dies_between_its_read_and_its_hand_off(slow_stack: Stack) -> None:
    """A job large enough to be caught in the middle of."""
    port = slow_stack.port
    prompts = [f"{number} " + "many words " * 2000 for number in range(64)]
    body = completion(prompts, max_tokens=1, seed=7)
    with slow_stack.redis() as redis, ThreadPoolExecutor() as pool:
        queues = [KEYS.work_in(p, BUNDLED, cls) for p in (0, 1) for cls in CLASSES]

        def pending() -> int:
            return sum(redis.xpending(queue, TOKENIZERS)["pending"] for queue in queues)

        answer = pool.submit(whole, port, body)
        until(pending, "the tokenizer has read it", every=0.001)
        old = slow_stack.kill("tokenizer", signal.SIGSTOP)
        assert pending(), "the job was done before it could be caught"
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        assert answer.result().texts == tuple(null_text(7, 1) for _ in prompts)
    slow_stack.wait_replaced("tokenizer", old)
    slow_stack.wait_ready()


def test_a_model_dies_in_the_middle(stack: Stack, record_property: Record) -> None:
    """Greedy and sampled text goes on as it would have gone; the weights are loaded anew meanwhile."""
    port = stack.port
    bodies: list[Body] = [
        completion("Once upon a time", max_tokens=TOKENS),
        completion("Once upon a time", max_tokens=60, temperature=0.9, seed=5, n=3, top_p=0.95),
        chat("Tell me about the sea.", max_tokens=90, temperature=0.7, seed=6, frequency_penalty=0.8),
    ]
    undisturbed = ask_all(port, bodies)
    assert undisturbed[0].usage[1] == TOKENS
    streams = [Live(port, body) for body in bodies]
    with ThreadPoolExecutor() as pool:
        answer: Future[Reply] = pool.submit(whole, port, bodies[1])
        for live in streams:
            live.wait_for(20)
        for role in WORKERS:
            stack.kill(role)
        for live, reply in zip(streams, undisturbed, strict=True):
            assert live.result(240).said == reply.said
        assert answer.result(240).said == undisturbed[1].said
    record_property("stall_s", round(max(live.stall for live in streams), 2))
    print(f"stall with weights to load: {max(live.stall for live in streams):.2f} s")
    stack.wait_ready(60)


def ask_all(port: int, bodies: list[Body]) -> list[Reply]:
    """All at the same time, since alone they would take longer and say the same."""
    streams = [Live(port, body) for body in bodies]
    return [live.result(240) for live in streams]
