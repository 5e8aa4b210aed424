"""Endpoints that take the request as it is, and return its response.

FastAPI's way to an endpoint looks for parameters, dependencies and a response to validate, through a dozen
layers: a tenth of the work of a short request, for endpoints that want none of it. They are in its list of
routes all the same, which describes them and knows their other methods.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoute(APIRoute):
    """Marks such an endpoint: give it to `APIRouter` as its ``route_class``. Its path has no parameters."""


class Direct:
    """The application, with a short way to its direct endpoints."""

    def __init__(self, app: FastAPI) -> None:
        self._app: ASGIApp = app
        self._handlers: dict[Any, Callable[[Request, Exception], Any]] = {
            kind: handler for kind, handler in app.exception_handlers.items() if kind is not Exception
        }
        self._endpoints: dict[tuple[str, str], Callable[[Request], Awaitable[ASGIApp]]] = {
            (route.path, method): route.endpoint
            for route in app.routes
            if isinstance(route, DirectRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. A fault of ours is raised."""
        endpoint = self._endpoints.get((scope["path"], scope["method"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except Exception as error:
            kind = next((kind for kind in type(error).__mro__ if kind in self._handlers), None)
            if kind is None:
                raise
            response = await self._handlers[kind](request, error)
        await response(scope, receive, send)
