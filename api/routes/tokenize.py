"""`POST /tokenize` and `/detokenize`, answered by tokenizers over the same bus as everything else."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.body import read_json
from api.events import error_of
from api.openapi import WITH_WORKERS, describe
from api.routes.direct import DirectRoute
from api.routes.generation import Ask, admit
from api.schemas.answers import DetokenizedText, Tokens
from api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from api.service import Service
from common.messages import Kind


def router(service: Service) -> APIRouter:
    """Both endpoints on ``service``."""
    routes = APIRouter(route_class=DirectRoute)

    @routes.post("/tokenize", openapi_extra=describe(Tokens, takes=TokenizeRequest, fails=WITH_WORKERS))
    async def tokenize(http: Request) -> Response:
        """Token ids of a text or a conversation."""
        ask = TokenizeRequest.parse(await read_json(http, service.settings.max_body_bytes))
        return await _answer(http, service, ask, Kind.TOKENIZE)

    @routes.post(
        "/detokenize",
        openapi_extra=describe(DetokenizedText, takes=DetokenizeRequest, fails=WITH_WORKERS),
    )
    async def detokenize(http: Request) -> Response:
        """The text of token ids."""
        ask = DetokenizeRequest.parse(await read_json(http, service.settings.max_body_bytes))
        return await _answer(http, service, ask, Kind.DETOKENIZE)

    return routes


async def _answer(http: Request, service: Service, ask: Ask, kind: Kind) -> Response:
    """The one entry of the reply is the answer, as the tokenizer wrote it."""
    reply, entries = await admit(http, service, ask, kind)
    try:
        while not entries[-1].end:
            entries = await reply.next()
    finally:
        reply.close()
    if entries[-1].end == "error":
        raise error_of(entries[-1])
    return Response(entries[-1].answer, media_type="application/json")
