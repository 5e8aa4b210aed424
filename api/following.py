"""Readers of a request that is in Redis already, whichever connection and process admitted it (P3)."""

from __future__ import annotations

import asyncio

from api.charging import settle
from api.client import Client
from api.leaving import give_up, let_go, pause
from api.recall import is_lost
from api.replies import Home, Reply
from api.service import Phase, Service
from common.bus.registry import API
from common.errors import UnavailableError
from common.messages import Request

#: How long an API process waits beyond a request's deadline for the workers' own word on it.
DEADLINE_GRACE_S = 3.0


def attach(service: Service, request: Request, client: Client) -> Reply:
    """Follows a recalled request from the start of its reply. Raises `UnavailableError`."""
    if service.phase is Phase.DRAINING:
        raise UnavailableError("The server is shutting down.", retry_after=1.0)
    # Whoever was slow before, and may have died since: this reader has not been.
    service.later(pause(service, request, on=False))
    return follow(service, request, client, _ReaderHome(service))


def follow(service: Service, request: Request, client: Client, home: Home) -> Reply:
    """The reply to a request that is in Redis, from its start."""
    deadline = asyncio.get_running_loop().time() + service.settings.request_timeout + DEADLINE_GRACE_S
    reply = Reply(home, request, service.replies.subscribe(request.uid), client, deadline)
    service.live.add(reply)
    return reply


class _ReaderHome:
    """`api.replies.Home` of a reply to a request that was admitted by another connection."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def is_lost(self, request: Request) -> bool:
        return await is_lost(self._service, request)

    async def readmit(self, request: Request, deadline: float) -> None:
        """Left to the process that has the request as it came: it has until the next look."""

    def pause(self, request: Request, *, on: bool) -> None:
        """Not for a plain request with a client of its own: that one is not to be slowed by others."""
        if request.resume_ms or not self._is_served(request):
            self._service.later(pause(self._service, request, on=on))

    def closed(self, reply: Reply, *, ended: bool) -> None:
        service, request = self._service, reply.request
        service.live.discard(reply)
        if ended:
            settle(service, reply)
        if ended or any(other.uid == request.uid for other in service.live):
            return
        if request.resume_ms:
            service.later(let_go(service, request, request.resume_ms))
        elif not self._is_served(request):
            service.later(give_up(service, request))

    def _is_served(self, request: Request) -> bool:
        """Whether the process that admitted the request lives: then it is up to its own client."""
        if request.api == self._service.id:
            return True
        workers = self._service.registry.view.workers
        return any(worker.role == API and worker.id == request.api for worker in workers)
