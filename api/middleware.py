"""The outermost layer: a request id on every answer, an answer whatever happens inside, a line in the log.

A client's own X-Request-Id is a label that comes back; nothing inside is keyed by it.
"""

from __future__ import annotations

import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors
from api.access_log import AccessLog, path_of
from common.errors import MillstreamError
from common.logging import Log

log = Log(__name__)

#: Where the scope holds the uid of the generation that is the answer.
GENERATION = "millstream.request"
#: Where it holds the headers that say how the API key stands with its limits.
STANDING = "millstream.standing"
_LABEL = re.compile(rb"[\x21-\x7e]{1,128}")


class Envelope:
    """Wraps the application. Plain ASGI."""

    def __init__(self, app: ASGIApp, access_log: AccessLog | None) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        begun = time.perf_counter()
        status = 0

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                spent = b"%d" % ((time.perf_counter() - begun) * 1000)
                headers = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id),
                    (b"openai-processing-ms", spent),
                ]
                if GENERATION in scope:
                    headers.append((b"millstream-request", scope[GENERATION].encode()))
                if STANDING in scope:
                    headers += scope[STANDING]
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_labelled)
        except Exception:
            log.exception("a request failed", path=path_of(scope), request_id=request_id.decode())
            if status:
                raise  # the server then cuts the connection, which is all that is left to say
            await errors.response(MillstreamError())(scope, receive, send_labelled)
        finally:
            if self._access_log is not None:
                self._access_log.write(scope, status, begun, request_id)


def label_of(scope: Scope) -> str:
    """The client's own X-Request-Id; "" without a usable one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _LABEL.fullmatch(value):
            return str(value, "ascii")
    return ""


def _request_id(scope: Scope) -> bytes:
    return (label_of(scope) or "req_" + secrets.token_hex(16)).encode()
