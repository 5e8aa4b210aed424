"""Into Redis: whether a request may be admitted now, and its admission within the queues' bounds (P4)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from api.client import Client
from api.replies import LostRequestError, Reply
from api.service import Phase, Service
from common.bus import handoffs
from common.bus.handoffs import Admission, Limits
from common.bus.keys import new_uid, partition_of
from common.bus.registry import ModelInfo
from common.errors import (
    InvalidRequestError,
    MillstreamError,
    ModelNotFoundError,
    QueueFullError,
    UnavailableError,
)
from common.logging import Log
from common.messages import Kind, Request

log = Log(__name__)

#: How long an API process waits beyond a request's deadline for the workers' own word on it.
DEADLINE_GRACE_S = 3.0
#: Admission is quick, or Redis is in trouble.
_ADMIT_TIMEOUT_S = 5.0
#: A dead worker's lease ends within about this time, and its successor has begun.
_TAKEOVER_S = 5.0
#: Tries to cancel, should Redis be away, and the pause between them.
_CANCEL_TRIES, _CANCEL_PAUSE_S = 30, 1.0


async def find_model(service: Service, name: str | None, kind: Kind) -> ModelInfo:
    """The model served under ``name``, if a request of ``kind`` for it may be admitted now.

    None stands for the only model. Raises `ModelNotFoundError` and `UnavailableError`.
    """
    try:
        return _model_now(service, name, kind)
    except (ModelNotFoundError, UnavailableError):
        if service.phase is Phase.DRAINING or not service.redis_answers:
            raise
    await service.look_again()
    return _model_now(service, name, kind)


def _model_now(service: Service, name: str | None, kind: Kind) -> ModelInfo:
    """`find_model` by the present view, which may be a second old."""
    if service.phase is Phase.DRAINING:
        raise UnavailableError("The server is shutting down.", retry_after=1.0)
    if not service.redis_answers:
        raise UnavailableError("Redis cannot be reached.", retry_after=2.0)
    model = _resolve(service, name)
    if missing := service.missing_roles(model, kind):
        raise UnavailableError(f"No {missing[0]} is running for this model.", retry_after=_TAKEOVER_S)
    if service.memory_is_short:
        wait = service.rate.retry_after(len(service.live))
        raise UnavailableError("Redis is almost full.", retry_after=wait)
    return model


def _resolve(service: Service, name: str | None) -> ModelInfo:
    view = service.registry.view
    if not view.models:
        raise UnavailableError("No model is loaded yet.", retry_after=_TAKEOVER_S)
    if name is None:
        if len(view.models) > 1:
            raise InvalidRequestError("model is required, since several are served.", param="model")
        return next(iter(view.models.values()))
    model = view.resolve(name)
    if model is None:
        raise ModelNotFoundError(f"The model `{name[:100]}` does not exist.", param="model")
    return model


async def submit(service: Service, request: Request, client: Client) -> Reply:
    """Admits ``request`` on a partition with room and follows its reply. Raises `QueueFullError`."""
    settings = service.settings
    first, waiting = random.randrange(settings.partitions), 0
    for step in range(settings.partitions):
        uid = new_uid((first + step) % settings.partitions)
        admitted = replace(request, uid=uid, api=service.id)
        admission = await _admit(service, admitted, settings.request_timeout)
        if admission.code != "FULL":
            return _follow(service, admitted, client)
        waiting += admission.waiting
    raise QueueFullError(retry_after=service.rate.retry_after(waiting))


async def _admit(service: Service, request: Request, timeout_s: float) -> Admission:
    """One ADMIT. One without an answer may have happened all the same, so it is taken back."""
    try:
        call = handoffs.admit(service.keys, request, _limits(service, request.uid, timeout_s))
    except TypeError:  # orjson's word for what has no JSON text: only nesting can still be the reason
        raise InvalidRequestError("The request is nested too deeply.") from None
    try:
        async with asyncio.timeout(_ADMIT_TIMEOUT_S):
            return await service.bus.run(call)
    except UnavailableError:
        service.later(cancel(service, request))
        raise
    except TimeoutError:
        service.later(cancel(service, request))
        raise UnavailableError("Redis did not answer in time.", retry_after=2.0) from None


def _limits(service: Service, uid: str, timeout_s: float) -> Limits:
    settings, partition = service.settings, partition_of(uid)
    return Limits(
        max_queued=_share(settings.max_queued_requests, partition, settings.partitions),
        max_bytes=_share(settings.max_queued_bytes, partition, settings.partitions),
        timeout_ms=int(timeout_s * 1000),
        queue_timeout_ms=int(min(settings.queue_timeout, timeout_s) * 1000),
        ttl_ms=int((timeout_s + settings.deadline_grace) * 1000),
    )


def _share(limit: int, partition: int, partitions: int) -> int:
    """One partition's part of a bound on all of them; the parts add up to ``limit``."""
    return limit // partitions + (partition < limit % partitions)


def _follow(service: Service, request: Request, client: Client) -> Reply:
    deadline = asyncio.get_running_loop().time() + service.settings.request_timeout + DEADLINE_GRACE_S
    reply = Reply(_Home(service), request, service.replies.subscribe(request.uid), client, deadline)
    service.live.add(reply)
    return reply


class _Home:
    """`api.replies.Home` on this service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def is_lost(self, request: Request) -> bool:
        try:
            return not await self._service.bus.do("EXISTS", self._service.keys.req(request.uid))
        except MillstreamError:
            return False  # Redis is away; it may be back before the deadline

    async def readmit(self, request: Request, deadline: float) -> None:
        left = deadline - DEADLINE_GRACE_S - asyncio.get_running_loop().time()
        if left <= 0:
            raise LostRequestError
        admission = await _admit(self._service, request, left)
        if admission.code == "FULL":
            raise QueueFullError(retry_after=self._service.rate.retry_after(admission.waiting))

    def pause(self, request: Request, *, on: bool) -> None:
        self._service.later(_pause(self._service, request, on=on))

    def closed(self, reply: Reply, *, ended: bool) -> None:
        self._service.live.discard(reply)
        self._service.rate.finished()
        if not ended:
            self._service.later(cancel(self._service, reply.request))


async def _pause(service: Service, request: Request, *, on: bool) -> None:
    try:
        await service.bus.run(handoffs.pause(service.keys, request.uid, on=on))
    except MillstreamError as error:
        log.warning("could not pause or resume", uid=request.uid, error=error.message)


async def cancel(service: Service, request: Request) -> None:
    """Ends a request that nobody waits for. Keeps trying for a while when Redis does not answer."""
    call = handoffs.cancel(
        service.keys,
        request.uid,
        model=request.model,
        cls=request.cls,
        ttl_ms=int(service.settings.reply_ttl * 1000),
        error="cancelled",
        message="The client closed the connection.",
    )
    for _ in range(_CANCEL_TRIES):
        try:
            code = await service.bus.run(call)
        except MillstreamError as error:
            log.warning("could not cancel yet", uid=request.uid, error=error.message)
            await asyncio.sleep(_CANCEL_PAUSE_S)
        else:
            log.debug("cancelled", uid=request.uid, code=code)
            return
