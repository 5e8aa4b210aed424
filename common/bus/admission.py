"""ADMIT's typed face: a request enters Redis, within the bounds, once for every Idempotency-Key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import messages
from common.bus.keys import SCHEDULERS, Keys, partition_of
from common.bus.scripts import Call
from common.sampling import MAX_PROMPT_LOGPROBS

#: Bytes that a logprob takes in a reply, and that a token takes in a prompt, as text or as its id.
_LOGPROB_BYTES, _TOKEN_BYTES = 32, 4


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer of ADMIT: OK, DUP (``uid`` holds the key already) or FULL; ``waiting`` is the queue's length."""

    code: str
    uid: str
    waiting: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one partition's queue, and the request's times in milliseconds."""

    max_queued: int
    max_bytes: int
    timeout_ms: int
    queue_timeout_ms: int
    #: Life of the request's keys; longer than the timeout by the grace.
    ttl_ms: int
    #: Life of the Idempotency-Key: never shorter than the request's, however that ends.
    idem_ttl_ms: int
    #: Choices that can run at once: what finds one of them free is not queued.
    rows: int = 0


def admit(keys: Keys, request: messages.Request, limits: Limits, *, stale: str = "") -> Call[Admission]:
    """ADMIT, by the API: the request enters Redis and the tokenizers' queue, within the bounds.

    ``stale`` is a holder of the request's key that the caller found gone: what it holds is free.
    """
    p, model, cls, uid = partition_of(request.uid), request.model, request.cls, request.uid
    fields = request.to_fields()
    names = [
        keys.req(uid),
        keys.inflight(p, model, cls),
        keys.work_in(p, model, cls),
        keys.sched(p, model, cls),
        keys.bytes(p, model, cls),
    ]
    if request.idem:
        names += [keys.idem(p, request.idem), keys.req(stale or uid)]
    size = _size(request, len(str(fields["payload"]).encode()))
    args: list[str | int | bytes] = [
        uid, limits.max_queued, limits.max_bytes, size, limits.timeout_ms, limits.queue_timeout_ms,
        limits.ttl_ms, SCHEDULERS, request.resume_ms, limits.idem_ttl_ms, stale, limits.rows,
    ]  # fmt: skip
    for name, value in fields.items():
        args += (name, value)

    def parse(reply: Any) -> Admission:
        code = reply[0].decode()
        if code == "DUP":
            return Admission(code, reply[1].decode(), 0)
        return Admission(code, uid, int(reply[1]))

    return Call("admit", names, args, parse)


def _size(request: messages.Request, payload: int) -> int:
    """What the request adds to the bytes in flight: its prompts, and what it wants to be told of them.

    How many tokens they have, nobody knows yet; the tokenizer refuses what has too many.
    """
    scores = request.params.scores(payload // _TOKEN_BYTES, request.n)
    return payload + _LOGPROB_BYTES * min(scores, MAX_PROMPT_LOGPROBS)
