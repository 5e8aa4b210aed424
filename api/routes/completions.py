"""`POST /v1/completions`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from api.body import read_json
from api.routes import Routes
from api.routes.generation import generate
from api.schemas.completions import CompletionRequest
from api.service import Service
from common.messages import Kind


def routes(service: Service) -> Routes:
    """The endpoint on ``service``."""

    async def completions(http: Request) -> Response:
        """The continuation of one or several prompts."""
        ask = CompletionRequest.parse(await read_json(http, service.settings.max_body_bytes))
        return await generate(http, service, ask, Kind.COMPLETION)

    return {"/v1/completions": {"POST": completions}}
