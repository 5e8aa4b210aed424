"""The HTTP/1.1 protocol of a connection: uvicorn's, with request heads bounded in bytes and in time (P4).

What is wrong with a request before it is one is answered in OpenAI's shape as well.
"""

from __future__ import annotations

import asyncio
import http
import secrets
from collections.abc import Sequence

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.errors import RequestTimeoutError, error_object
from api.wire import WIRE, Wire
from common.errors import InvalidRequestError, MillstreamError

#: Request line and headers together, beyond what one read from the socket brings.
MAX_HEAD_BYTES = 64 << 10
#: From the opening of a connection, or the first byte of a further request, to the end of the headers.
HEAD_TIMEOUT_S = 20.0
#: How much of a body that nobody wants is read and dropped. A client that is still sending when the
#: connection closes may never see the answer; one that sends for ever must not hold it open.
DISCARD_BYTES, DISCARD_S = 64 << 20, 5.0


class HeadTooLargeError(InvalidRequestError):
    """The request headers are too large."""

    status = 431


class Protocol(HttpToolsProtocol):
    """One connection."""

    blocked: Wire | None = None
    #: Of the responses that have not ended; more than one when a client sends ahead.
    _wires: Sequence[Wire] = ()
    _head_bytes = 0
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    #: Of the body that still comes though its request was answered: bytes so far, and since when.
    _unread = 0
    _unread_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)
        for wire in self._wires:
            if not wire.complete:
                wire.lost()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:  # still, after all of the data was parsed
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadTooLargeError())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._unread = 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        wire = Wire(self, self.cycle)
        self._wires = [*(wire for wire in self._wires if not wire.complete), wire]
        self.scope[WIRE] = wire  # type: ignore[literal-required]  # the task that reads it has not begun

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            now = self.loop.time()
            self._unread_since = self._unread_since if self._unread else now
            self._unread += len(body)
            if self._unread > DISCARD_BYTES or now - self._unread_since > DISCARD_S:
                self.transport.close()

    def resume_writing(self) -> None:
        super().resume_writing()
        wire, self.blocked = self.blocked, None
        if wire is not None and wire.on_drained is not None:
            wire.on_drained()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequestError(msg))

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._refuse(RequestTimeoutError("The request headers did not arrive in time."))

    def _end_head(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: MillstreamError) -> None:
        """Answers, and closes the connection: where the next request would begin is not known.

        While another answer is due it only closes: the client would take this for it, or for a part of it.
        """
        self._end_head()
        if self.transport is None or self.transport.is_closing():
            return
        if any(wire.owed for wire in self._wires):
            self.transport.close()
            return
        body = orjson.dumps({"error": error_object(error)})
        head = (
            f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: req_{secrets.token_hex(16)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
