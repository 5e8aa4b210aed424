"""`/health`, `/ping` (the process lives), `/ready` (send requests here), `/version`. None asks Redis."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from api.openapi import describe
from api.schemas.answers import Health, Ready, Version
from api.service import Service
from common.version import VERSION


def router(service: Service) -> APIRouter:
    """The endpoints on ``service``; load balancers ask with GET or HEAD."""
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", openapi_extra=describe(Health))
    async def health() -> Response:
        """200 as long as this process answers at all."""
        return _json({"status": "ok"})

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", openapi_extra=describe(Ready, not_ready=True))
    async def ready() -> Response:
        """200 when a request sent now would be served; otherwise 503 and why not."""
        reasons = service.why_not_ready()
        return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    @routes.head("/ping", include_in_schema=False)
    @routes.get("/ping", openapi_extra=describe(Health))
    async def ping() -> Response:
        """The same as `/health`, by another name."""
        return _json({"status": "ok"})

    @routes.head("/version", include_in_schema=False)
    @routes.get("/version", openapi_extra=describe(Version))
    async def version() -> Response:
        """The version of the server."""
        return _json({"version": VERSION})

    return routes


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
