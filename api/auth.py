"""The door: every request needs an API key, but for those to a short public list. Plain ASGI.

It stands before all routing, and compares the very path that is routed by: whatever is not exactly on the
list needs a key, whether it leads anywhere or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from api import errors
from api.keyring import NOBODY, Keyring
from common.bus.access import ApiKey
from common.errors import MillstreamError, UnauthorizedError

#: What load balancers and whoever looks for the server may ask without a key.
PUBLIC = frozenset({"/health", "/ping", "/ready", "/version"})
_READING = frozenset({"GET", "HEAD"})
#: Where the scope holds the `ApiKey` of whoever asks.
CALLER = "millstream.caller"
_BEARER = re.compile(rb"bearer[ \t]+([\x21-\x7e]{1,512})", re.IGNORECASE)
_PLAIN = re.compile(rb"[\x21-\x7e]{1,512}")
#: RFC 6455: what is asked goes against the server's policy.
_POLICY_VIOLATION = 1008


class Guard:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers that it may not."""
        if scope["type"] == "http":
            try:
                if not is_public(scope):
                    scope[CALLER] = self._caller(scope)
            except MillstreamError as error:
                await errors.response(error)(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> ApiKey:
        if self._keyring.open:
            return NOBODY
        return self._keyring.caller(secret_of(scope["headers"]))


def caller_of(scope: Scope) -> ApiKey:
    """Who asks. Only for what is not public."""
    caller: ApiKey = scope[CALLER]
    return caller


def is_public(scope: Scope) -> bool:
    """Whether the request needs no key."""
    # Behind a prefix the path that is routed by would be another one.
    return scope["path"] in PUBLIC and scope["method"] in _READING and not scope.get("root_path")


def secret_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The one API key among the headers; None without any. Raises `UnauthorizedError`."""
    given = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
    if not given:
        return None
    if len(given) > 1:
        raise UnauthorizedError("Only one API key may be given.")
    name, value = given[0]
    found = (_BEARER if name == b"authorization" else _PLAIN).fullmatch(value.strip(b" \t"))
    if found is None:
        raise UnauthorizedError
    return found[found.re.groups]
