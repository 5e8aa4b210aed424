"""The ASGI application: routes, error handlers and the envelope around them, put together. Starts nothing."""

from __future__ import annotations

from typing import Any, cast

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from api import errors
from api.access_log import AccessLog
from api.auth import Guard
from api.client import ClientGoneError
from api.keyring import Keyring
from api.middleware import Envelope
from api.openapi import Described
from api.routes import chat, completions, health, models, requests, streams, tokenize
from api.routes.direct import Direct
from api.service import Service
from common.errors import InvalidRequestError, MillstreamError
from common.settings import Settings

_ROUTERS = (
    *(chat.router, completions.router, streams.router, requests.router),
    *(models.router, tokenize.router, health.router),
)
#: What a page of another origin may do and see (CORS), once its origin is allowed.
_METHODS = ("GET", "HEAD", "POST", "DELETE")
_EXPOSED = (
    *("x-request-id", "millstream-request", "openai-processing-ms"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")),
    *(f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")),
)


def create_app(service: Service, keyring: Keyring, settings: Settings) -> ASGIApp:
    """The application on ``service``, behind its door and in its envelope."""
    inside: ASGIApp = Guard(Direct(create_routes(service)), keyring)
    if settings.allowed_origins:
        # Around the door: a browser asks for permission without a key, and a page may read its refusal.
        inside = _Cors(
            inside,
            allow_origins=settings.allowed_origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    log = AccessLog(settings.disable_access_log_for_endpoints) if settings.access_log == "on" else None
    return Envelope(inside, log)


def description() -> dict[str, Any]:
    """The OpenAPI document; nothing of a service is used for it."""
    return create_routes(cast("Service", None)).openapi()


def create_routes(service: Service) -> Described:
    """The endpoints on ``service`` and the answers to what goes wrong in them; open to everybody."""
    app = Described(title="Millstream", redoc_url=None, redirect_slashes=False)
    for router in _ROUTERS:
        # Not `include_router`, which puts a layer of its own before every route.
        app.router.routes += router(service).routes
    app.add_exception_handler(MillstreamError, _on_error)
    app.add_exception_handler(ValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientGoneError, _on_gone)
    app.add_exception_handler(Exception, _on_fault)
    return app


class _Cors(CORSMiddleware):
    """The framework's, which refuses in words of its own."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks for permission."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        return errors.response(InvalidRequestError(f"{bytes(answer.body).decode()}."))


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, MillstreamError)
    return errors.response(error)


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    return errors.response(errors.from_validation(error))


async def _on_http(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {"allow": _methods(http)} if error.status_code == 405 else error.headers
    return errors.response(errors.from_http(error), headers)


def _methods(http: Request) -> str:
    """What this URL can be asked with; the framework names the methods of one of its routes only."""
    routes = [route for route in http.app.routes if isinstance(route, Route)]
    found = [route.methods or () for route in routes if route.path_regex.fullmatch(http.url.path)]
    return ", ".join(sorted({method for methods in found for method in methods}))


async def _on_fault(_: Request, error: Exception) -> Response:
    """A fault of ours; it is raised again after this, for `Envelope` to write it down."""
    del error
    return errors.response(MillstreamError())


async def _on_gone(_: Request, error: Exception) -> Response:
    """Nobody reads this; 499 is what proxies write into their logs."""
    del error
    return Response(status_code=499)
