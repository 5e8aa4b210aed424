"""`/health` (the process lives), `/ready` (send requests here) and `/version`. None asks Redis anything."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.routes import Routes
from api.service import Service
from common.version import VERSION


def routes(service: Service) -> Routes:
    """The endpoints on ``service``; load balancers ask with GET or HEAD."""

    async def health(_: Request) -> Response:
        """200 as long as this process answers at all."""
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        """200 when a request sent now would be served; otherwise 503 and why not."""
        reasons = service.why_not_ready()
        return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def version(_: Request) -> Response:
        """The version of the server."""
        return _json({"version": VERSION})

    return {
        "/health": {"GET": health, "HEAD": health},
        "/ready": {"GET": ready, "HEAD": ready},
        "/version": {"GET": version},
    }


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
