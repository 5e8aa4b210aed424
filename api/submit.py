"""Into Redis: whether a request may be admitted now, and its admission within the queues' bounds (P4)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from api.charging import settle
from api.client import Client
from api.following import DEADLINE_GRACE_S, follow
from api.leaving import cancel, let_go, pause
from api.pressure import queue_bound
from api.recall import is_lost
from api.replies import LostRequestError, Reply
from api.service import Phase, Service
from common.bus.admission import Admission, Limits, admit
from common.bus.keys import BATCH, moved, partition_of
from common.bus.registry import ModelInfo
from common.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    UnavailableError,
)
from common.messages import GENERATIONS, Kind, Request

#: Admission is quick, or Redis is in trouble.
_ADMIT_TIMEOUT_S = 2.0
#: A dead worker's lease ends within about this time, and its successor has begun.
_TAKEOVER_S = 5.0


async def find_model(service: Service, name: str | None, kind: Kind) -> ModelInfo:
    """The model served under ``name``, if a request of ``kind`` for it may be admitted now.

    None stands for the only model. Raises `ModelNotFoundError` and `UnavailableError`.
    """
    try:
        return _model_now(service, name, kind)
    except (ModelNotFoundError, UnavailableError):
        if service.phase is Phase.DRAINING:
            raise
    await service.look_again()
    return _model_now(service, name, kind)


def _model_now(service: Service, name: str | None, kind: Kind) -> ModelInfo:
    """`find_model` by the present view, which may be a second old."""
    if service.phase is Phase.DRAINING:
        raise UnavailableError("The server is shutting down.", retry_after=1.0)
    if not service.redis_answers:
        raise UnavailableError("Redis cannot be reached.", retry_after=2.0)
    if service.registry.view.unfit:  # the log says more, to whom it concerns
        raise UnavailableError("Redis is not set up to keep requests.", retry_after=_TAKEOVER_S)
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
    """Admits ``request``, which has a uid, on a partition with room and follows its reply.

    Raises `QueueFullError`.
    """
    settings = service.settings
    first, waiting = random.randrange(settings.partitions), 0
    for step in range(settings.partitions):
        uid = moved(request.uid, (first + step) % settings.partitions)
        admitted = replace(request, uid=uid, api=service.id)
        try:
            admission = await _admit(service, admitted, settings.request_timeout)
        except UnavailableError:
            service.later(cancel(service, admitted))  # without an answer it may have happened all the same
            raise
        if admission.code != "FULL":
            return follow(service, admitted, client, _Home(service))
        waiting += admission.waiting
    raise QueueFullError(retry_after=service.rate.retry_after(waiting))


async def submit_keyed(
    service: Service, request: Request, client: Client, partition: int, *, stale: str
) -> Reply | None:
    """`submit` on the one partition where all uses of the key meet; None when somebody else has taken it.

    ``stale`` is a holder of the key whose request is gone, or empty.
    """
    admitted = replace(request, uid=moved(request.uid, partition), api=service.id)
    admission = await _admit(service, admitted, service.settings.request_timeout, stale)
    if admission.code == "FULL":
        raise QueueFullError(retry_after=service.rate.retry_after(admission.waiting))
    if admission.uid != admitted.uid:
        return None
    return follow(service, admitted, client, _Home(service))


async def _admit(service: Service, request: Request, timeout_s: float, stale: str = "") -> Admission:
    """One ADMIT. Raises `UnavailableError` without an answer; it may have happened all the same.

    One with a key is not taken back: its client asks again and finds it, or nobody comes back in time.
    """
    try:
        call = admit(service.keys, request, _limits(service, request, timeout_s), stale=stale)
    except TypeError:  # orjson's word for what has no JSON text: only nesting can still be the reason
        raise InvalidRequestError("The request is nested too deeply.") from None
    try:
        async with asyncio.timeout(_ADMIT_TIMEOUT_S):
            return await service.bus.run(call)
    except TimeoutError:
        raise UnavailableError("Redis did not answer in time.", retry_after=2.0) from None


def _limits(service: Service, request: Request, timeout_s: float) -> Limits:
    settings, partition = service.settings, partition_of(request.uid)
    rows, max_queued = 0, settings.max_queued_requests
    if max_queued is None:
        rows = service.rows(request.model) if request.kind in GENERATIONS else 0
        max_queued = queue_bound(rows, may_be_late=request.cls == BATCH)
    ttl_ms = int((timeout_s + settings.deadline_grace) * 1000)
    return Limits(
        max_queued=_share(max_queued, partition, settings.partitions),
        rows=_share(rows, partition, settings.partitions),
        max_bytes=_share(settings.max_queued_bytes, partition, settings.partitions),
        timeout_ms=int(timeout_s * 1000),
        queue_timeout_ms=int(min(settings.queue_timeout, timeout_s) * 1000),
        ttl_ms=ttl_ms,
        idem_ttl_ms=ttl_ms + int(settings.reply_ttl * 1000),
    )


def _share(limit: int, partition: int, partitions: int) -> int:
    """One partition's part of a bound on all of them; the parts add up to ``limit``."""
    return limit // partitions + (partition < limit % partitions)


class _Home:
    """`api.replies.Home` on this service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def is_lost(self, request: Request) -> bool:
        return await is_lost(self._service, request)

    async def readmit(self, request: Request, deadline: float) -> None:
        left = deadline - DEADLINE_GRACE_S - asyncio.get_running_loop().time()
        if left <= 0:
            raise LostRequestError
        admission = await _admit(self._service, request, left)
        if admission.code == "FULL":
            raise QueueFullError(retry_after=self._service.rate.retry_after(admission.waiting))
        if admission.uid != request.uid:  # its client asked elsewhere meanwhile: that is the one that counts
            raise LostRequestError

    def pause(self, request: Request, *, on: bool) -> None:
        self._service.later(pause(self._service, request, on=on))

    def closed(self, reply: Reply, *, ended: bool) -> None:
        service, request = self._service, reply.request
        service.live.discard(reply)
        service.rate.finished()
        settle(service, reply)
        if ended:
            return
        if not request.resume_ms:
            service.later(cancel(service, request))
        elif not any(other.uid == request.uid for other in service.live):
            service.later(let_go(service, request, request.resume_ms))
