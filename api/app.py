"""The ASGI application: routes, error handlers and the envelope around them, put together. Starts nothing."""

from __future__ import annotations

from typing import Any, cast

from fastapi import Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from api import errors
from api.client import ClientGoneError
from api.middleware import Envelope
from api.openapi import Described
from api.routes import chat, completions, health, models, requests, streams, tokenize
from api.routes.direct import Direct
from api.service import Service
from common.errors import MillstreamError

_ROUTERS = (
    *(chat.router, completions.router, streams.router, requests.router),
    *(models.router, tokenize.router, health.router),
)


def create_app(service: Service) -> ASGIApp:
    """The application on ``service``."""
    return Envelope(Direct(_routed(service)))


def description() -> dict[str, Any]:
    """The OpenAPI document; nothing of a service is used for it."""
    return _routed(cast("Service", None)).openapi()


def _routed(service: Service) -> Described:
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
