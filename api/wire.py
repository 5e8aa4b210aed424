"""One request's connection, without the coroutines of ASGI between.

A stream would pay for every layer with every token, and a short request with much of its time. So the
protocol leaves this in the scope: a body that has arrived is simply there, a response that has begun goes on,
and the client's leaving calls back.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

#: Where the scope holds the `Wire`.
WIRE = "millstream.wire"
#: `struct linger`: on, for no time.
_AT_ONCE = struct.pack("ii", 1, 0)


class Connection(Protocol):
    """What a wire needs of its connection."""

    #: The wire to tell when there is room again.
    blocked: Wire | None


class Wire:
    """A request and its response on the socket; responses are written without content length."""

    __slots__ = ("_connection", "_cycle", "gone", "on_drained", "on_gone")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        #: Called when the client has taken so much that there is room again.
        self.on_drained: Callable[[], None] | None = None
        #: Whether the client has left before the end of the response, and what is called then.
        self.gone = False
        self.on_gone: Callable[[], None] | None = None

    @property
    def complete(self) -> bool:
        """Whether the response has ended."""
        return self._cycle.response_complete

    def whole_body(self) -> bytes | None:
        """The request's body, once; None unless all of it has arrived."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def lost(self) -> None:
        """The connection is gone."""
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()

    def write(self, piece: bytes) -> bool:
        """Sends ``piece``, at once. False when the client does not keep up: wait for `on_drained` then."""
        cycle = self._cycle
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if not cycle.flow.write_paused:
            return True
        self._connection.blocked = self
        return False

    def abort(self) -> None:
        """Cuts the connection, and drops what the client has not taken, what the kernel holds included."""
        transport = self._cycle.transport
        if (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        transport.abort()
