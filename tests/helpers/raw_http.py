"""Requests as bytes, which need not be requests at all, and whatever comes back for them."""

from __future__ import annotations

import http.client
import io
import socket
from dataclasses import dataclass

from tests.helpers.api_process import Answer

#: Far beyond what any request here takes.
HANGS_AFTER_S = 60.0


@dataclass(frozen=True)
class Raw:
    """One request, ready to be sent."""

    method: bytes
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    #: Whether the body is sent in chunks, whose length is said nowhere.
    chunked: bool = False

    def encode(self) -> bytes:
        """All of it; it asks for the connection to be closed after the answer."""
        head = b"%b %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" % (self.method, self.path)
        head += b"".join(b"%b: %b\r\n" % header for header in self.headers)
        if not self.chunked:
            return head + b"content-length: %d\r\n\r\n" % len(self.body) + self.body
        pieces = [self.body[at : at + 100] for at in range(0, len(self.body), 100)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


class _Received:
    """Received bytes, as `http.client` wants to read them."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def exchange(port: int, sent: bytes) -> bytes:
    """Sends ``sent`` and returns all that comes back until the server closes; fails when it hangs."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS_AFTER_S) as connection:
        try:
            connection.sendall(sent)
            while data := connection.recv(1 << 16):
                received += data
        except ConnectionError:
            pass  # it was closed while we were still sending
    return received


def ask(port: int, request: Raw) -> Answer | None:
    """The answer to ``request``; None when the connection was closed without one."""
    return parse(exchange(port, request.encode()), request.method)


def parse(received: bytes, method: bytes) -> Answer | None:
    """The answer in ``received``."""
    if not received:
        return None
    got = http.client.HTTPResponse(_Received(received), method=method.decode("latin-1"))  # type: ignore[arg-type]
    got.begin()
    return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
