"""What is refused, how, and that it hurts nobody else: bad input, full queues, missing workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.bus import registry
from common.errors import ContextLengthError, InvalidRequestError
from common.messages import Request
from tests.helpers.api_process import Answer, ApiProcess, Stage, stage
from tests.helpers.fake_workers import Play
from tests.helpers.waiting import until

TOO_LONG = (
    "This model's maximum context length is 4096 tokens. However, your messages resulted in 9000 tokens."
)


def script(request: Request) -> Play:
    text = str(request.payload)
    if "too long" in text:
        raise ContextLengthError(TOO_LONG, param="messages")
    if "bad template" in text:
        raise InvalidRequestError("The template says no.", param="messages")
    return Play()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("refusals")
    with stage(folder, "--max-body-bytes", "100kb", script=script) as running:
        yield running


@pytest.fixture
def api(running: Stage) -> ApiProcess:
    return running.api


def is_fine(api: ApiProcess) -> None:
    """Somebody else's request is answered right."""
    assert api.chat("x").json()["choices"][0]["message"]["content"] == "Hello, world"


def with_content(text: bytes) -> bytes:
    return b'{"model":"test-model","messages":[{"role":"user","content":%b}]}' % text


def with_message(text: bytes) -> bytes:
    return b'{"model":"test-model","messages":[{"role":"user","content":"x",%b}]}' % text


def with_field(text: bytes) -> bytes:
    return b'{"model":"test-model","messages":[{"role":"user","content":"x"}],%b}' % text


BODIES = {
    "nothing": b"",
    "no JSON": b"hello",
    "cut off": b'{"model": "test-model"',
    "not an object": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "bytes that are no text": with_content(b'"\xff\xfe"'),
    "a byte order mark": b"\xef\xbb\xbf" + with_content(b'"x"'),
    "a lone surrogate": with_content(rb'"a\ud83d b"'),
    "a lone surrogate as a name": with_field(rb'"\ud83d": 1'),
    "a lone surrogate in an ignored field": with_field(rb'"user": "\udc00"'),
    "NaN": with_field(b'"temperature": NaN'),
    "Infinity": with_field(b'"temperature": Infinity'),
    "a number too large": with_field(b'"temperature": 1e400'),
    "an integer of 5000 digits": with_field(b'"seed": ' + b"9" * 5000),
    "an integer beyond 64 bits": with_field(b'"seed": 9223372036854775808'),
    "deep nesting": with_content(b"[" * 50_000),
    "deep nesting, closed": with_content(b"[" * 900 + b"]" * 900),
    "deep nesting in an extra field": with_message(b'"e": %b%b' % (b"[" * 900, b"]" * 900)),
    "deep nesting in template arguments": with_field(
        b'"chat_template_kwargs": {"a": %b%b}' % (b"[" * 900, b"]" * 900)
    ),
    "true as a number": with_field(b'"n": true'),
    "text as a number": with_field(b'"max_tokens": "5"'),
    "no messages": b'{"model":"test-model"}',
    "empty messages": b'{"model":"test-model","messages":[]}',
    "a role that is none": b'{"model":"test-model","messages":[{"role":"x","content":"y"}]}',
    "an image": with_content(b'[{"type":"image_url","image_url":{"url":"http://x"}}]'),
    "no model": b'{"messages":[{"role":"user","content":"x"}]}',
    "tools": with_field(b'"tools": [{"type": "function"}]'),
    "a token id out of the vocabulary": with_field(b'"logit_bias": {"1000": 1}'),
    "thousands of wrong messages": b'{"model":"test-model","messages":[%b]}' % b",".join([b"1"] * 4000),
}


@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies(api: ApiProcess, name: str) -> None:
    got = api.post("/v1/chat/completions", BODIES[name])
    assert got.status == 400, got.body[:500]
    assert got.error["type"] == "invalid_request_error"
    assert len(got.body) < 2000
    got.body.decode("ascii" if name != "nothing" else "utf-8")
    is_fine(api)


@pytest.mark.parametrize(
    "prompt", [[], "", [""], [[]], [1, "a"], [1000], [-1], [2**40], [True], [[1], [1000]], None, 5, {"a": 1}]
)
def test_bad_prompts(api: ApiProcess, prompt: object) -> None:
    got = api.complete(prompt)
    assert got.status == 400, got.body
    assert got.error["param"].startswith("prompt")
    is_fine(api)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_every_endpoint_refuses_alike(api: ApiProcess, path: str) -> None:
    assert api.post(path, b"{").status == 400
    assert api.post(path, b'{"model": 5}').status == 400
    assert api.post(path, {"model": "test-model"}).status == 400
    assert api.request("GET", path).status == 405
    assert api.request("POST", path, b"{}", {"content-type": "text/plain"}).status == 415
    assert (
        api.request(
            "POST", path, b"{}", {"content-type": "application/json", "content-encoding": "gzip"}
        ).status
        == 415
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_paths_and_methods(api: ApiProcess, method: str, path: str, status: int) -> None:
    got = api.request(method, path, b"{}" if method == "POST" else None)
    assert got.status == status
    assert got.error["type"] == "invalid_request_error"
    assert ("allow" in got.headers) is (status == 405)


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "application/x+json", None]
)
def test_json_under_its_other_names(api: ApiProcess, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert api.request("POST", "/v1/chat/completions", with_content(b'"x"'), headers).status == 200


def test_an_unknown_model(api: ApiProcess) -> None:
    for stream in (False, True):
        got = api.chat("x", model="nothing", stream=stream)
        assert got.status == 404
        assert (got.error["code"], got.error["param"]) == ("model_not_found", "model")
        assert "`nothing`" in got.error["message"]
    assert len(api.chat("x", model="m" * 500).error["message"]) < 200


def test_a_body_that_is_too_large(api: ApiProcess) -> None:
    got = api.chat("x" * 200_000)
    assert got.status == 413
    assert got.error["type"] == "invalid_request_error"
    is_fine(api)


def test_a_body_that_is_too_large_and_does_not_say_so(api: ApiProcess) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"model": "test-model", "messages": [{"role": "user", "content": "'
        for _ in range(30):
            yield b"x" * 10_000
        yield b'"}]}'

    got = api.request("POST", "/v1/chat/completions", pieces(), {"content-type": "application/json"})  # type: ignore[arg-type]
    assert got.status == 413
    is_fine(api)


def test_a_client_that_leaves_in_the_middle_of_its_body(api: ApiProcess) -> None:
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    is_fine(api)
    assert "Traceback" not in api.log()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "message", "code"),
    [("too long", TOO_LONG, "context_length_exceeded"), ("bad template", "The template says no.", None)],
)
def test_errors_of_the_tokenizer_are_real_errors(
    api: ApiProcess, text: str, message: str, code: str | None, stream: bool
) -> None:
    got = api.chat(text, stream=stream)
    assert got.status == 400
    assert got.error == {
        "message": message,
        "type": "invalid_request_error",
        "param": "messages",
        "code": code,
    }


def refused(got: Answer, status: int, code: str) -> None:
    """With advice on when to come back, and no stream begun."""
    assert got.status == status
    assert got.headers["content-type"] == "application/json"
    assert got.error["code"] == code
    assert 1 <= int(got.headers["retry-after"]) <= 30
    assert int(got.headers["retry-after-ms"]) >= 1


def test_a_full_queue(tmp_path: Path) -> None:
    with stage(tmp_path, "--max-queued-requests", "3", working=False) as running:
        body = {"model": "test-model", "messages": [{"role": "user", "content": "x"}]}
        waiting = [running.api.open("/v1/chat/completions", body) for _ in range(3)]
        streams = [running.workers._stream("in", p) for p in (0, 1)]
        until(lambda: sum(running.workers.bus.do("XLEN", s) for s in streams) == 3, "three requests wait")
        for stream in (False, True):
            refused(running.api.chat("x", stream=stream), 429, "rate_limit_exceeded")
        running.workers.working = True
        for connection in waiting:
            with connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: running.api.chat("x", stream=stream).status == 200, "there is room again")


def test_too_many_bytes_in_the_queue(tmp_path: Path) -> None:
    with stage(tmp_path, "--max-queued-bytes", "4kb", working=False) as running:
        body = {"model": "test-model", "messages": [{"role": "user", "content": "x" * 1500}]}
        waiting = [running.api.open("/v1/chat/completions", body) for _ in range(2)]
        sums = [running.workers.keys.bytes(p, "test-model", "interactive") for p in (0, 1)]
        until(
            lambda: sum(int(running.workers.bus.do("HGET", s, "total") or 0) for s in sums) > 3000, "two wait"
        )
        refused(running.api.chat("x" * 1500), 429, "rate_limit_exceeded")
        for connection in waiting:
            connection.close()
        until(
            lambda: not any(running.workers.bus.do("HLEN", s) > 1 for s in sums), "their bytes are free again"
        )


ROLES = ("tokenizer", "scheduler", "detokenizer")


def test_a_role_without_a_worker(tmp_path: Path) -> None:
    with stage(tmp_path) as running:
        workers, api = running.workers, running.api
        for missing in ROLES:
            workers.roles = tuple(role for role in ROLES if role != missing)
            registry.withdraw(workers.bus, workers.keys, f"{missing}-1")
            reason = f"test-model: no live {missing}"
            until(lambda: api.get("/ready").json()["reasons"] == [reason], "/ready names it")  # noqa: B023 - now
            assert api.get("/ready").status == 503
            for stream in (False, True):
                refused(api.chat("x", stream=stream), 503, "service_unavailable")
            assert api.post("/tokenize", {"prompt": "a"}).status == (503 if missing == "tokenizer" else 200)
            assert api.get("/health").status == 200
            workers.roles = ROLES
            workers.announce()
            until(lambda: api.chat("x").status == 200, "it works once it is there")


def test_redis_goes_and_comes_back(tmp_path: Path) -> None:
    with stage(tmp_path) as running:
        running.workers.pause()
        running.redis.kill()
        begun = time.monotonic()
        got = running.api.chat("x")
        assert time.monotonic() - begun < 10
        refused(got, 503, "service_unavailable")
        until(lambda: running.api.get("/ready").status == 503, "/ready notices")
        assert running.api.get("/health").status == 200
        assert running.api.get("/v1/models").status == 200, "the last that was known"
        running.redis.start()
        running.workers.working = True
        until(lambda: running.api.get("/ready").status == 200, "/ready again", 15)
        is_fine(running.api)


def test_a_redis_that_is_almost_full(tmp_path: Path) -> None:
    with stage(tmp_path, "--max-redis-bytes", "64kb") as running:
        refused(running.api.chat("x"), 503, "service_unavailable")
        assert running.api.get("/ready").status == 200


def test_no_model_at_all(tmp_path: Path) -> None:
    with stage(tmp_path) as running:
        running.workers.bus.do("DEL", running.workers.keys.models())
        until(lambda: running.api.get("/ready").status == 503, "/ready notices")
        assert running.api.get("/ready").json()["reasons"] == ["no model is loaded"]
        refused(running.api.chat("x"), 503, "service_unavailable")


def raw(api: ApiProcess, *pieces: bytes) -> bytes:
    """All that comes back for bytes that need not be a request."""
    received = b""
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(65536):
                received += data
        except ConnectionError:
            pass  # it was closed while we were still sending
    return received


@pytest.mark.parametrize(
    "request_", [b"\x00\x01\x02\r\n\r\n", b"POST /v1/models HTTP/1.1\r\nContent-Length: -1\r\n\r\n"]
)
def test_what_is_no_request_is_refused_in_the_same_shape(api: ApiProcess, request_: bytes) -> None:
    answer = raw(api, request_)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req_" in answer
    assert b'{"error":{"message":' in answer
    is_fine(api)


def test_endless_headers_are_cut_off(api: ApiProcess) -> None:
    pieces = [b"GET /health HTTP/1.1\r\nX: "] + [b"a" * 65536] * 64
    answer = raw(api, *pieces)
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    is_fine(api)
