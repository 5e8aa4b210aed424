"""Server-sent events: their framing and the response that sends them.

This is the hot path: events are made and written the moment their entry arrives, without waking a task. One
`data:` line per event, several events per chunk when they arrived together.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.client import ClientGoneError
from api.keep_alive import KeepAlive
from api.pace import Pace, SlowReaderError
from api.replies import Reply
from api.wire import WIRE, Wire
from common.errors import MillstreamError
from common.logging import Log
from common.messages import OutEntry

log = Log(__name__)

DONE = b"data: [DONE]\n\n"
#: X-Accel-Buffering keeps nginx from holding events back.
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
#: A reader that takes nothing for this long does not get the end either.
_LAST_SEND_S = 30.0


def event(value: Any) -> bytes:
    """``value`` as one event. JSON text has no raw line feeds, so it is always one line."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class Events(Protocol):
    """What turns the entries of one reply into events."""

    #: Whether the last event has been made.
    done: bool

    def push(self, entry: OutEntry) -> bytes:
        """The events of one entry, framed; may be none."""

    def failure(self, error: MillstreamError) -> bytes:
        """The events that end the stream with ``error``."""


class EventStream(Response):
    """The response of a request whose reply has begun; ``entries`` have been read from it already.

    A reader that stays behind for ``patience_s`` is cut off. ``comment_s`` is the most seconds without a word
    to it, 0 for no bound.
    """

    def __init__(
        self, reply: Reply, events: Events, entries: list[OutEntry], *, patience_s: float, comment_s: float
    ) -> None:
        super().__init__()
        self._reply = reply
        self._events = events
        self._entries = entries
        self._patience_s = patience_s
        self._comment_s = comment_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the reply ends, fails, or nobody listens any more."""
        del receive  # the reply's `Client` is the one that receives
        wire: Wire = scope[WIRE]
        pace = Pace(self._reply, limit_s=self._patience_s, cut=wire.abort)
        alive = KeepAlive(wire, self._comment_s)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            alive.start()
            end = {"type": "http.response.body", "body": await self._follow(wire, pace, alive)}
            alive.close()
            wire.flush()  # the end does not go through the outbox
            if not wire.full:
                await send(end)  # which does not wait then
            else:
                async with asyncio.timeout(_LAST_SEND_S):
                    await send(end)
        except ClientGoneError:
            pass
        except SlowReaderError:
            log.info("a reader stayed behind and was cut off", uid=self._reply.uid)
        except TimeoutError:
            log.info("a reader took nothing until its deadline", uid=self._reply.uid)
            wire.abort()
        finally:
            wire.on_full = wire.on_drained = None
            pace.close()
            alive.close()
            self._reply.close()

    async def _follow(self, wire: Wire, pace: Pace, alive: KeepAlive) -> bytes:
        """Sends all but the last events, which it returns: they go out together with the end."""
        events, last = self._events, b""

        def take(entries: list[OutEntry]) -> bool:
            nonlocal last
            if len(entries) == 1:
                body = events.push(entries[0])
            else:
                body = b"".join([events.push(entry) for entry in entries])
            if events.done:
                last = body
            elif body:
                wire.write(body)
                alive.spoken = True
            return events.done

        wire.on_full, wire.on_drained = pace.behind, pace.caught_up
        try:
            if not take(self._entries):
                await self._reply.pour(take)
        except (ClientGoneError, SlowReaderError):
            raise
        except MillstreamError as error:
            log.warning("a stream was cut off", uid=self._reply.uid, reason=error.message)
            return events.failure(error)
        except Exception:
            log.exception("a stream failed", uid=self._reply.uid)
            return events.failure(MillstreamError())
        return last
