"""`GET /v1/streams/{id}`: the stream of a generation, on any replica, from its start or from within."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.auth import caller_of
from api.client import Client
from api.following import attach
from api.middleware import GENERATION
from api.openapi import GOING_ON, describe
from api.recall import recall_or_404
from api.resume import START, Numbered, Position
from api.routes.generation import event_stream, events_of, first_word
from api.schemas.answers import ChatCompletionChunk, CompletionChunk
from api.service import Service
from api.wire import WIRE


def router(service: Service) -> APIRouter:
    """The endpoint on ``service``."""
    routes = APIRouter()

    @routes.get(
        "/v1/streams/{name}",
        openapi_extra=describe(
            streams=(ChatCompletionChunk, CompletionChunk), parameters=GOING_ON, fails=(404, 499, 503, 504)
        ),
    )
    async def stream(http: Request, name: str) -> Response:
        """The events after `Last-Event-ID` (or `?after=`), then those to come, to the end."""
        seen = _seen(http)
        request = (await recall_or_404(service, name, caller_of(http.scope).tenant)).request
        http.scope[GENERATION] = request.uid
        client = Client(http.scope[WIRE])
        try:
            reply = attach(service, request, client)
        except BaseException:
            client.close()
            raise
        entries = await first_word(service, reply, seen)
        events = Numbered(events_of(request), seen)
        return event_stream(service, reply, events, entries)

    return routes


def _seen(http: Request) -> Position:
    """The header wins: a browser that connects again sends it with the URL of the first time."""
    header, query = (
        None if text is None else Position.parse(text)
        for text in (http.headers.get("last-event-id"), http.query_params.get("after"))
    )
    return header or query or START
