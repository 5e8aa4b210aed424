"""The body of a streamed response, written straight to its connection.

ASGI's `send` is a coroutine through every layer between; a stream would pay for them with every token. So the
protocol leaves this in the scope, for a response that has begun to go on with.
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
    """One response's way to the socket, of a request without content length."""

    __slots__ = ("_connection", "_cycle", "on_drained")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        #: Called when the client has taken so much that there is room again.
        self.on_drained: Callable[[], None] | None = None

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
