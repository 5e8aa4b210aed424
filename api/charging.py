"""What a request costs its API key: charged before it is admitted, corrected after its end.

At first a request costs an estimate of its prompt's tokens and the most it may answer, if it says so; in the
end what it really used. So a key may run into debt with answers of unknown length, and waits it off.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from starlette.types import Scope

from api.auth import caller_of
from api.middleware import STANDING
from api.recall import entries_of, recall
from api.replies import Reply
from api.service import Service
from api.status import usage_of
from common.bus import rates
from common.bus.keys import birth_of, new_uid
from common.bus.rates import Limit, Standing
from common.bus.registry import ModelInfo
from common.errors import (
    InvalidRequestError,
    MillstreamError,
    PermissionDeniedError,
    RateLimitError,
    UnavailableError,
)
from common.logging import Log
from common.messages import GENERATIONS, OutEntry, Request, Usage, dumps

log = Log(__name__)

#: A charge is quick, or Redis is in trouble.
_CHARGE_TIMEOUT_S = 2.0
#: Bytes of a prompt's JSON that make about one token.
_BYTES_PER_TOKEN = 4
#: How often a request is looked at that ends without a reader.
_LOOK_S = 2.0


class Meter:
    """The charges of one HTTP request, which makes one request for the bus, or several until one gets in."""

    def __init__(self, service: Service, scope: Scope) -> None:
        self._service = service
        self._scope = scope
        self._charged: list[Request] = []

    async def charge(self, request: Request, model: ModelInfo) -> Request:
        """``request``, which is for ``model``, with a uid and in the name of who asks, once it may go ahead.

        Raises `PermissionDeniedError`, `RateLimitError`, and `UnavailableError` when Redis does not answer.
        """
        caller = caller_of(self._scope)
        if caller.models and not {request.model, request.reply.get("model")} & set(caller.models):
            raise PermissionDeniedError("The API key does not allow this model.", param="model")
        account = caller.id if caller.limited else ""
        request = replace(request, uid=new_uid(0), tenant=caller.tenant, account=account)
        if not account:
            return request
        settings = self._service.settings
        call = rates.charge(
            self._service.keys,
            account,
            request.uid,
            requests_per_minute=caller.requests_per_minute,
            tokens_per_minute=caller.tokens_per_minute,
            tokens=_estimate(request, model.max_model_len),
            ttl_ms=int((settings.request_timeout + settings.deadline_grace + settings.reply_ttl) * 1000),
        )
        self._charged.append(request)  # before it is known: without an answer it may have happened
        try:
            async with asyncio.timeout(_CHARGE_TIMEOUT_S):
                standing = await self._service.bus.run(call)
        except TimeoutError:
            raise UnavailableError("Redis did not answer in time.", retry_after=2.0) from None
        self._scope[STANDING] = headers_of(standing)
        if standing.short:
            self._charged.pop()  # it was not
            raise RateLimitError(
                f"The API key has used up its {standing.short} per minute.",
                retry_after=standing.wait_ms / 1000,
            )
        return request

    def give_back(self, admitted: Request | None) -> None:
        """Takes back what was charged for all but the request that was admitted in the end."""
        for request in self._charged:
            if admitted is None or birth_of(admitted.uid) != birth_of(request.uid):
                self._service.later(_settle(self._service, request, Usage(0, 0), requests=0))


def settle(service: Service, reply: Reply) -> None:
    """After the end of ``reply``, or its reader's: has its request cost what it used. Idempotent."""
    request, last = reply.request, reply.last
    if request.account:
        service.later(_settle(service, request, _usage_in(last)))


async def _settle(service: Service, request: Request, usage: Usage | None, *, requests: int = 1) -> None:
    """One try. Without ``usage`` the end is waited for; what cannot be settled costs what was charged."""
    try:
        if usage is None:
            usage = await _usage_at_end(service, request)
        if usage is not None:
            tokens = usage.prompt_tokens + usage.completion_tokens if request.kind in GENERATIONS else 0
            call = rates.settle(service.keys, request.account, request.uid, tokens=tokens, requests=requests)
            await service.bus.run(call)
    except MillstreamError as error:
        log.debug("a charge was not corrected", uid=request.uid, reason=error.message)


def _usage_in(last: OutEntry | None) -> Usage | None:
    """The usage of a whole answer; an error does not count what its choices said before."""
    return last.usage if last is not None and last.end == "done" else None


async def _usage_at_end(service: Service, request: Request) -> Usage | None:
    settings, loop = service.settings, asyncio.get_running_loop()
    deadline = loop.time() + settings.request_timeout + settings.deadline_grace
    while loop.time() < deadline:
        found = await recall(service, request.uid, request.tenant)
        if found is None:
            return None
        if found.fields[b"state"] == b"ended":
            return usage_of(found.fields, await entries_of(service, request.uid))
        await asyncio.sleep(_LOOK_S)
    return None


def _estimate(request: Request, context: int) -> int:
    """Tokens to charge before anything is known for sure; no prompt or answer is longer than ``context``.

    What a client only writes down, as the largest number there is, must not put its key into debt for years.
    """
    if request.kind not in GENERATIONS:
        return 0
    choices = int(request.reply["choices"])
    try:
        size = len(dumps(request.payload).encode())
    except TypeError:  # as at admission, which comes after
        raise InvalidRequestError("The request is nested too deeply.") from None
    prompts = min(math.ceil(size / _BYTES_PER_TOKEN), choices // request.n * context)
    return prompts + min(request.params.max_tokens or 0, context) * choices


def headers_of(standing: Standing) -> list[tuple[bytes, bytes]]:
    """OpenAI's `x-ratelimit-*`, for the limits that there are."""
    headers: list[tuple[bytes, bytes]] = []
    for name, limit in ((b"requests", standing.requests), (b"tokens", standing.tokens)):
        if limit.per_minute:
            headers += _headers(name, limit)
    return headers


def _headers(name: bytes, limit: Limit) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-ratelimit-limit-" + name, b"%d" % limit.per_minute),
        (b"x-ratelimit-remaining-" + name, b"%d" % limit.left),
        (b"x-ratelimit-reset-" + name, duration(limit.reset_ms).encode()),
    ]


def duration(millis: int) -> str:
    """A length of time as OpenAI writes it: `12ms`, `1.5s`, `6m0s`, `1h0m5s`."""
    if millis < 1000:
        return f"{millis}ms"
    seconds, rest = divmod(millis, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    tail = f"{seconds + rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{tail}"
    return f"{minutes}m{tail}" if minutes else tail
