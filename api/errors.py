"""Errors as HTTP answers: one OpenAI-shaped body for every failure, whoever found it.

Never repeats what the client sent: an echo could be huge, or not be encodable at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.errors import (
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    MethodNotAllowedError,
    MillstreamError,
    NotFoundError,
    UnauthorizedError,
    WorkerCrashedError,
)

#: A client that sends a thousand wrong fields is told about the first few.
_MAX_PROBLEMS, _MAX_LENGTH = 5, 300
#: Trying these again ends the same way, and clients would by themselves.
_NOT_WORTH_RETRYING = (ConflictError, DeadlineError, WorkerCrashedError)


class RequestTimeoutError(InvalidRequestError):
    """The request body did not arrive in time."""

    status = 408


def error_object(error: MillstreamError) -> dict[str, Any]:
    """The value of `error` in an error body or an error event."""
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def response(error: MillstreamError, headers: Mapping[str, str] | None = None) -> Response:
    """``error`` as an answer of its own."""
    body = orjson.dumps({"error": error_object(error)})
    merged = {**error_headers(error), **(headers or {})}
    return Response(body, error.status, merged, media_type="application/json")


def error_headers(error: MillstreamError) -> dict[str, str]:
    """Headers that tell a client what it takes to be served: when to try again, or with what."""
    headers = {}
    if error.retry_after is not None:
        seconds = max(1, math.ceil(error.retry_after))
        headers = {"retry-after": str(seconds), "retry-after-ms": str(max(1, int(error.retry_after * 1000)))}
    if isinstance(error, _NOT_WORTH_RETRYING):
        headers["x-should-retry"] = "false"
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return headers


def from_http(error: HTTPException) -> MillstreamError:
    """What routing found wrong, in our words."""
    if error.status_code == 404:
        return NotFoundError("There is nothing at this URL.")
    if error.status_code == 405:
        return MethodNotAllowedError()
    kind: type[MillstreamError] = InvalidRequestError if error.status_code < 500 else MillstreamError
    found = kind(str(error.detail)[:_MAX_LENGTH])
    found.status = error.status_code
    return found


def from_validation(error: ValidationError) -> InvalidRequestError:
    """The first few things wrong with a body; `param` names the first."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [_sentence(problem["loc"], problem["msg"]) for problem in problems[:_MAX_PROBLEMS]]
    if len(problems) > _MAX_PROBLEMS:
        shown.append(f"and {len(problems) - _MAX_PROBLEMS} more problems")
    return InvalidRequestError("; ".join(shown) + ".", param=_path(problems[0]["loc"]) or None)


def _sentence(location: tuple[int | str, ...], message: str) -> str:
    path = _path(location)
    text = message.rstrip(".")[:_MAX_LENGTH]
    return f"{path}: {text}" if path else text


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`. Names in it are our own fields: what clients invent is never validated."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:_MAX_LENGTH]
