"""`/v1/requests/{id}`: what has become of a generation, and its end on demand; the same on every replica."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.auth import caller_of
from api.body import read_json
from api.middleware import GENERATION
from api.openapi import WITH_REDIS, describe
from api.recall import Recalled, entries_of, recall_or_404
from api.schemas.abort import AbortRequest
from api.schemas.answers import GenerationStatus
from api.service import Service
from api.status import render
from common.bus.holding import Hold, attach
from common.errors import CancelledError


def router(service: Service) -> APIRouter:
    """The endpoints on ``service``."""
    routes = APIRouter()
    described = describe(GenerationStatus, fails=(*WITH_REDIS, 404))

    @routes.get("/v1/requests/{name}", openapi_extra=described)
    async def status(http: Request, name: str) -> Response:
        """Where a generation is; its answer or its error once it has ended."""
        return await _show(http, service, await _recall(http, service, name))

    # Several methods on one function would be described under one name twice.
    @routes.delete("/v1/requests/{name}", openapi_extra=described)
    async def delete(http: Request, name: str) -> Response:
        """Cancels a generation; one that has ended stays as it is."""
        return await _cancel(http, service, name)

    @routes.post("/v1/requests/{name}/cancel", openapi_extra=described)
    async def cancel(http: Request, name: str) -> Response:
        """Cancels a generation; one that has ended stays as it is."""
        return await _cancel(http, service, name)

    @routes.post(
        "/abort_request",
        openapi_extra=describe(GenerationStatus, takes=AbortRequest, fails=(*WITH_REDIS, 404)),
    )
    async def abort(http: Request) -> Response:
        """Cancels a generation by its id, as in SGLang."""
        ask = AbortRequest.model_validate(await read_json(http, service.settings.max_body_bytes))
        return await _cancel(http, service, ask.rid)

    return routes


async def _cancel(http: Request, service: Service, name: str) -> Response:
    request = (await _recall(http, service, name)).request
    message = CancelledError().message
    await service.bus.run(
        service.cancelling(request.uid, model=request.model, cls=request.cls, message=message)
    )
    return await _show(http, service, await _recall(http, service, name))


async def _recall(http: Request, service: Service, name: str) -> Recalled:
    return await recall_or_404(service, name, caller_of(http.scope).tenant)


async def _show(http: Request, service: Service, found: Recalled) -> Response:
    """The generation as JSON. Whoever asks for it reads it, so it is kept; it is not held for that."""
    entries = await entries_of(service, found.request.uid)
    if entries and entries[-1].end:  # it may have ended between the two looks
        found = await _recall(http, service, found.request.uid)
    request, settings = found.request, service.settings
    hold = Hold(request.uid, request.choices, idem=request.idem)
    await service.bus.run(attach(service.keys, (hold,), int(settings.reply_ttl * 1000)))
    http.scope[GENERATION] = request.uid
    # A long reply takes a while, which is nobody else's.
    body = await asyncio.to_thread(render, request, found.fields, entries)
    return Response(body, media_type="application/json")
