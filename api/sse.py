"""Server-sent events: their framing and the response that sends them.

This is the hot path. One `data:` line per event, several events per ASGI message when they arrived together;
Starlette's StreamingResponse would add a task group and two tasks to every stream.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.client import ClientGoneError
from api.middleware import DIRECT
from api.replies import Reply
from common.errors import DeadlineError, MillstreamError
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
    """The response of a request whose reply has begun; ``entries`` have been read from it already."""

    def __init__(self, reply: Reply, events: Events, entries: list[OutEntry]) -> None:
        super().__init__()
        self._reply = reply
        self._events = events
        self._entries = entries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the reply ends, fails, or nobody listens any more."""
        del receive  # the reply's `Client` is the one that receives
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            direct: Send = scope[DIRECT]
            last = await self._follow(direct)
            async with asyncio.timeout(_LAST_SEND_S):
                await direct({"type": "http.response.body", "body": last})
        except ClientGoneError:
            pass
        except TimeoutError:
            log.info("a reader took nothing until its deadline", uid=self._reply.uid)
        finally:
            self._reply.close()

    async def _follow(self, send: Send) -> bytes:
        """Sends all but the last events, which it returns: they go out together with the end."""
        push, entries = self._events.push, self._entries
        try:
            async with asyncio.timeout_at(self._reply.deadline):
                while True:
                    body = b"".join([push(entry) for entry in entries])
                    if self._events.done:
                        return body
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    entries = await self._reply.next()
        except ClientGoneError:
            raise
        except TimeoutError:
            return self._events.failure(DeadlineError())
        except MillstreamError as error:
            log.warning("a stream was cut off", uid=self._reply.uid, reason=error.message)
            return self._events.failure(error)
        except Exception:
            log.exception("a stream failed", uid=self._reply.uid)
            return self._events.failure(MillstreamError())
