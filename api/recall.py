"""Back to a request that is in Redis already, whichever process admitted it (P3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from api.service import Service
from common.bus.keys import partition_of
from common.errors import MillstreamError, NotFoundError
from common.messages import GENERATIONS, OutEntry, Request, parse_out

_PREFIXES = ("chatcmpl-", "cmpl-")
#: Entries of a reply read at once.
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Recalled:
    """A generation as it lies in Redis; ``request`` may come without its payload."""

    request: Request
    fields: Mapping[bytes, bytes]


async def recall(service: Service, name: str, tenant: str) -> Recalled | None:
    """The tenant's generation with this uid, or response id; None when it has none, whoever else has one."""
    uid = name
    for prefix in _PREFIXES:
        uid = uid.removeprefix(prefix)
    try:
        if partition_of(uid) >= service.settings.partitions:
            return None
    except ValueError:
        return None
    flat = await service.bus.do("HGETALL", service.keys.req(uid))
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        request = Request.from_fields(uid, fields)
        # How many there will be, before the tokenizer has said so.
        request = replace(request, choices=request.reply["choices"])
    except (KeyError, ValueError):
        return None
    visible = request.tenant == tenant and request.kind in GENERATIONS
    return Recalled(request, fields) if visible else None


async def recall_or_404(service: Service, name: str, tenant: str) -> Recalled:
    """`recall`. Raises `NotFoundError`."""
    found = await recall(service, name, tenant)
    if found is None:
        raise NotFoundError("There is no such request, or it has expired.")
    return found


async def entries_of(service: Service, uid: str) -> list[OutEntry]:
    """The whole reply so far."""
    entries: list[OutEntry] = []
    start = "-"
    while True:
        page = await service.bus.do("XRANGE", service.keys.out(uid), start, "+", "COUNT", _PAGE)
        entries += [parse_out(entry_id, fields) for entry_id, fields in page]
        if len(page) < _PAGE:
            return entries
        start = "(" + entries[-1].id


async def is_lost(service: Service, request: Request) -> bool:
    """Whether Redis, being there, does not know the request, or has lost the reply of one that has ended."""
    try:
        ended = await service.bus.do("HMGET", service.keys.req(request.uid), "state", "terminal")
        if ended[0] is not None and ended[1] is None:
            return False
        return ended[0] is None or not await service.bus.do("EXISTS", service.keys.out(request.uid))
    except MillstreamError:
        return False  # Redis is away; it may be back before the deadline
