"""A route whose endpoint takes the request as it is, and returns its response.

FastAPI's own looks for parameters, dependencies and a response to validate: a tenth of the work of a short
request, for endpoints that want none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response


class DirectRoute(APIRoute):
    """Give it to `APIRouter` as its ``route_class``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        return self.endpoint
