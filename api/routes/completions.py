"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.body import read_json
from api.openapi import COMING_BACK, WITH_WORKERS, describe
from api.routes.direct import DirectRoute
from api.routes.generation import generate
from api.schemas.answers import Completion, CompletionChunk
from api.schemas.completions import CompletionRequest
from api.service import Service
from common.messages import Kind


def router(service: Service) -> APIRouter:
    """The endpoint on ``service``."""
    routes = APIRouter(route_class=DirectRoute)

    @routes.post(
        "/v1/completions",
        openapi_extra=describe(
            Completion,
            takes=CompletionRequest,
            streams=(CompletionChunk,),
            parameters=COMING_BACK,
            fails=(*WITH_WORKERS, 409),
        ),
    )
    async def completions(http: Request) -> Response:
        """The continuation of one or several prompts."""
        body = await read_json(http, service.settings.max_body_bytes)
        return await generate(http, service, body, CompletionRequest.parse(body), Kind.COMPLETION)

    return routes
