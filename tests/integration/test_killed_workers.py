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
from tests.helpers.asking import Body, Live, Reply, chat, completion, null_text, open_request, whole
from tests.helpers.inside import Inside
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
#: Checks what came out, and returns the longest pause in seconds.
Check = Callable[[], float]


@pytest.fixture(scope="module", params=BOTH)
def slow_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The null engine at a pace that leaves time to kill; 300 tokens take some 3 s."""
    flags = ["--engine", "null", "--null-step-ms", "10", "--partitions", "2"]
    with ExitStack() as stack:
        if request.param != "valkey":
            server = stack.enter_context(EmbeddedRedis(binary=binary_of(request.param)))
            flags += ["--redis-url", server.url]
        yield stack.enter_context(Stack(*flags))


def cut(text: str, stop: str) -> str:
    return text.partition(stop)[0]


def used(text: str, stop: str) -> int:
    """Tokens up to the one that completed the stop string; the null engine's are one character each."""
    return text.index(stop) + len(stop) if stop in text else len(text)


@pytest.fixture
def generations(slow_stack: Stack) -> Iterator[Callable[[int], Check]]:
    """Starts four streams and waits until they are in the middle; the function it gives checks their ends."""

    def start(seed: int) -> Check:
        port, body = slow_stack.port, completion("hello", max_tokens=TOKENS, seed=seed)
        texts = [null_text(seed + sample, TOKENS) for sample in range(3)]
        stop = texts[1][200:203]
        expected = [
            (body, (texts[0],), TOKENS),
            (body | {"n": 3}, tuple(texts), 3 * TOKENS),
            (body | {"stop": ["never said", texts[0][250:256]]}, (cut(texts[0], texts[0][250:256]),), 256),
            (
                body | {"n": 3, "stop": stop},
                tuple(cut(text, stop) for text in texts),
                sum(used(text, stop) for text in texts),
            ),
        ]
        streams = [Live(port, asked) for asked, _, _ in expected]
        for live in streams:
            live.wait_for(MIDDLE)

        def check() -> float:
            for live, (_, said, tokens) in zip(streams, expected, strict=True):
                reply = live.result()
                assert (reply.texts, reply.usage) == (said, (1, tokens))
            return max(live.stall for live in streams)

        return check

    yield start
    slow_stack.wait_ready()
    with slow_stack.redis() as client:
        Inside(client).wait_free(10)


@pytest.mark.parametrize("roles", [("scheduler",), ("detokenizer",), WORKERS], ids="+".join)
def test_a_process_dies_in_the_middle(
    slow_stack: Stack, generations: Callable[[int], Check], roles: tuple[str, ...], record_property: Record
) -> None:
    kill_in_the_middle(slow_stack, generations, roles, record_property)


@pytest.mark.parametrize("slow_stack", ["valkey"], indirect=True)
def test_redis_dies_in_the_middle(
    slow_stack: Stack, generations: Callable[[int], Check], record_property: Record
) -> None:
    """The stack's own, which it starts again."""
    kill_in_the_middle(slow_stack, generations, ("redis",), record_property)


def kill_in_the_middle(
    slow_stack: Stack, generations: Callable[[int], Check], roles: tuple[str, ...], record_property: Record
) -> None:
    seed = 100 * len(roles) + len(roles[0])
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(whole, slow_stack.port, completion("hello", max_tokens=TOKENS, seed=seed))
        check = generations(seed)
        for role in roles:
            slow_stack.kill(role)
        stall = check()
        assert answer.result().text == null_text(seed, TOKENS)
    record_property("stall_s", round(stall, 2))
    print(f"stall after kill -9 of {roles}: {stall:.2f} s")
    assert stall < MOST_STALL_S


@pytest.mark.parametrize("slow_stack", ["valkey"], indirect=True)
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_process_is_told_to_stop_in_the_middle(
    slow_stack: Stack, generations: Callable[[int], Check], role: str
) -> None:
    """As in an upgrade: it finishes, or hands over, and its successor goes on."""
    check = generations(11)
    old = slow_stack.kill(role, signal.SIGTERM)
    check()
    slow_stack.wait_replaced(role, old)


@pytest.mark.parametrize("slow_stack", ["valkey"], indirect=True)
def test_a_scheduler_and_its_clients_go_at_once(slow_stack: Stack) -> None:
    """Its successor finds requests that nobody wants."""
    with slow_stack.redis() as client:
        inside = Inside(client)
        endless = completion("hello", max_tokens=8000, n=2, stream=True)
        clients = [open_request(slow_stack.port, endless) for _ in range(3)]
        until(
            lambda: len(inside.in_flight()) == 3 and all(map(inside.generated, inside.in_flight())),
            "they run",
        )
        old = slow_stack.kill("scheduler")
        for each in clients:
            each.close()
        slow_stack.wait_replaced("scheduler", old)
        inside.wait_free(15)
    slow_stack.wait_ready()


@pytest.mark.parametrize("slow_stack", ["valkey"], indirect=True)
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
        completion("Once upon a time", max_tokens=50),
        completion("Once upon a time", max_tokens=25, temperature=0.9, seed=5, n=2, top_p=0.95),
        chat("Tell me about the sea.", max_tokens=40, temperature=0.7, seed=6, frequency_penalty=0.8),
    ]
    undisturbed = ask_all(port, bodies)
    assert [reply.usage[1] for reply in undisturbed] == [50, 50, 40], "they say enough to be in the middle of"
    streams = [Live(port, body) for body in bodies]
    with ThreadPoolExecutor() as pool:
        answer: Future[Reply] = pool.submit(whole, port, bodies[1])
        for live in streams:
            live.wait_for(8)
        for role in WORKERS:
            stack.kill(role)
        assert all(live.seen() < 40 for live in streams), "they are in the middle"
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
