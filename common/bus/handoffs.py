"""Typed faces of the hand-off scripts: who calls them, what they promise. Keys and arguments are built here.

Each function returns a `Call`; run it with `Bus.run` or `AsyncBus.run`. All are idempotent under retries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from common import messages
from common.bus.keys import SCHEDULERS, TOKENIZERS, Keys, partition_of
from common.bus.scripts import Call


class Gate(StrEnum):
    """Answer of a gated hand-off."""

    OK = "OK"
    DUP = "DUP"  #: somebody else made it
    ENDED = "ENDED"  #: the request's reply has ended, or it is gone


def _gate(reply: bytes) -> Gate:
    return Gate(reply.decode())


def tok_done(
    keys: Keys,
    request: messages.Request,
    entry: str,
    prompts: Sequence[Sequence[int]],
    ttl_ms: int,
    *,
    echo: str = "",
) -> Call[Gate]:
    """TOK_DONE, by the tokenizer: token ids and one `sched` entry per choice; the reply is accepted.

    ``echo`` goes with the accepted entry, if there is something to echo.
    """
    p, uid = partition_of(request.uid), request.uid
    names = [
        keys.work_in(p, request.model, request.cls),
        keys.req(uid),
        keys.out(uid),
        keys.sched(p, request.model, request.cls),
        *(keys.gen(uid, choice) for choice in range(len(prompts) * request.n)),
    ]
    prompt_tokens = sum(map(len, prompts))
    args = (TOKENIZERS, entry, uid, ttl_ms, prompt_tokens, messages.join_prompts(prompts), echo)
    return Call("tok_done", names, args, _gate)


def tok_end(
    keys: Keys,
    request: messages.Request,
    entry: str,
    end: messages.OutEntry,
    *,
    ttl_ms: int,
    worker: str,
    dead_reason: str = "",
) -> Call[Gate]:
    """TOK_END, by the tokenizer: an input error or an answer ends the request before the hand-off."""
    p, uid = partition_of(request.uid), request.uid
    names = (
        keys.work_in(p, request.model, request.cls),
        keys.req(uid),
        keys.out(uid),
        keys.inflight(p, request.model, request.cls),
        keys.bytes(p, request.model, request.cls),
        keys.cancel(p),
        keys.pause(p),
        keys.dead(p),
    )
    args: list[str | int | bytes] = [TOKENIZERS, entry, uid, ttl_ms, end.end, dead_reason, worker]
    if end.answer:
        args += ("answer", end.answer)
    else:
        args += ("error", end.error, "message", end.message, "param", end.param)
    return Call("tok_end", names, args, _gate)


def attempt(keys: Keys, uid: str, worker: str) -> Call[int]:
    """ATTEMPT, by the tokenizer, for a claimed job: how many tries it has had, this one included."""
    return Call("attempt", (keys.req(uid),), (worker,), int)


def drop(
    keys: Keys, uid: str, choice: int, *, stream: str, group: str, entry: str, model: str, cls: str
) -> Call[int]:
    """DROP, by whoever read a work entry that nobody wants any more."""
    p = partition_of(uid)
    names = (
        stream,
        keys.req(uid),
        keys.inflight(p, model, cls),
        keys.bytes(p, model, cls),
        keys.cancel(p),
        keys.pause(p),
        keys.gen(uid, choice),
    )
    return Call("drop", names, (group, entry, uid, choice), int)


@dataclass(slots=True)  # not frozen: one is made per token, and freezing costs four times
class EmitRow:
    """One row of a step: ``piece`` is what its token log grows by; ``record`` its line in `tok`.

    ``at`` is the length of the log before it. It fences each row: should another worker have got the choice
    (after Redis rolled back), or the log be gone, the row is refused whole.
    """

    uid: str
    choice: int
    record: str
    piece: str
    at: int


@dataclass(frozen=True, slots=True)
class EmitEnd:
    """The work on a choice ends: its `sched` entry is acked."""

    uid: str
    choice: int
    model: str
    cls: str
    entry: str
    dead_reason: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step sends to one partition. The row of an end without a token has an empty piece."""

    rows: tuple[EmitRow, ...] = ()
    ends: tuple[EmitEnd, ...] = ()
    #: (uid, choice, prompt tokens found in the prefix cache); of a prompt's samples only the first counts.
    cached: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Emitted:
    """Answer of EMIT.

    ``stored`` is the last step that Redis has. BEHIND: it rolled back to that; resend from there. OK: the
    control sets of the partition (B9), the backlog of `tok`, and the (uid, choice) of refused rows, which are
    not this worker's any more.
    """

    code: str
    stored: int
    backlog: int
    cancel: frozenset[str]
    pause: frozenset[str]
    refused: tuple[tuple[str, int], ...]


def emit(keys: Keys, partition: int, worker: str, seq: int, step: Step) -> Call[Emitted]:
    """EMIT, by the scheduler: one engine step of one partition; ``seq`` 0 is the tick that only listens."""
    names = [
        keys.lease(partition, worker),
        keys.tok(partition),
        keys.cancel(partition),
        keys.pause(partition),
        keys.dead(partition),
    ]
    home = keys.base(partition)  # and not `Keys.gen`, which looks for it in every uid
    names += [f"{home}gen:{row.uid}:{row.choice}" for row in step.rows]
    names += [keys.req(uid) for uid, _, _ in step.cached]
    records = "|".join([row.record for row in step.rows])
    args: list[str | int | bytes] = [
        seq, SCHEDULERS, worker, len(step.rows), len(step.cached), len(step.ends), records
    ]  # fmt: skip
    for row in step.rows:
        args += (row.piece, row.at)
    for _, choice, tokens in step.cached:
        args += (choice, tokens)
    for end in step.ends:
        names += (
            keys.req(end.uid),
            keys.sched(partition, end.model, end.cls),
            keys.inflight(partition, end.model, end.cls),
            keys.bytes(partition, end.model, end.cls),
        )
        args += (end.uid, end.choice, end.entry, end.dead_reason)

    def parse(reply: Any) -> Emitted:
        if reply[0] == b"BEHIND":
            return Emitted("BEHIND", int(reply[1]), 0, frozenset(), frozenset(), ())
        refused = tuple((step.rows[i].uid, step.rows[i].choice) for i in reply[4])
        return Emitted("OK", int(reply[5]), int(reply[1]), _members(reply[2]), _members(reply[3]), refused)

    return Call("emit", names, args, parse)


def _members(reply: Any) -> frozenset[str]:
    return frozenset(member.decode("utf-8", "replace") for member in reply)


def look(keys: Keys, uid: str, choice: int, fields: Sequence[str]) -> Call[list[Any]]:
    """LOOK, by the detokenizer: token ids of the choice's prompt, and fields of its request."""
    return Call("look", (keys.req(uid),), (choice, *fields), list)


@dataclass(slots=True)  # not frozen: one is made per token, and freezing costs four times
class Text:
    """A delta of one choice: text, rows of logprobs (see `common.messages.OutEntry`), or both."""

    uid: str
    choice: int
    n: int
    at: int
    text: str
    logprobs: str = ""
    prompt_logprobs: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice (``finish``), or of the whole request (``error``, a kind of common.errors)."""

    uid: str
    choice: int
    choices: int
    model: str
    cls: str
    n: int = 0
    at: int = 0
    text: str = ""
    finish: str = ""
    stop: str = ""
    logprobs: str = ""
    prompt_logprobs: str = ""
    #: The engine may still be generating this choice: ask it to stop.
    halt: bool = False
    error: str = ""
    message: str = ""
    param: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """Answer of PUB: OK, or MOVED with the offset that is really stored."""

    code: str
    offset: str


def pub(
    keys: Keys,
    partition: int,
    *,
    epoch: int,
    expected: str,
    offset: str,
    entries: int,
    ttl_ms: int,
    texts: Sequence[Text],
    finished: Sequence[Finished],
    group: str,
) -> Call[Published]:
    """PUB, by the detokenizer that owns the partition: texts, ends and its new offset, atomically."""
    names = [keys.detok_lease(partition), keys.tok(partition), keys.cancel(partition), keys.pause(partition)]
    home = keys.base(partition)  # and not `Keys.out`, which looks for it in every uid
    names += [f"{home}out:{text.uid}" for text in texts]
    more = _more(texts, finished)
    args: list[str | int | bytes] = [
        epoch, group, expected, offset, entries, ttl_ms, len(texts), len(finished), len(more) // 3
    ]  # fmt: skip
    for text in texts:
        args += (f"{text.choice} {text.n} {text.at}", text.text)
    for end in finished:
        names += (
            keys.out(end.uid),
            keys.req(end.uid),
            keys.inflight(partition, end.model, end.cls),
            keys.bytes(partition, end.model, end.cls),
            *(keys.gen(end.uid, choice) for choice in range(end.choices)),
        )
        args += (
            end.uid, end.choices, end.choice, end.n, end.at, end.text, end.finish, end.stop, int(end.halt),
            end.error, end.message, end.param,
        )  # fmt: skip
    args += more

    def parse(reply: Any) -> Published:
        if isinstance(reply, list):
            return Published("MOVED", reply[1].decode())
        return Published("OK", offset)

    return Call("pub", names, args, parse)


def _more(texts: Sequence[Text], finished: Sequence[Finished]) -> list[str | int]:
    """Fields that few entries have, named apart so that the many do not pay for them."""
    more: list[str | int] = []
    entries: list[Text | Finished] = [*texts, *finished]
    for place, made in enumerate(entries, 1):
        if made.logprobs:
            more += (place, "logprobs", made.logprobs)
        if made.prompt_logprobs:
            more += (place, "prompt_logprobs", made.prompt_logprobs)
    return more


def _request_keys(keys: Keys, uid: str, model: str, cls: str) -> tuple[str, ...]:
    p = partition_of(uid)
    return (
        keys.req(uid),
        keys.out(uid),
        keys.inflight(p, model, cls),
        keys.bytes(p, model, cls),
        keys.cancel(p),
        keys.pause(p),
    )


def cancel(
    keys: Keys,
    uid: str,
    *,
    model: str,
    cls: str,
    ttl_ms: int,
    error: str,
    message: str,
    abandoned: bool = False,
) -> Call[str]:
    """CANCEL, by the API or an operator: NONE, ENDED (nobody owned it) or FLAGGED (its scheduler will).

    ``abandoned``: only if nobody holds it; else HELD.
    """
    return Call(
        "cancel",
        _request_keys(keys, uid, model, cls),
        (uid, ttl_ms, error, message, int(abandoned)),
        lambda r: str(r, "ascii"),
    )


def pause(keys: Keys, uid: str, *, on: bool) -> Call[bool]:
    """PAUSE, by the API: whether the request is flagged to be paused by its scheduler now."""
    return Call("pause", (keys.req(uid), keys.pause(partition_of(uid))), (uid, int(on)), bool)


def expire(keys: Keys, uid: str, *, model: str, cls: str, owner: str, ttl_ms: int, lost_ms: int) -> Call[str]:
    """EXPIRE, by every sweep, for an overdue member of `inflight`; ``owner`` is empty when none is known."""
    names = (*_request_keys(keys, uid, model, cls), keys.lease(partition_of(uid), owner or "-"))
    return Call("expire", names, (uid, ttl_ms, owner, lost_ms), lambda r: str(r, "ascii"))
