"""Clients that do not read: they slow their own request, nobody else, and not for ever."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.helpers.asking import Live, completion, null_text, open_request
from tests.helpers.inside import Inside
from tests.helpers.stack import Stack, role_of
from tests.helpers.waiting import until

#: At two milliseconds a token its events fill every buffer on the way within seconds.
LONG = 5000
PATIENCE_S = 4.0


@pytest.fixture
def quick(start_stack: Callable[..., Stack]) -> Stack:
    return start_stack("--engine", "null", "--null-step-ms", "2", "--slow-reader-timeout", str(PATIENCE_S))


@pytest.fixture
def inside(quick: Stack) -> Iterator[Inside]:
    with quick.redis() as client:
        yield Inside(client)


def _stuck(port: int) -> socket.socket:
    """A stream that nobody reads, with the smallest buffer the system gives."""
    return open_request(port, completion("word", max_tokens=LONG, seed=5, stream=True), receive=4096)


def _read_to_the_end(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def _is_paused(inside: Inside, uid: str) -> bool:
    return any(inside.redis.sismember(inside.keys.pause(p), uid) for p in inside.partitions)


def _api_memory(stack: Stack) -> int:
    [api] = [process for process in stack.processes() if role_of(process) == "api"]
    return int(psutil.Process(api.pid).memory_info().rss)


def test_a_reader_that_stops_pauses_its_request_and_gets_all_of_it_later(
    quick: Stack, inside: Inside
) -> None:
    connection = _stuck(quick.port)
    uid = inside.only()
    until(lambda: _is_paused(inside, uid), "it is paused", 30)
    until(lambda: inside.scheduler()["paused"] == 1, "its row stands still", 10)
    before = inside.generated(uid)
    assert before < LONG

    other = Live(quick.port, completion("word", max_tokens=300, seed=7))
    assert other.result(30).texts == (null_text(7, 300),)
    assert inside.generated(uid) == before, "nothing is made for who does not read"

    received = bytearray()
    connection.settimeout(30)
    while b"[DONE]" not in received[-200:]:
        data = connection.recv(1 << 16)
        assert data, received[-500:]
        received += data
    connection.close()
    events = [json.loads(line[6:]) for line in bytes(received).split(b"\n") if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == null_text(5, LONG)
    until(lambda: not inside.held(), "nothing is left", 10)


def test_a_reader_that_stays_behind_is_cut_off(quick: Stack, inside: Inside) -> None:
    connections = [_stuck(quick.port) for _ in range(3)]
    until(lambda: len(inside.in_flight()) == 3, "all run")
    uids = inside.in_flight()
    until(lambda: all(_is_paused(inside, uid) for uid in uids), "all are paused", 30)
    memory, since = _api_memory(quick), time.monotonic()
    until(lambda: not inside.held(), "their requests are ended", 5 * PATIENCE_S)
    assert time.monotonic() - since >= PATIENCE_S / 2, "not before its time"
    assert _api_memory(quick) - memory < 8 << 20
    for connection in connections:
        connection.settimeout(10)
        with pytest.raises(ConnectionResetError):
            _read_to_the_end(connection)
        connection.close()
    assert "stayed behind" in quick.logs()
