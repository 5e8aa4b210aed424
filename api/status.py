"""A generation as an object of its own: where it is, what it has come to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import orjson

from api.answer import Answer
from api.errors import error_object
from api.events import error_of, usage_object
from common.messages import OutEntry, Request, Usage

_ATTEMPTS = b"attempts:"


def render(request: Request, fields: Mapping[bytes, bytes], entries: Sequence[OutEntry]) -> bytes:
    """The body of `GET /v1/requests/{id}`, from the fields of its `req` and its whole reply so far."""
    last = entries[-1] if entries else None
    error = error_of(last) if last is not None and last.end == "error" else None
    answer = Answer(request)
    for entry in entries:
        if entry.end != "error":
            answer.push(entry)
    return orjson.dumps(
        {
            "id": request.uid,
            "object": "request",
            "label": request.label or None,
            "model": request.reply["model"],
            "class": request.cls,
            "state": fields[b"state"].decode(),
            "created": _seconds(fields, b"created"),
            "started": _seconds(fields, b"started"),
            "ended": _seconds(fields, b"ended"),
            "attempts": max(
                (int(value) for name, value in fields.items() if name.startswith(_ATTEMPTS)), default=0
            ),
            "choices": request.choices,
            "usage": usage_object(usage_of(fields, entries), answer.reasoning_tokens),
            "error": None if error is None else error_object(error),
            "response": orjson.Fragment(answer.body()) if answer.done else None,
        }
    )


def _seconds(fields: Mapping[bytes, bytes], name: bytes) -> int | None:
    """A moment of the server's clock in Unix seconds; None for what has not happened."""
    return int(fields[name]) // 1000 if name in fields else None


def usage_of(fields: Mapping[bytes, bytes], entries: Sequence[OutEntry]) -> Usage:
    """As the end says; before it, and for choices that an error cut off, what has been sent."""
    end = entries[-1].usage if entries else None
    tokens: dict[int, int] = {}
    for entry in entries:
        if entry.choice >= 0:
            tokens[entry.choice] = max(entry.n, tokens.get(entry.choice, 0))
    if end is not None:
        return replace(end, completion_tokens=max(end.completion_tokens, sum(tokens.values())))
    prompt, cached = (int(fields.get(name, b"0")) for name in (b"prompt_tokens", b"cached_tokens"))
    return Usage(prompt, sum(tokens.values()), cached)
