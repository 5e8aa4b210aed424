"""What both generation endpoints do once their body is parsed: admit, wait for the first word, answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from api import returning
from api.answer import Answer
from api.auth import caller_of
from api.charging import Meter
from api.client import Client
from api.events import ChatStream, CompletionStream, error_of
from api.keyed import join
from api.middleware import GENERATION, label_of
from api.replies import Reply
from api.resume import START, Numbered, Position
from api.returning import Returning
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.service import Service
from api.sse import Events, EventStream
from api.submit import find_model, submit
from api.thinking import ThinkingStream
from api.wire import WIRE
from common.bus.registry import ModelInfo
from common.errors import MillstreamError, UnavailableError
from common.messages import Kind, OutEntry, Request

_STREAMS = {Kind.CHAT: ChatStream, Kind.COMPLETION: CompletionStream}


class Ask(Protocol):
    """A parsed body that can become a request."""

    @property
    def model(self) -> str | None:
        """The model asked for."""

    def to_request(self, model: ModelInfo) -> Request:
        """The request for the bus, without a uid."""


async def admit(
    http: HttpRequest, service: Service, ask: Ask, kind: Kind, wanted: Returning | None = None
) -> tuple[Reply, list[OutEntry]]:
    """Admits what was asked for. Returns its reply and the first entries of it.

    An error is raised while its status code can still be sent, so before any 200 (section 3 of the design).
    """
    meter = Meter(service, http.scope)

    async def make() -> Request:
        model = await find_model(service, ask.model, kind)
        return await meter.charge(ask.to_request(model), model)

    client = Client(http.scope[WIRE])
    try:
        if wanted is not None and wanted.idem:
            reply = await join(service, wanted, caller_of(http.scope).tenant, make, client)
        else:
            request = await make()
            reply = await submit(service, wanted.mark(request) if wanted else request, client)
    except BaseException:
        client.close()
        meter.give_back(None)
        raise
    meter.give_back(reply.request)
    if kind in _STREAMS:
        http.scope[GENERATION] = reply.uid
    return reply, await first_word(service, reply)


async def first_word(service: Service, reply: Reply, seen: Position = START) -> list[OutEntry]:
    """The first entries of a reply. Raises the error that it begins with, unless that was seen."""
    try:
        entries = await reply.next()
        if entries[0].end == "error" and not seen.covers(entries[0]):
            raise _refusal(service, entries[0])
    except BaseException:
        reply.close()
        raise
    return entries


def _refusal(service: Service, entry: OutEntry) -> MillstreamError:
    error = error_of(entry)
    if isinstance(error, UnavailableError):
        error.retry_after = service.rate.retry_after(len(service.live))
    return error


def events_of(request: Request) -> Events:
    """What turns the entries of a request's reply into events of a stream."""
    if request.reply.get("reasoning"):
        return ThinkingStream(request)
    return _STREAMS[request.kind](request)


def event_stream(service: Service, reply: Reply, events: Events, entries: list[OutEntry]) -> EventStream:
    """The response that streams a reply, of which ``entries`` have been read."""
    settings = service.settings
    return EventStream(
        reply,
        events,
        entries,
        patience_s=settings.slow_reader_timeout,
        comment_s=settings.sse_keep_alive_interval,
    )


class _Dressed:
    """What is asked for, by the rules of the house."""

    def __init__(self, service: Service, ask: ChatRequest | CompletionRequest, label: str) -> None:
        self._service = service
        self._ask = ask
        self._label = label
        self.model = ask.model

    def to_request(self, model: ModelInfo) -> Request:
        return self._service.house.dress(self._ask.to_request(model), self._ask, self._label)


async def generate(
    http: HttpRequest,
    service: Service,
    body: Mapping[str, Any],
    ask: ChatRequest | CompletionRequest,
    kind: Kind,
) -> Response:
    """The answer to a generation request: a stream or one body. ``ask`` is ``body``, parsed."""
    service.house.look_at(type(ask), body)
    wanted = returning.read(http.headers, kind, body, caller_of(http.scope).tenant)
    dressed = _Dressed(service, ask, label_of(http.scope))
    reply, entries = await admit(http, service, dressed, kind, wanted)
    if reply.request.reply["stream"]:
        events = events_of(reply.request)
        numbered = Numbered(events) if reply.request.resume_ms else events
        return event_stream(service, reply, numbered, entries)
    try:
        answer = await _collect(reply, entries)
    finally:
        reply.close()
    return Response(answer, media_type="application/json")


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
    return await asyncio.to_thread(answer.body) if answer.large else answer.body()
