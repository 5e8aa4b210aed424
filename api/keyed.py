"""Requests with an Idempotency-Key: one generation per key, whichever replica is asked, and how often."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from api.client import Client
from api.following import attach
from api.recall import recall
from api.replies import Reply
from api.returning import Returning
from api.service import Service
from api.submit import submit_keyed
from common.bus.keys import partition_for
from common.errors import ConflictError, UnavailableError
from common.messages import Request

#: Each try finds a holder that can be joined, or takes the key, unless somebody else did just then.
_TRIES = 4


async def join(
    service: Service, wanted: Returning, tenant: str, make: Callable[[], Awaitable[Request]], client: Client
) -> Reply:
    """The reply to the request that holds the key; it is made and admitted if there is none.

    A holder is joined even where no new request would be admitted. Raises `ConflictError` when something else
    was asked under the key.
    """
    partition = partition_for(wanted.idem, service.settings.partitions)
    key = service.keys.idem(partition, wanted.idem)
    for _ in range(_TRIES):
        holder = await service.bus.do("GET", key)
        uid = "" if holder is None else holder.decode()
        found = await recall(service, uid, tenant) if uid else None
        if found is not None:
            if found.request.digest != wanted.digest:
                raise ConflictError
            return attach(service, found.request, client)
        reply = await submit_keyed(service, wanted.mark(await make()), client, partition, stale=uid)
        if reply is not None:
            return reply
    raise UnavailableError("The Idempotency-Key changes hands too quickly.", retry_after=1.0)
