"""What docs/redis-cli.md promises: everything in Redis is text, goes away by itself, and can be steered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.helpers.asking import Live, RefusedError, ask, chat, completion, null_text, open_request, whole
from tests.helpers.inside import Inside
from tests.helpers.stack import Stack
from tests.helpers.waiting import until

LONG = 8000


@pytest.fixture(scope="module")
def paced_stack() -> Iterator[Stack]:
    """The null engine with two rows, at a pace that leaves time to steer."""
    with Stack("--engine", "null", "--null-step-ms", "20", "--max-num-seqs", "2") as running:
        yield running


@pytest.fixture
def inside(paced_stack: Stack) -> Iterator[Inside]:
    with paced_stack.redis() as client:
        inside = Inside(client)
        inside.wait_free(20)
        yield inside
        inside.wait_free(20)


def flag(inside: Inside, key: Any, uid: str) -> str:
    """What somebody at redis-cli would type after SADD or SREM: the key of the uid's partition."""
    return str(key(int(uid.partition("-")[0])))


@pytest.mark.parametrize("n", [1, 2])
def test_cancelling_a_stream_by_hand(paced_stack: Stack, inside: Inside, n: int) -> None:
    live = Live(paced_stack.port, completion("hello", max_tokens=LONG, n=n))
    live.wait_for(5)
    inside.redis.sadd(flag(inside, inside.keys.cancel, live.id), live.id)
    with pytest.raises(RefusedError) as refused:
        live.result(10)
    assert refused.value.answer is None
    assert refused.value.error["code"] == "cancelled"


def test_cancelling_an_answer_by_hand(paced_stack: Stack, inside: Inside) -> None:
    connection = open_request(paced_stack.port, completion("hello", max_tokens=LONG))
    uid = inside.only()
    until(lambda: inside.generated(uid), "it runs")
    inside.redis.sadd(flag(inside, inside.keys.cancel, uid), uid)
    with connection:
        got = b""
        while piece := connection.recv(65536):
            got += piece
            if b'"cancelled"' in got:
                break
    assert got.startswith(b"HTTP/1.1 499 ")
    assert b'{"error":{"message":' in got


def test_cancelling_in_the_queue_by_hand(paced_stack: Stack, inside: Inside) -> None:
    busy = [Live(paced_stack.port, completion("busy", max_tokens=200, seed=seed)) for seed in (1, 2)]
    for live in busy:
        live.wait_for(1)
    known = {live.id for live in busy}
    waiting = Live(paced_stack.port, completion("hello"))
    (uid,) = until(lambda: set(inside.in_flight()) - known, "it waits")
    inside.redis.sadd(flag(inside, inside.keys.cancel, uid), uid)
    with pytest.raises(RefusedError) as refused:
        waiting.result(10)
    assert refused.value.error["code"] == "cancelled"
    for seed, live in zip((1, 2), busy, strict=True):
        assert live.result().text == null_text(seed, 200)


def test_pausing_by_hand(paced_stack: Stack, inside: Inside) -> None:
    live = Live(paced_stack.port, completion("hello", max_tokens=150, seed=4))
    other = Live(paced_stack.port, completion("hello", max_tokens=150, seed=5))
    live.wait_for(10)
    pauses = flag(inside, inside.keys.pause, live.id)
    inside.redis.sadd(pauses, live.id)
    until(lambda: inside.scheduler()["paused"] == 1, "it is paused", 5)
    seen = live.seen()
    assert seen < 140
    assert other.result().text == null_text(5, 150), "others are not"
    time.sleep(0.5)  # nothing can be waited for: it is about what does not happen
    assert live.seen() <= seen + 1
    inside.redis.srem(pauses, live.id)
    assert live.result().text == null_text(4, 150)


def texts(client: redis.Redis, key: bytes) -> Iterator[bytes]:
    """Every name and value in a key."""
    match client.type(key):
        case b"string":
            yield client.get(key)
        case b"hash":
            for name, value in client.hgetall(key).items():
                yield from (name, value)
        case b"set":
            yield from client.smembers(key)
        case b"zset":
            yield from client.zrange(key, 0, -1)
        case b"stream":
            for _, fields in client.xrange(key):
                for name, value in fields.items():
                    yield from (name, value)
        case other:
            raise AssertionError(f"{key!r} is a {other!r}")


def test_everything_is_text_and_goes_away(stack: Stack, paced_stack: Stack) -> None:
    port = stack.port
    for body in (
        completion("日本語日本語日本語\x00\x1b[31m", max_tokens=4, n=2, temperature=1, seed=3),
        chat("Say 🙂\n\ttwice", max_tokens=6, stop=["\n"], stream=True, logit_bias={"30": 1.5}),
        completion([[504, 3575], [260]], max_tokens=2),
    ):
        ask(port, body)
    with pytest.raises(RefusedError):
        whole(port, completion("word " * 9000))
    running = Live(paced_stack.port, completion("running", max_tokens=100))
    running.wait_for(1)
    requests = 0
    for each in (stack, paced_stack):
        with redis.Redis.from_url(each.redis_url, socket_timeout=10) as client:
            for key in client.keys("*"):
                name = key.decode("ascii")
                assert name.isprintable()
                left = client.pttl(key)
                if left == -2 or 0 <= left < 1000:  # of an earlier test, and gone by now or soon
                    continue
                for value in texts(client, key):
                    value.decode("utf-8")
                if name.split(":")[2:3] and name.split(":")[2] in {"req", "gen", "out", "idem"}:
                    assert left > 0, name
                    requests += 1
    assert requests >= 3 * 4
    running.result()
