"""Whatever a stranger asks for, in whatever form, nothing but the public list answers."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from api.app import create_app
from api.auth import PUBLIC
from api.keyring import Keyring
from common.bus.keys import Keys
from common.settings import Settings

SECRET = "the-one-key"
SETTINGS = Settings(api_keys=(SECRET,), allowed_origins=("https://app.example.com",), access_log="off")


class NoKeys:
    """A Redis without keys."""

    async def do(self, *command: Any) -> list[bytes]:
        return []


# Time stands still: what was read long ago is not trusted any more, and a stranger told to come back (503).
RING = Keyring(SETTINGS, NoKeys(), Keys(), exposed=False, clock=lambda: 0.0)  # type: ignore[arg-type]
asyncio.run(RING.look())
# No service: a request that got past the door would fail, and not with 401.
APP = create_app(None, RING, SETTINGS)  # type: ignore[arg-type]
ROUTES = [
    *(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/x",
        "/v1/streams/x",
        "/v1/requests/x",
    ),
    *("/v1/requests/x/cancel", "/tokenize", "/detokenize", "/docs", "/openapi.json", "/metrics", "/"),
    *("/health", "/ready", "/version"),
]
pieces = st.sampled_from(
    [*ROUTES, "/", "//", ".", "..", "%2e", "%2f", ";", "?", "#", "\x00", "\n", " ", "é", "\\"]
)
paths = st.one_of(
    st.sampled_from(ROUTES),
    st.lists(pieces, min_size=1, max_size=5).map("".join),
    st.text(max_size=30).map(lambda text: "/" + text),
)
methods = st.one_of(
    st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]),
    st.text(min_size=1, max_size=8),
)
names = st.one_of(
    st.sampled_from(
        [b"authorization", b"x-api-key", b"x_api_key", b"cookie", b"proxy-authorization", b"origin"]
    ),
    st.sampled_from(
        [b"x-forwarded-prefix", b"x-original-url", b"upgrade", b"connection", b"host", b"expect"]
    ),
    st.binary(min_size=1, max_size=12).map(bytes.lower),
)
values = st.one_of(
    st.sampled_from(
        [b"", b"Bearer", b"Bearer ", b"bearer the-one-kez", b"Basic dGhlLW9uZS1rZXk=", b"the-one-ke"]
    ),
    st.sampled_from(
        [b"Bearer the-one-key x", b"Bearer: the-one-key", b"https://app.example.com", b"/health"]
    ),
    st.binary(max_size=30),
)
headers = st.lists(st.tuples(names, values), max_size=6)


def ask(scope: dict[str, Any]) -> list[dict[str, Any]]:
    """All that the application sends."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(dict(message))

    asyncio.run(APP(scope, receive, send))
    return sent


def is_public(scope: dict[str, Any]) -> bool:
    return scope["path"] in PUBLIC and scope["method"] in ("GET", "HEAD") and not scope["root_path"]


def http_scope(
    method: str, path: str, root: str, headers: list[tuple[bytes, bytes]], query: bytes
) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "root_path": root,
        "query_string": query,
        "headers": headers,
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }


@settings(max_examples=300, deadline=None)
@given(methods, paths, st.sampled_from(["", "", "", "/v1", "/health", "/"]), headers, st.binary(max_size=20))
def test_nothing_answers_a_stranger(
    method: str, path: str, root: str, headers: list[tuple[bytes, bytes]], query: bytes
) -> None:
    scope = http_scope(method, path, root, headers, query)
    if is_public(scope):
        return
    sent = ask(scope)
    start = sent[0]
    told = dict(start["headers"])
    if method == "OPTIONS" and b"access-control-allow-methods" in told:
        assert b"access-control-allow-origin" in told or start["status"] == 400
        return  # a browser's question, which the door need not know of
    assert start["status"] == 401, (scope, start)
    assert told[b"www-authenticate"] == b"Bearer"
    body = b"".join(message.get("body", b"") for message in sent[1:])
    assert orjson.loads(body)["error"]["code"] == "invalid_api_key"


@settings(max_examples=50, deadline=None)
@given(paths, headers)
def test_no_other_kind_of_connection_is_answered(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    scope = http_scope("GET", path, "", headers, b"") | {"type": "websocket", "subprotocols": []}
    assert ask(scope) == [{"type": "websocket.close", "code": 1008}]


def test_the_key_opens() -> None:
    """Else the rest would hold for a server that answers nobody."""
    given = [(b"authorization", f"Bearer {SECRET}".encode())]
    assert ask(http_scope("GET", "/openapi.json", "", given, b""))[0]["status"] == 200
    assert ask(http_scope("GET", "/nothing", "", given, b""))[0]["status"] == 404
