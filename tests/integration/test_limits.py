"""Too much, too long, nobody there: errors that say so, before any 200 where there was none yet."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator, Mapping

import openai
import pytest
from openai import OpenAI

from tests.helpers.asking import (
    Body,
    Live,
    RefusedError,
    ask,
    chat,
    completion,
    null_text,
    open_request,
    whole,
)
from tests.helpers.inside import Inside
from tests.helpers.stack import Stack
from tests.helpers.text import BUNDLED
from tests.helpers.waiting import until

ROWS = 4


@pytest.fixture(scope="module")
def paced_stack() -> Iterator[Stack]:
    """The null engine with few rows and 20 tokens a second: easy to fill, slow to finish."""
    flags = ("--engine", "null", "--null-step-ms", "50", "--max-num-seqs", str(ROWS), "--partitions", "2")
    with Stack(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def strict_port(paced_stack: Stack) -> int:
    """An API process with narrow bounds, on the same Redis."""
    bounds = ("--max-queued-requests", "4", "--queue-timeout", "1.5", "--request-timeout", "3")
    return paced_stack.start_role("api", *bounds).port


@pytest.fixture
def inside(paced_stack: Stack) -> Iterator[Inside]:
    with paced_stack.redis() as client:
        inside = Inside(client)
        inside.wait_free(20)
        yield inside
        inside.wait_free(20)


@pytest.fixture
def client(strict_port: int) -> Iterator[OpenAI]:
    """The official client, which tries again by itself when it may."""
    with OpenAI(base_url=f"http://127.0.0.1:{strict_port}/v1", api_key="none", timeout=60) as client:
        yield client


@pytest.fixture
def full(paced_stack: Stack, inside: Inside) -> Iterator[list[socket.socket]]:
    """Every row of the engine is taken for long; closed clients make room."""
    busy = completion("long", max_tokens=8000, stream=True)
    clients = [open_request(paced_stack.port, busy) for _ in range(ROWS)]
    until(lambda: inside.scheduler().get("running") == ROWS, "all rows are taken")
    yield clients
    for client in clients:
        client.close()


def refusal(port: int, body: Body) -> tuple[int, Mapping[str, str], str]:
    """Status, headers and code of an error that came before any 200."""
    with pytest.raises(RefusedError) as refused:
        ask(port, body)
    answer = refused.value.answer
    assert answer is not None, f"an error after a 200: {refused.value.error}"
    return answer.status, answer.headers, answer.error["code"]


def assert_says_when(headers: Mapping[str, str]) -> None:
    assert 1 <= int(headers["retry-after"]) <= 60
    assert 1 <= int(headers["retry-after-ms"]) <= 60_000


def test_a_full_queue_is_429(
    paced_stack: Stack, strict_port: int, inside: Inside, full: list[socket.socket], client: OpenAI
) -> None:
    def waiting() -> list[int]:
        uids = [uid for uid in inside.in_flight() if inside.field(uid, "state") == "waiting"]
        return [sum(uid.startswith(f"{partition}-") for uid in uids) for partition in (0, 1)]

    # Each partition has its half of the bound, and requests go to either.
    while min(waiting()) < 2:
        full.append(open_request(paced_stack.port, completion("wait", max_tokens=2)))
        until(lambda: sum(waiting()) == len(full) - ROWS, "it waits")
    for stream in (False, True):
        status, headers, code = refusal(strict_port, chat("hello", stream=stream))
        assert (status, code) == (429, "rate_limit_exceeded")
        assert_says_when(headers)
    with pytest.raises(openai.RateLimitError) as refused:
        client.with_options(max_retries=0).completions.create(model=BUNDLED, prompt="hello")
    assert refused.value.code == "rate_limit_exceeded"
    assert len(inside.in_flight()) == len(full), "the refused take no place"
    for each in full:
        each.close()
    inside.wait_free(20)
    said = whole(strict_port, completion("hello", max_tokens=2, seed=1))
    assert said.text == null_text(1, 2)


def test_too_long_in_the_queue_is_503(strict_port: int, full: list[socket.socket]) -> None:
    start = time.monotonic()
    status, headers, code = refusal(strict_port, completion("hello"))
    assert (status, code) == (503, "service_unavailable")
    assert_says_when(headers)
    assert 1.5 <= time.monotonic() - start < 10


def test_a_stream_too_long_in_the_queue_ends_in_an_error(strict_port: int, full: list[socket.socket]) -> None:
    """Its headers went out once it was tokenized, so that no proxy gives up on it."""
    live = Live(strict_port, completion("hello"))
    with pytest.raises(RefusedError) as refused:
        live.result()
    assert (refused.value.answer, live.seen()) == (None, 0)
    assert refused.value.error["code"] == "service_unavailable"


def test_a_deadline_is_504(strict_port: int, inside: Inside) -> None:
    start = time.monotonic()
    status, headers, code = refusal(strict_port, completion("hello", max_tokens=8000))
    assert (status, code) == (504, "timeout")
    assert headers["x-should-retry"] == "false"
    assert 3 <= time.monotonic() - start < 15
    inside.wait_free()


def test_a_deadline_in_the_middle_of_a_stream(strict_port: int, inside: Inside) -> None:
    live = Live(strict_port, completion("hello", max_tokens=8000))
    with pytest.raises(RefusedError) as refused:
        live.result()
    assert refused.value.answer is None
    assert (refused.value.error["code"], refused.value.error["type"]) == ("timeout", "server_error")
    assert live.seen() > 10
    inside.wait_free()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_official_client_does_not_try_a_deadline_again(client: OpenAI, stream: bool) -> None:
    start = time.monotonic()
    with pytest.raises(openai.APIError) as failed:
        list(client.completions.create(model=BUNDLED, prompt="hello", max_tokens=8000, stream=stream))
    assert isinstance(failed.value, openai.InternalServerError) is not stream
    assert failed.value.code == "timeout"
    assert time.monotonic() - start < 6, "it tried again"


def test_a_scheduler_that_hangs_is_503_until_it_is_back(paced_stack: Stack) -> None:
    """New requests are refused; one that runs waits, and goes on as if nothing had been."""
    body = completion("hello", max_tokens=60, seed=9)
    live = Live(paced_stack.port, body)
    live.wait_for(5)
    (pid,) = paced_stack.kill("scheduler", signal.SIGSTOP)
    try:
        until(lambda: not paced_stack.is_ready(), "/ready says that the scheduler is gone", 20)
        for stream in (False, True):
            status, headers, code = refusal(paced_stack.port, body | {"stream": stream})
            assert (status, code) == (503, "service_unavailable")
            assert_says_when(headers)
    finally:
        paced_stack.kill("scheduler", signal.SIGCONT)
    assert live.result().text == null_text(9, 60)
    paced_stack.wait_ready()
    assert whole(paced_stack.port, body).text == null_text(9, 60)
    assert paced_stack.pids("scheduler") == [pid], "nobody declared it dead: it had no peer"
