"""What a client says about coming back: the headers `Millstream-Resume` and `Idempotency-Key`. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.datastructures import Headers

from common.errors import InvalidRequestError
from common.messages import Kind, Request

RESUME, KEY = "Millstream-Resume", "Idempotency-Key"
#: Longest time a request may survive without a reader, and the time for one that only has a key.
MAX_RESUME_S, KEY_RESUME_S = 3600, 60
_SECONDS = re.compile(r"[0-9]{1,4}")
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class Returning:
    """How its client may come back to a request; by default not at all."""

    resume_ms: int = 0
    #: Digest of the tenant and its key; empty without a key.
    idem: str = ""
    #: Digest of what is asked under the key.
    digest: str = ""

    def mark(self, request: Request) -> Request:
        """``request`` as one to come back to."""
        return replace(request, resume_ms=self.resume_ms, idem=self.idem, digest=self.digest)


def read(headers: Headers, kind: Kind, body: Mapping[str, Any], tenant: str = "") -> Returning:
    """What the headers of a generation request say. Raises `InvalidRequestError`."""
    resume, key = _one(headers, RESUME), _one(headers, KEY)
    seconds = 0 if resume is None else _seconds(resume)
    if key is None:
        return Returning(seconds * 1000)
    if not _PRINTABLE.fullmatch(key):
        raise InvalidRequestError(f"{KEY} must be 1 to 255 printable ASCII characters.", param=KEY)
    idem = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()
    return Returning((seconds or KEY_RESUME_S) * 1000, idem, _digest(kind, body))


def _one(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequestError(f"{name} must be given only once.", param=name)
    return values[0] if values else None


def _seconds(text: str) -> int:
    if not _SECONDS.fullmatch(text) or not 1 <= int(text) <= MAX_RESUME_S:
        raise InvalidRequestError(
            f"{RESUME} must be a whole number of seconds from 1 to {MAX_RESUME_S}.", param=RESUME
        )
    return int(text)


def _digest(kind: Kind, body: Mapping[str, Any]) -> str:
    """The same for two bodies that differ only in the order of fields and in white space."""
    try:
        text = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # orjson reads deeper nesting than it writes
        raise InvalidRequestError("The request is nested too deeply.") from None
    return hashlib.sha256(kind.encode() + b"\0" + text).hexdigest()
