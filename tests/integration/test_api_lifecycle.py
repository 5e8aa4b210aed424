"""Requests that do not end the usual way: clients that leave, deadlines, failures, shutdowns."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import WorkerCrashedError
from common.messages import Request
from tests.helpers.api_process import ApiProcess, Stage, stage
from tests.helpers.fake_workers import Play
from tests.helpers.waiting import until

BODY: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}]}
STREAM = BODY | {"stream": True}
CHAT = "/v1/chat/completions"


class Director:
    """Scripts whose tokens come when the test says so: ``gate`` opened, or one for each `go`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self._tokens = threading.Semaphore(0)
        self.play = Play(texts=("a", "b", "c", "d"), before=self._wait)

    def __call__(self, request: Request) -> Play:
        return self.play

    def go(self, tokens: int = 1) -> None:
        for _ in range(tokens):
            self._tokens.release()

    def _wait(self, request: Request, index: int) -> None:
        while not self.gate.is_set() and not self._tokens.acquire(timeout=0.01):
            pass


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One stage for all tests that leave it as they found it."""
    with stage(tmp_path_factory.mktemp("lifecycle")) as running:
        yield running


@pytest.fixture
def director() -> Iterator[Director]:
    director = Director()
    yield director
    director.gate.set()


@pytest.fixture
def directed(running: Stage, director: Director) -> Iterator[Stage]:
    """The shared stage, with the director's script; it must end empty and without a traceback."""
    running.workers.script = director
    running.workers.seen.clear()
    running.workers.cancelled.clear()
    yield running
    director.gate.set()
    running.workers.working = True
    until(lambda: nothing_is_left(running), "nothing is left", 5)
    assert "Traceback" not in running.api.log()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    got = b""
    while end not in got:
        piece = connection.recv(65536)
        assert piece, got
        got += piece
    return got


def nothing_is_left(running: Stage) -> bool:
    """No place in a queue is taken, no work waits, and no flag is set."""
    bus, keys = running.workers.bus, running.workers.keys
    work = [running.workers._stream(kind, p) for kind in ("in", "sched") for p in (0, 1)]
    flags = [key for p in (0, 1) for key in (keys.inflight(p, "test-model", "interactive"), keys.cancel(p))]
    return not any(bus.do("EXISTS", key) for key in flags) and not any(bus.do("XLEN", s) for s in work)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", ["queued", "before the first token", "after the first token"])
def test_a_client_that_leaves(directed: Stage, director: Director, moment: str, body: Any, n: int) -> None:
    workers = directed.workers
    if moment == "queued":
        workers.pause()
    connection = directed.api.open(CHAT, body | {"n": n})
    if moment == "queued":
        waiting = [workers._stream("in", p) for p in (0, 1)]
        until(lambda: sum(workers.bus.do("XLEN", s) for s in waiting), "it waits")
    else:
        until(lambda: workers.seen, "it is tokenized")
        uid = workers.seen[0].uid
        until(lambda: workers.bus.do("HGET", workers.keys.req(uid), "state") == b"running", "it runs")
        if moment == "after the first token":
            director.go()  # one of the choices takes it
            logs = [workers.keys.gen(uid, choice) for choice in range(n)]
            until(lambda: any(workers.bus.do("STRLEN", log) for log in logs), "it has a token")
    connection.close()
    if moment == "queued":
        places = [workers.keys.inflight(p, "test-model", "interactive") for p in (0, 1)]
        until(lambda: not any(workers.bus.do("EXISTS", key) for key in places), "its place is free", 5)
        workers.working = True
    else:
        flags = [workers.keys.cancel(p) for p in (0, 1)]
        until(lambda: any(workers.bus.do("SMEMBERS", f) for f in flags), "it is flagged", 5)
        director.gate.set()
        # A choice that had not been started when the first one ended is dropped instead.
        until(lambda: workers.cancelled, "its choices are cancelled", 5)
        until(lambda: nothing_is_left(directed), "nothing is left", 5)
    director.gate.set()
    assert directed.api.chat("x").status == 200
    assert len(workers.seen) <= 2


def test_a_client_that_resets_the_connection(directed: Stage, director: Director) -> None:
    connection = directed.api.open(CHAT, STREAM)
    director.go()
    read_until(connection, b'"content":"a"')
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    flags = [directed.workers.keys.cancel(p) for p in (0, 1)]
    until(lambda: any(directed.workers.bus.do("SMEMBERS", f) for f in flags), "it is flagged", 5)
    director.gate.set()
    until(lambda: directed.workers.cancelled, "it is cancelled", 5)


def test_opening_and_closing_leaves_nothing(directed: Stage, director: Director) -> None:
    director.gate.set()
    for number in range(100):
        connection = directed.api.open(CHAT, STREAM if number % 2 else BODY)
        if number % 3 == 0:
            connection.recv(10)
        connection.close()
    until(lambda: nothing_is_left(directed), "nothing is left", 15)
    until(lambda: live_requests(directed) == 0, "the API process knows of none")
    assert directed.api.chat("x").status == 200


def live_requests(running: Stage) -> int:
    workers = running.workers
    text = workers.bus.do("GET", workers.keys.worker(api_id(running)))
    return int(json.loads(text)["stats"]["live"])


def api_id(running: Stage) -> str:
    workers = running.workers.bus.do("SMEMBERS", running.workers.keys.workers())
    return next(worker.decode() for worker in workers if worker.startswith(b"api-"))


def test_the_first_event_does_not_wait_for_the_second_token(tmp_path: Path, director: Director) -> None:
    with stage(tmp_path, script=director) as running, running.api.open(CHAT, STREAM) as connection:
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 200"), (
            "headers come with the admission"
        )
        for text in (b'"a"', b'"b"', b'"c"'):
            director.go()
            read_until(connection, b'"content":' + text)
        director.gate.set()
        read_until(connection, b"[DONE]")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_in_the_middle(directed: Stage, director: Director, stream: bool) -> None:
    director.play = Play(texts=("a", "b"), error=WorkerCrashedError("Three workers crashed."))
    got = directed.api.chat("x", stream=stream)
    if not stream:
        assert (got.status, got.error["code"]) == (500, "worker_crashed")
        assert got.headers["x-should-retry"] == "false"
        return
    *_, failure, done = got.events()
    assert failure == {
        "error": {
            "message": "Three workers crashed.",
            "type": "server_error",
            "param": None,
            "code": "worker_crashed",
        }
    }
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_cancelled_by_hand(directed: Stage, stream: bool) -> None:
    """With `SADD ms:{p}:cancel <uid>`, while no scheduler has it: the sweep ends it."""
    bus, keys = directed.workers.bus, directed.workers.keys
    directed.workers.pause()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(directed.api.chat, "x", stream=stream)
        streams = {p: directed.workers._stream("in", p) for p in (0, 1)}
        until(lambda: sum(bus.do("XLEN", s) for s in streams.values()), "it waits")
        partition = next(p for p, s in streams.items() if bus.do("XLEN", s))
        uid = bus.do("XRANGE", streams[partition], "-", "+")[0][1][1]
        bus.do("SADD", keys.cancel(partition), uid)
        got = answer.result(10)
    assert (got.status, got.error["code"]) == (499, "cancelled")


def test_nobody_takes_it_from_the_queue(tmp_path: Path) -> None:
    with stage(tmp_path, "--queue-timeout", "0.5", working=False) as running, ThreadPoolExecutor(2) as pool:
        for got in pool.map(lambda stream: running.api.chat("x", stream=stream), (False, True)):
            assert (got.status, got.error["code"]) == (503, "service_unavailable")
            assert 1 <= int(got.headers["retry-after"]) <= 30
        running.workers.working = True
        until(lambda: nothing_is_left(running), "nothing is left", 5)


def test_a_deadline_in_the_middle(tmp_path: Path, director: Director) -> None:
    """The scheduler is asked to stop; it does not, and the API process has the last word."""
    with stage(tmp_path, "--request-timeout", "1", script=director) as running:
        director.go(2)
        begun = time.monotonic()
        *_, failure, done = running.api.chat("x", stream=True).events()
        assert 1 < time.monotonic() - begun < 10
        assert (failure["error"]["code"], done) == ("timeout", "[DONE]")
        director.gate.set()
        until(lambda: nothing_is_left(running), "nothing is left", 5)


def test_a_deadline_that_only_the_api_sees(tmp_path: Path) -> None:
    """No worker takes it, and the sweep looks elsewhere: 504 all the same, before any 200."""
    with stage(tmp_path, "--request-timeout", "2", working=False) as running, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(running.api.chat, "x", stream=stream) for stream in (False, True)]
        streams = [running.workers._stream("in", p) for p in (0, 1)]
        until(lambda: sum(running.workers.bus.do("XLEN", s) for s in streams) == 2, "both wait")
        running.workers.bus.do("DEL", running.workers.keys.models())
        for answer in answers:
            got = answer.result(20)
            assert (got.status, got.error["code"]) == (504, "timeout")
            assert got.headers["x-should-retry"] == "false"


def test_redis_restarts_in_the_middle(tmp_path: Path, director: Director) -> None:
    with stage(tmp_path, script=director) as running, running.api.open(CHAT, STREAM) as connection:
        director.go()
        read_until(connection, b'"content":"a"')
        time.sleep(1.2)  # longer than everysec
        running.workers.pause()
        running.redis.kill()
        time.sleep(0.5)
        running.redis.start()
        director.gate.set()
        rest = read_until(connection, b"[DONE]")
        assert rest.count(b'"content":"b"') == 1
        assert b'"finish_reason":"stop"' in rest


def test_a_redis_that_forgot_everything(tmp_path: Path) -> None:
    """Requests are put back, since nothing of their text was sent (B11)."""
    with stage(tmp_path, working=False) as running, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(running.api.chat, "x", stream=stream) for stream in (False, True)]
        streams = [running.workers._stream("in", p) for p in (0, 1)]
        until(lambda: sum(running.workers.bus.do("XLEN", s) for s in streams) == 2, "both wait")
        running.workers.bus.do("FLUSHALL")
        running.workers.prepare()
        running.workers.working = True
        for answer in answers:
            got = answer.result(20)
            assert got.status == 200
            assert b"Hello" in got.body


def test_a_redis_that_forgot_a_begun_stream(tmp_path: Path, director: Director) -> None:
    with stage(tmp_path, script=director) as running, running.api.open(CHAT, STREAM) as connection:
        director.go()
        read_until(connection, b'"content":"a"')
        running.workers.bus.do("FLUSHALL")
        rest = read_until(connection, b"[DONE]")
        assert b'"error":{"message":"The request was lost' in rest
        director.gate.set()
        running.workers.forget_failure()


def test_a_slow_reader_gets_everything(directed: Stage, director: Director) -> None:
    """More than every buffer on the way holds: the kernel's, uvicorn's, and that of the reply."""
    text, tokens = "0123456789" * 1600, 600
    director.play = Play(texts=(text,) * tokens)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", directed.api.port))
        data = json.dumps(STREAM).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        time.sleep(1.5)
        director.play = Play()
        assert directed.api.chat("x").status == 200, "it slows nobody else"
        got = http.client.HTTPResponse(connection)
        got.begin()
        body = got.read()
    assert body.count(text.encode()) == tokens
    assert body.endswith(b"data: [DONE]\n\n")


def stop(api: ApiProcess, number: signal.Signals = signal.SIGTERM) -> None:
    assert api.process is not None
    os.kill(api.process.pid, number)


def test_a_shutdown_finishes_what_runs(tmp_path: Path, director: Director) -> None:
    with stage(tmp_path, script=director) as running, running.api.open(CHAT, STREAM) as connection:
        director.go()
        read_until(connection, b'"content":"a"')
        stop(running.api)
        until(lambda: running.api.get("/ready").status == 503, "not ready at once", 1)
        time.sleep(1)
        assert running.api.chat("x").status == 503, "new requests are refused"
        assert running.api.get("/health").status == 200
        director.gate.set()
        rest = read_until(connection, b"[DONE]")
        assert b'"finish_reason":"stop"' in rest
        assert running.api.process is not None
        assert running.api.process.wait(10) == 0


def test_a_shutdown_cuts_off_what_does_not_end(tmp_path: Path, director: Director) -> None:
    with stage(tmp_path, "--shutdown-grace", "2", script=director) as running:
        with running.api.open(CHAT, STREAM) as connection, ThreadPoolExecutor(1) as pool:
            director.go()
            read_until(connection, b'"content":"a"')
            whole = pool.submit(running.api.chat, "x")
            until(lambda: live_requests(running) == 2, "both run", 10)
            begun = time.monotonic()
            stop(running.api)
            rest = read_until(connection, b"[DONE]")
            assert b'"error":{"message":"The server is shutting down."' in rest
            assert whole.result(5).status == 503
        assert running.api.process is not None
        assert running.api.process.wait(10) == 0
        assert time.monotonic() - begun < 5 * 2
        director.gate.set()
        until(lambda: len(running.workers.cancelled) == 2, "both are cancelled", 5)


def test_a_second_signal_hurries(tmp_path: Path, director: Director) -> None:
    with stage(tmp_path, script=director) as running, running.api.open(CHAT, STREAM) as connection:
        director.go()
        read_until(connection, b'"content":"a"')
        begun = time.monotonic()
        stop(running.api)
        time.sleep(0.2)
        stop(running.api, signal.SIGINT)
        read_until(connection, b"[DONE]")
        assert running.api.process is not None
        assert running.api.process.wait(10) == 0
        assert time.monotonic() - begun < 5 * 1.5
        director.gate.set()


def test_an_idle_process_stops_quickly(tmp_path: Path) -> None:
    with stage(tmp_path) as running:
        begun = time.monotonic()
        stop(running.api)
        assert running.api.process is not None
        assert running.api.process.wait(10) == 0
        assert time.monotonic() - begun < 5
        left = running.workers.bus.do("SMEMBERS", running.workers.keys.workers())
        assert not [worker for worker in left if worker.startswith(b"api-")], "it signed off"
