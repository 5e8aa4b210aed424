"""One request's connection, without the coroutines of ASGI between.

A stream would pay for every layer with every token, and a short request with much of its time. So the
protocol leaves this in the scope: a body that has arrived is simply there, a response that has begun goes on,
and the client's leaving calls back.
"""

from __future__ import annotations

import asyncio
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
    loop: asyncio.AbstractEventLoop


class Outbox:
    """Pieces that leave together, in the next turn of the event loop.

    Between two writes of its own a reader on this machine would fall asleep, and each would have to wake it:
    that costs several times the write.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pieces: list[tuple[Wire, bytes]] = []

    def put(self, loop: asyncio.AbstractEventLoop, wire: Wire, piece: bytes) -> None:
        """Has ``piece`` written to ``wire`` in the next turn of ``loop``."""
        if loop is not self._loop:
            self._loop, self._pieces = loop, []
        if not self._pieces:
            loop.call_soon(self.flush)
        self._pieces.append((wire, piece))

    def flush(self) -> None:
        """Writes what there is."""
        pieces, self._pieces = self._pieces, []
        for wire, piece in pieces:
            wire.write_now(piece)


_OUTBOX = Outbox()


class Wire:
    """A request and its response on the socket; responses are written without content length."""

    __slots__ = ("_connection", "_cycle", "gone", "on_drained", "on_full", "on_gone")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        #: Called when the client does not keep up, and when it has taken so much that there is room again.
        self.on_full: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        #: Whether the client has left before the end of the response, and what is called then.
        self.gone = False
        self.on_gone: Callable[[], None] | None = None

    @property
    def full(self) -> bool:
        """Whether the client does not keep up now."""
        return bool(self._cycle.flow.write_paused)

    @property
    def complete(self) -> bool:
        """Whether the response has ended."""
        return self._cycle.response_complete

    @property
    def owed(self) -> bool:
        """Whether its response is being sent, or is due as the whole request has arrived."""
        cycle = self._cycle
        return not cycle.response_complete and (cycle.response_started or not cycle.more_body)

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

    def write(self, piece: bytes) -> None:
        """Sends ``piece``, before anything that is done in a later turn of the event loop."""
        _OUTBOX.put(self._connection.loop, self, piece)

    def flush(self) -> None:
        """Has all that was written leave now."""
        _OUTBOX.flush()

    def write_now(self, piece: bytes) -> None:
        """Sends ``piece``. Tells `on_full` when the client does not keep up: `on_drained` follows."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        try:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        except RuntimeError:  # uvloop's word for a connection that has just been closed
            return
        if cycle.flow.write_paused:
            self._connection.blocked = self
            if self.on_full is not None:
                self.on_full()

    def abort(self) -> None:
        """Cuts the connection, and drops what the client has not taken, what the kernel holds included."""
        transport = self._cycle.transport
        if (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        transport.abort()
        self._cycle.disconnected = True  # the transport says so later, with TLS much later
