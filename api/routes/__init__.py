"""The endpoints: each reads a body, asks for something and renders what comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

#: Raises what is wrong with a request; `api.app` renders it.
Endpoint = Callable[[Request], Awaitable[Response]]
#: Path -> method -> endpoint. A path that ends in `/*` stands for everything below it.
Routes = Mapping[str, Mapping[str, Endpoint]]
