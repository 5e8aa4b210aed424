"""What both generation endpoints do once their body is parsed: admit, wait for the first word, answer."""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from api.client import Client
from api.events import Answer, ChatStream, CompletionStream, error_of
from api.replies import Reply
from api.service import Service
from api.sse import EventStream
from api.submit import find_model, submit
from common.bus.registry import ModelInfo
from common.errors import DeadlineError, UnavailableError
from common.messages import Kind, OutEntry, Request

_STREAMS = {Kind.CHAT: ChatStream, Kind.COMPLETION: CompletionStream}


class Ask(Protocol):
    """A parsed body that can become a request."""

    @property
    def model(self) -> str | None:
        """The model asked for."""

    def to_request(self, model: ModelInfo) -> Request:
        """The request for the bus, without a uid."""


async def admit(http: HttpRequest, service: Service, ask: Ask, kind: Kind) -> tuple[Reply, list[OutEntry]]:
    """Admits what was asked for. Returns its reply and the first entries of it.

    An error is raised while its status code can still be sent, so before any 200 (section 3 of the design).
    """
    model = await find_model(service, ask.model, kind)
    request = ask.to_request(model)
    client = Client(http.receive)
    reply = None
    try:
        reply = await submit(service, request, client)
        async with asyncio.timeout_at(reply.deadline):
            entries = await reply.next()
        if entries[0].end == "error":
            error = error_of(entries[0])
            if isinstance(error, UnavailableError):
                error.retry_after = service.rate.retry_after(len(service.live))
            raise error
    except BaseException as error:
        if reply is None:
            client.close()
        else:
            reply.close()
        if isinstance(error, TimeoutError):
            raise DeadlineError from None
        raise
    return reply, entries


async def generate(http: HttpRequest, service: Service, ask: Ask, kind: Kind) -> Response:
    """The answer to a generation request: a stream or one body."""
    reply, entries = await admit(http, service, ask, kind)
    if reply.request.reply["stream"]:
        patience_s = service.settings.slow_reader_timeout
        return EventStream(reply, _STREAMS[kind](reply.request), entries, patience_s=patience_s)
    try:
        async with asyncio.timeout_at(reply.deadline):
            body = await _collect(reply, entries)
    except TimeoutError:
        raise DeadlineError from None
    finally:
        reply.close()
    return Response(body, media_type="application/json")


async def _collect(reply: Reply, entries: list[OutEntry]) -> bytes:
    answer, restarts = Answer(reply.request), reply.restarts

    def take(entries: list[OutEntry]) -> bool:
        nonlocal answer, restarts
        if reply.restarts != restarts:
            answer, restarts = Answer(reply.request), reply.restarts
        for entry in entries:
            answer.push(entry)
        return answer.done

    if not take(entries):
        await reply.pour(take)
    return answer.body()
