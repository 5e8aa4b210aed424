"""What travels through Redis, as typed values and their text forms.

Rules of evolution (B10): new fields have defaults, unknown fields are ignored, none changes its meaning.
All forms are text that `redis-cli` shows as it is; numbers are decimal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

import orjson

from common.sampling import SamplingParams

VERSION = 1


class Kind(StrEnum):
    """What a request asks for, and with it the shape of its payload."""

    CHAT = "chat"
    COMPLETION = "completion"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


#: Kinds that a scheduler runs; a tokenizer answers the others.
GENERATIONS = frozenset({Kind.CHAT, Kind.COMPLETION})


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it lies in `ms:{p}:req:<uid>`, from admission to the end of its reply.

    ``payload`` is the tokenizer's input (messages or prompt, template options) and is dropped once
    tokenized. ``reply`` is what any API replica needs to shape the answer (stream or not, the model name
    as the client wrote it, ...). ``n`` is samples per prompt; a request has prompts * n choices.
    """

    uid: str
    kind: Kind
    model: str
    params: SamplingParams
    payload: Mapping[str, Any]
    reply: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    cls: str = "interactive"
    tenant: str = ""
    #: The API key whose limits it counts against; empty if it has none.
    account: str = ""
    api: str = ""
    #: How its client calls it; nothing is found by it.
    label: str = ""
    #: How long it survives without a reader, in milliseconds; 0: it ends with its connection.
    resume_ms: int = 0
    #: Digests of its Idempotency-Key and of what was asked under it; empty without one.
    idem: str = ""
    digest: str = ""
    #: Set by the server at admission: its clock, milliseconds.
    created: int = 0
    deadline: int = 0
    #: The client's part of the namespace of its cached prompts; see `cache_namespace`.
    salt: str = ""
    #: Lower is begun earlier, within its class.
    priority: int = 0
    #: Set at the hand-off of the tokenizer.
    ids: tuple[tuple[int, ...], ...] = ()
    choices: int = 0
    prompt_tokens: int = 0

    def to_fields(self) -> dict[str, str | int]:
        """The hash fields that ADMIT writes; some only if there is something to say."""
        special: dict[str, str | int] = {
            "account": self.account,
            "resume": self.resume_ms,
            "idem": self.idem,
            "digest": self.digest,
            "label": self.label,
            "salt": self.salt,
            "priority": self.priority,
        }
        return {
            "v": VERSION,
            "kind": self.kind.value,
            "model": self.model,
            "class": self.cls,
            "tenant": self.tenant,
            "api": self.api,
            "n": self.n,
            "params": self.params.to_json(),
            "payload": dumps(self.payload),
            "reply": dumps(self.reply),
            **{name: value for name, value in special.items() if value},
        }

    @property
    def cache_namespace(self) -> str:
        """Who shares cached prompts with it: requests with the same salt of the same tenant, nobody else."""
        return f"{len(self.tenant)}:{self.tenant}{self.salt}"

    @classmethod
    def from_fields(cls, uid: str, fields: Mapping[bytes, bytes]) -> Request:
        """The request read back from its hash; raises KeyError or ValueError when it is not one."""
        return cls(
            uid=uid,
            kind=Kind(fields[b"kind"].decode()),
            model=fields[b"model"].decode(),
            params=SamplingParams.from_json(fields[b"params"]),
            payload=orjson.loads(fields.get(b"payload", b"{}")),
            reply=orjson.loads(fields.get(b"reply", b"{}")),
            n=int(fields.get(b"n", b"1")),
            cls=fields.get(b"class", b"interactive").decode(),
            tenant=fields.get(b"tenant", b"").decode(),
            account=fields.get(b"account", b"").decode(),
            api=fields.get(b"api", b"").decode(),
            resume_ms=int(fields.get(b"resume", b"0")),
            idem=fields.get(b"idem", b"").decode(),
            digest=fields.get(b"digest", b"").decode(),
            label=fields.get(b"label", b"").decode(),
            salt=fields.get(b"salt", b"").decode(),
            priority=int(fields.get(b"priority", b"0")),
            created=int(fields.get(b"created", b"0")),
            deadline=int(fields.get(b"deadline", b"0")),
            ids=parse_prompts(fields.get(b"ids", b"")),
            choices=int(fields.get(b"choices", b"0")),
            prompt_tokens=int(fields.get(b"prompt_tokens", b"0")),
        )


def dumps(value: Any) -> str:
    """JSON text; lone surrogates were refused at the edge, so this cannot fail on what was admitted."""
    return orjson.dumps(value).decode()


def join_ids(ids: Iterable[int]) -> str:
    """``15043,29892,``: the form of a token log, which grows by appending."""
    return "".join(f"{token}," for token in ids)


def parse_ids(text: bytes) -> list[int]:
    """Inverse of `join_ids`; a missing last comma is allowed."""
    return [int(token) for token in text.split(b",") if token]


def join_prompts(prompts: Sequence[Sequence[int]]) -> str:
    """Prompts of token ids separated by semicolons."""
    return ";".join(",".join(map(str, prompt)) for prompt in prompts)


def parse_prompts(text: bytes) -> tuple[tuple[int, ...], ...]:
    """Inverse of `join_prompts`."""
    return tuple(tuple(parse_ids(prompt)) for prompt in text.split(b";")) if text else ()


@dataclass(slots=True)  # not frozen: one is made per token, and freezing costs four times
class TokRecord:
    """One row of an engine step in `tok`: a token, an end, or both. Text: ``uid choice index token[ end]``.

    Whatever a newer version adds to it is a word with an equals sign, and ignored by an older one.

    ``token`` is None (written ``-``) for an end without one. ``end`` is stop, length, or error; an error
    carries its kind and message (`common.errors`), percent-encoded: ``error:cancelled:The%20request...``.

    ``logprobs`` (written ``lp=``) is the token's own logprob and the likeliest ids with theirs, best first:
    ``-0.2612,9342:-0.2612,260:-2.7451``; natural logarithms, and -9999 for what JSON cannot hold.
    ``prompt`` (written ``plp=``) says the same of a stretch of the prompt's tokens: the position of the
    first, then one such value for each: ``1;-11.5503,28:-1.2,...;-0.34,...``. A record may be there for it
    alone: no token, no end. After a crash stretches may come again, cut otherwise.
    """

    uid: str
    choice: int
    index: int
    token: int | None
    end: str = ""
    error: str = ""
    message: str = ""
    logprobs: str = ""
    prompt: str = ""


def format_record(record: TokRecord) -> str:
    """The text of one record."""
    token = "-" if record.token is None else record.token
    text = f"{record.uid} {record.choice} {record.index} {token}"
    if record.end:
        text += f" {record.end}"
        if record.error:
            text += f":{record.error}:{quote(record.message, safe='')}"
    if record.logprobs:
        text += f" lp={record.logprobs}"
    if record.prompt:
        text += f" plp={record.prompt}"
    return text


def parse_records(text: str) -> list[TokRecord]:
    """The records of one `tok` entry, which are separated by ``|``."""
    records = []
    for row in text.split("|"):
        uid, choice, index, word, *parts = row.split(" ")
        record = TokRecord(uid, int(choice), int(index), None if word == "-" else int(word))
        for part in parts:
            name, equals, value = part.partition("=")
            if not equals:
                record.end, _, rest = part.partition(":")
                record.error, _, message = rest.partition(":")
                record.message = unquote(message)
            elif name == "lp":
                record.logprobs = value
            elif name == "plp":
                record.prompt = value
        records.append(record)
    return records


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class OutEntry:
    """One entry of a reply stream `ms:{p}:out:<uid>`; which fields are set says what it is.

    accepted (``accepted``, and ``echo``), text of a choice (``choice`` >= 0; with ``finish`` its last), an
    answer of /tokenize or /detokenize (``answer``), and the one terminal entry (``end`` is done or error),
    which may also be the last text. ``n`` counts the choice's tokens covered so far, ``at`` is the offset of
    ``text`` in the choice's text, in code points; the entry's field ``at`` has all three numbers, since every
    field of an entry costs Redis and its readers as much as a number. ``stop`` is JSON: the stop string or
    token id that hit.

    JSON too, and only where they were asked for: ``logprobs`` is the row of token number ``n`` - 1, which
    comes with its token even if its text is held back; ``prompt_logprobs`` is a stretch of the prompt's rows.
    Both are `workers.text.logprobs`'s and may come with a text or without. ``echo``: see `workers.text.echo`.
    """

    id: str
    choice: int = -1
    n: int = 0
    at: int = 0
    text: str = ""
    finish: str = ""
    stop: str = ""
    logprobs: str = ""
    prompt_logprobs: str = ""
    accepted: int = -1
    echo: str = ""
    answer: str = ""
    end: str = ""
    usage: Usage | None = None
    error: str = ""
    message: str = ""
    param: str = ""


_TEXTS = frozenset(
    {
        b"text",
        b"finish",
        b"stop",
        b"logprobs",
        b"prompt_logprobs",
        b"echo",
        b"answer",
        b"end",
        b"error",
        b"message",
        b"param",
    }
)


def parse_out(entry_id: bytes, fields: Sequence[bytes]) -> OutEntry:
    """An entry from the flat field list of XREAD or XRANGE."""
    if len(fields) == 4 and fields[0] == b"at":  # the plain delta, by far the most common
        choice, n, at = fields[1].split()
        return OutEntry(entry_id.decode(), int(choice), int(n), int(at), fields[3].decode())
    entry = OutEntry(entry_id.decode())
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        if name in _TEXTS:
            setattr(entry, name.decode(), value.decode())
        elif name == b"at":
            entry.choice, entry.n, entry.at = map(int, value.split())
        elif name == b"accepted":
            entry.accepted = int(value)
        elif name == b"usage":
            entry.usage = Usage(*map(int, value.split(b" ")[:3]))
    return entry
