"""API keys on a real server: who gets in, by whatever way they try, and how a key's life goes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.api_process import ApiProcess, Stage, stage
from tests.helpers.keys import bearer, keys_command, make_key
from tests.helpers.waiting import until

STATIC = "static-secret"
CHAT = b'{"model":"test-model","messages":[{"role":"user","content":"hi"}]}'
#: A key made or taken away is noticed within about a second; promises are asserted at five times their value.
SOON_S = 10.0


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server that needs keys, for all tests that leave it as they found it."""
    with stage(tmp_path_factory.mktemp("access"), "--api-key", STATIC) as running:
        yield running


def raw(api: ApiProcess, request: bytes) -> bytes:
    """The head of the answer to bytes as they are."""
    got = b""
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(request)
        while b"\r\n\r\n" not in got:
            piece = connection.recv(65536)
            if not piece:
                break
            got += piece
    return got


def asked(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: x", *headers]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


TARGETS = [
    *("/v1/models", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
    *("/docs", "/openapi.json", "/docs/oauth2-redirect", "/redoc", "/metrics", "/", "*"),
    *("/v1/requests/0-00000000000000000000000000000000", "/v1/streams/0-00000000000000000000000000000000"),
    *("//v1/models", "/v1//models", "/v1/models/", "/v1/../v1/models", "/./v1/models", "/V1/MODELS"),
    *("/health/../v1/models", "/health/%2e%2e/v1/models", "/health%2f..%2fv1%2fmodels", "/health/"),
    *("/health;/v1/models", "/health%00", "/health%20", "/health%0a", "//health", "/%2fhealth", "/healthz"),
    *("/%76%31/models", "/v1/%6dodels", "/v1/models?x=/health", "/v1/models?key=static-secret", "/ready/x"),
    *("http://x/v1/models", "https://x/v1/models", "/version/../docs", "/v2/models", "/invocations"),
    *("/v1/models%3f/health", "/v1/models#/health", "/inference/v1/models", "/health/v1/models"),
]


@pytest.mark.parametrize("target", TARGETS)
def test_no_path_gets_around_the_key(closed: Stage, target: str) -> None:
    for method in ("GET", "POST"):
        head = raw(closed.api, asked(method, target, body=CHAT if method == "POST" else b""))
        assert head.startswith(b"HTTP/1.1 401 "), head


@pytest.mark.parametrize("target", ["/v1/models", "/health", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "method", ["PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "POST", "PROPFIND", "HEAD", "GET"]
)
def test_no_method_gets_around_the_key(closed: Stage, method: str, target: str) -> None:
    head = raw(closed.api, asked(method, target))
    public = target == "/health" and method in ("GET", "HEAD")
    assert head.startswith(b"HTTP/1.1 200 " if public else b"HTTP/1.1 401 "), head


def test_what_is_no_request_gets_no_answer_to_one(closed: Stage) -> None:
    for line in (
        b"CONNECT x:80 HTTP/1.1",
        b"get /v1/models HTTP/1.1",
        b"GET v1/models HTTP/1.1",
        b"PRI * HTTP/2.0",
    ):
        assert not raw(closed.api, line + b"\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "headers",
    [
        ["authorization: Bearer wrong"],
        ["authorization: Bearer " + STATIC + "x"],
        ["authorization: Bearer " + STATIC[:-1]],
        ["authorization: " + STATIC],
        ["authorization: Basic c3RhdGljLXNlY3JldA=="],
        ["authorization: Bearer"],
        ["authorization:"],
        ["authorization: Bearer " + STATIC.upper()],
        ["authorization: Bearer sch\xfcssel"],
        ["authorization: Bearer " + STATIC + "\xa0"],
        ["authorization: Bearer " + STATIC, "authorization: Bearer " + STATIC],
        ["authorization: Bearer wrong", "authorization: Bearer " + STATIC],
        ["authorization: Bearer wrong", "x-api-key: " + STATIC],
        ["x-api-key: wrong"],
        ["x_api_key: " + STATIC],
        ["x-authorization: Bearer " + STATIC],
        ["proxy-authorization: Bearer " + STATIC],
        ["cookie: authorization=Bearer " + STATIC],
        ["x-forwarded-for: 127.0.0.1", "x-real-ip: 127.0.0.1"],
        ["x-original-url: /health", "x-rewrite-url: /health"],
        ["x-http-method-override: OPTIONS"],
        ["origin: https://example.com", "access-control-request-method: GET"],
        [
            "connection: upgrade",
            "upgrade: websocket",
            "sec-websocket-version: 13",
            "sec-websocket-key: aGVsbG8=",
        ],
        ["connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"],
    ],
)
def test_no_header_gets_around_the_key(closed: Stage, headers: list[str]) -> None:
    for method, target in (("GET", "/v1/models"), ("OPTIONS", "/v1/models")):
        head = raw(closed.api, asked(method, target, *headers))
        assert head.startswith(b"HTTP/1.1 401 "), head


def test_a_refusal_says_what_is_missing(closed: Stage) -> None:
    got = closed.api.get("/v1/models")
    assert got.status == 401
    assert got.headers["www-authenticate"] == "Bearer"
    assert got.headers["x-request-id"].startswith("req_")
    assert got.error["type"] == "invalid_request_error"
    assert got.error["code"] == "invalid_api_key"
    wrong = closed.api.request("GET", "/v1/models", headers=bearer("wrong"))
    assert (wrong.status, wrong.error["code"]) == (401, "invalid_api_key")
    assert "wrong" not in wrong.error["message"]


def test_a_second_request_on_a_connection_needs_a_key_as_well(closed: Stage) -> None:
    first = asked("GET", "/v1/models", f"authorization: Bearer {STATIC}")
    with socket.create_connection(("127.0.0.1", closed.api.port), timeout=10) as connection:
        connection.sendall(first + asked("GET", "/v1/models", "connection: close"))
        got = b""
        while piece := connection.recv(65536):
            got += piece
    assert got.count(b"HTTP/1.1 200 ") == 1
    assert got.count(b"HTTP/1.1 401 ") == 1


def test_a_body_is_not_read_from_strangers(closed: Stage) -> None:
    head = raw(
        closed.api, asked("POST", "/v1/completions", "expect: 100-continue", "content-length: 5000000")
    )
    assert head.startswith(b"HTTP/1.1 401 "), head


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {STATIC}"}, {"Authorization": f"bEARER   {STATIC}"}, {"X-Api-Key": STATIC}],
)
def test_a_key_opens(closed: Stage, headers: dict[str, str]) -> None:
    assert closed.api.request("GET", "/v1/models", headers=headers).status == 200
    assert closed.api.post("/v1/chat/completions", CHAT, headers).status == 200
    assert closed.api.request("GET", "/docs", headers=headers).status == 200
    assert closed.api.request("GET", "/metricsx", headers=headers).status == 404


def test_the_public_list_is_open(closed: Stage) -> None:
    for path in ("/health", "/ping", "/ready", "/version"):
        assert closed.api.get(path).status == 200
        assert closed.api.request("HEAD", path).status == 200
        assert closed.api.request("GET", path, headers=bearer("wrong")).status == 200


def models(api: ApiProcess, secret: str | None) -> int:
    return api.request("GET", "/v1/models", headers=bearer(secret) if secret else {}).status


def test_the_life_of_a_key_on_all_replicas(closed: Stage, tmp_path: Path) -> None:
    url = closed.redis.url
    with ApiProcess(url, log=tmp_path / "second.log") as second:
        apis = (closed.api, second)
        assert models(second, None) == 200, "without any key in the settings or in Redis it is open"
        name, secret = make_key(url, "--name", "for a while", "--tenant", "team-a")
        for api in apis:
            until(lambda: models(api, secret) == 200, "it opens", SOON_S)  # noqa: B023 - now
            until(lambda: models(api, None) == 401, "there is a door now", SOON_S)  # noqa: B023 - now
            assert models(api, secret) == 200
        listed = keys_command(url, "list").stdout
        assert name in listed
        assert "for a while" in listed
        assert "team-a" in listed
        assert secret not in listed
        assert secret not in str(closed.workers.bus.do("HGETALL", closed.workers.keys.api_keys()))

        assert keys_command(url, "revoke", name).returncode == 0
        for api in apis:
            until(lambda: models(api, secret) == 401, "it does not open any more", SOON_S)  # noqa: B023 - now
        assert "revoked" in keys_command(url, "list").stdout

        # By hand, with redis-cli.
        name, secret = make_key(url)
        until(lambda: models(second, secret) == 200, "it opens", SOON_S)
        closed.workers.bus.do("HDEL", closed.workers.keys.api_keys(), name)
        until(lambda: models(second, secret) == 401, "it is gone", SOON_S)

        name, secret = make_key(url, "--expires-in", "3s")
        until(lambda: models(second, secret) == 200, "it opens", SOON_S, 0.02)
        until(lambda: models(second, secret) == 401, "its time is over", SOON_S)

        closed.workers.bus.do("DEL", closed.workers.keys.api_keys())
        time.sleep(2.5)  # nothing can be waited for: it is about what does not happen
        assert models(second, None) == 401, "no key is left, and the door stays closed"
        assert models(closed.api, STATIC) == 200


def test_a_redis_that_goes_opens_nothing_and_locks_out_nobody(tmp_path: Path) -> None:
    with stage(tmp_path) as running:
        api, url = running.api, running.redis.url
        _, secret = make_key(url)
        until(lambda: models(api, None) == 401, "there is a door now", SOON_S)
        running.workers.pause()
        running.redis.kill()
        until(lambda: api.get("/ready").status == 503, "it notices", SOON_S)
        assert models(api, secret) == 200
        assert models(api, None) == 401
        assert models(api, "guessed") == 401
        running.redis.start()
        running.workers.working = True
        until(lambda: api.get("/ready").status == 200, "it is back", 20)
        running.workers.bus.do("FLUSHALL")
        until(lambda: models(api, secret) == 401, "a key that is gone", SOON_S)
        assert models(api, None) == 401


def test_a_server_that_cannot_read_the_keys_is_closed(tmp_path: Path) -> None:
    with ApiProcess("redis://127.0.0.1:1", "--partitions", "2", log=tmp_path / "api.log") as api:
        assert api.get("/health").status == 200
        for path in ("/v1/models", "/docs", "/openapi.json"):
            got = api.get(path)
            assert got.status == 503
            assert got.error["code"] == "service_unavailable"


def test_a_server_for_other_machines_needs_keys(tmp_path: Path) -> None:
    with stage(tmp_path, "--host", "0.0.0.0") as running:
        assert models(running.api, None) == 401
        _, secret = make_key(running.redis.url)
        until(lambda: models(running.api, secret) == 200, "the first key", SOON_S)
    with stage(tmp_path, "--host", "0.0.0.0", "--auth", "off") as running:
        make_key(running.redis.url)
        assert models(running.api, None) == 200
        assert "everybody who can connect" in running.api.log()


def test_a_file_of_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-secret\nsecond-secret team-b\n")
    with stage(
        tmp_path, "--api-key-file", str(tmp_path / "keys"), "--api-key", "a", "--api-key", "b"
    ) as running:
        for secret in ("first-secret", "second-secret", "a", "b"):
            assert models(running.api, secret) == 200
        assert models(running.api, "team-b") == 401


def test_a_key_for_one_model_only(closed: Stage) -> None:
    _, secret = make_key(closed.redis.url, "--models", "other,alias/of-it")
    until(lambda: models(closed.api, secret) == 200, "it opens", SOON_S)
    got = closed.api.post("/v1/chat/completions", CHAT, bearer(secret))
    assert (got.status, got.error["type"], got.error["param"]) == (403, "permission_error", "model")
    alias = json.loads(CHAT) | {"model": "alias/of-it"}
    assert closed.api.post("/v1/chat/completions", alias, bearer(secret)).status == 200
    assert closed.api.post("/tokenize", {"prompt": "x"}, bearer(secret)).status == 403
