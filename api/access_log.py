"""One line for each HTTP request: what was asked, by whom, and the outcome. No prompts, keys or queries."""

from __future__ import annotations

import time
from collections.abc import Container
from urllib.parse import quote

from starlette.types import Scope

from api.auth import CALLER
from common.bus.access import ApiKey
from common.logging import Log

log = Log(__name__)


class AccessLog:
    """Writes the lines; not those of requests to the paths ``without``."""

    def __init__(self, without: Container[str]) -> None:
        self._without = without

    def write(self, scope: Scope, status: int, begun: float, request_id: bytes) -> None:
        """The line of a request that began at ``begun`` (`time.perf_counter`). Status 0: it had no answer."""
        if scope["path"] in self._without:
            return
        fields: dict[str, object] = {
            "method": scope["method"],
            "path": path_of(scope),
            "status": status,
            "ms": (time.perf_counter() - begun) * 1000,
            "request_id": request_id.decode(),
        }
        caller: ApiKey | None = scope.get(CALLER)
        if caller is not None and caller.id:
            fields["key"] = caller.id
            if caller.tenant:
                fields["tenant"] = caller.tenant
        log.info("request", **fields)


def path_of(scope: Scope) -> str:
    """The path of the route, or what was asked for, without anything that a terminal would obey."""
    path: str | None = getattr(scope.get("route"), "path", None)
    return quote(scope["path"], errors="replace") if path is None else path
