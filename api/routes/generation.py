"""What both generation endpoints do once their body is parsed: admit, wait for the first word, answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from api import returning
from api.auth import caller_of
from api.charging import Meter
from api.client import Client
from api.events import Answer, ChatStream, CompletionStream, error_of
from api.keyed import join
from api.middleware import GENERATION
from api.replies import Reply
from api.resume import START, Numbered, Position
from api.returning import Returning
from api.service import Service
from api.sse import Events, EventStream
from api.submit import find_model, submit
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
        return await meter.charge(ask.to_request(await find_model(service, ask.model, kind)))

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
    return _STREAMS[request.kind](request)


async def generate(
    http: HttpRequest, service: Service, body: Mapping[str, Any], ask: Ask, kind: Kind
) -> Response:
    """The answer to a generation request: a stream or one body. ``ask`` is ``body``, parsed."""
    wanted = returning.read(http.headers, kind, body, caller_of(http.scope).tenant)
    reply, entries = await admit(http, service, ask, kind, wanted)
    if reply.request.reply["stream"]:
        events = events_of(reply.request)
        numbered = Numbered(events) if reply.request.resume_ms else events
        return EventStream(reply, numbered, entries, patience_s=service.settings.slow_reader_timeout)
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
    return answer.body()
