"""The ASGI application: finds the endpoint of a request, and answers whatever happens. Starts nothing.

A router of our own, since a framework's wraps every piece of every stream several times, and knows other
shapes of errors than ours. Requests and responses are Starlette's.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api import errors
from api.client import ClientGoneError
from api.routes import Endpoint, Routes, chat, completions, health, models, tokenize
from api.service import Service
from common.errors import MillstreamError, NotFoundError
from common.logging import Log

log = Log(__name__)

_LABEL = re.compile(rb"[\x21-\x7e]{1,128}")


class App:
    """All endpoints on one service. Every answer carries a request id, and every error has OpenAI's shape."""

    def __init__(self, service: Service) -> None:
        self._routes: dict[str, Mapping[str, Endpoint]] = {}
        self._below: dict[str, Mapping[str, Endpoint]] = {}
        for module in (chat, completions, models, tokenize, health):
            self._add(module.routes(service))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        begun = time.perf_counter()
        request_id = _request_id(scope)
        response = await self._respond(Request(scope, receive), request_id)
        spent = b"%d" % ((time.perf_counter() - begun) * 1000)
        response.raw_headers += [(b"x-request-id", request_id), (b"openai-processing-ms", spent)]
        await response(scope, receive, send)

    def _add(self, routes: Routes) -> None:
        for path, methods in routes.items():
            if path.endswith("/*"):
                self._below[path[:-1]] = methods
            else:
                self._routes[path] = methods

    async def _respond(self, request: Request, request_id: bytes) -> Response:
        try:
            return await self._find(request)(request)
        except ClientGoneError:
            return Response(status_code=499)  # nobody reads it; it is what proxies write into their logs
        except MillstreamError as error:
            return errors.response(error)
        except ValidationError as error:
            return errors.response(errors.from_validation(error))
        except Exception:
            log.exception("a request failed", path=request.url.path, request_id=request_id.decode())
            return errors.response(MillstreamError())

    def _find(self, request: Request) -> Endpoint:
        path: str = request.scope["path"]
        methods = self._routes.get(path)
        if methods is None:
            # Whatever is below a path is one name, which may have slashes in it.
            below = (
                routes
                for start, routes in self._below.items()
                if len(path) > len(start) and path.startswith(start)
            )
            methods = next(below, None)
        if methods is None:
            raise NotFoundError("There is nothing at this URL.")
        endpoint = methods.get(request.method)
        if endpoint is None:
            raise errors.WrongMethodError(methods)
        return endpoint


def _request_id(scope: Scope) -> bytes:
    """The client's own label, or a new one; nothing inside is keyed by it."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _LABEL.fullmatch(value):
            return bytes(value)
    return b"req_" + secrets.token_hex(16).encode()
