"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.body import read_json
from api.openapi import COMING_BACK, WITH_WORKERS, describe
from api.routes.direct import DirectRoute
from api.routes.generation import generate
from api.schemas.answers import ChatCompletion, ChatCompletionChunk
from api.schemas.chat import ChatRequest
from api.service import Service
from common.messages import Kind


def router(service: Service) -> APIRouter:
    """The endpoint on ``service``."""
    routes = APIRouter(route_class=DirectRoute)

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=describe(
            ChatCompletion,
            takes=ChatRequest,
            streams=(ChatCompletionChunk,),
            parameters=COMING_BACK,
            fails=(*WITH_WORKERS, 409),
        ),
    )
    async def chat_completions(http: Request) -> Response:
        """The assistant's next message in a conversation."""
        body = await read_json(http, service.settings.max_body_bytes)
        return await generate(http, service, body, ChatRequest.parse(body), Kind.CHAT)

    return routes
