"""Request bodies: read within bounds of size and time, and parsed, before anything else looks at them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Receive

from api.client import ClientGoneError
from api.errors import RequestTimeoutError
from api.protocol import DISCARD_BYTES, DISCARD_S
from api.wire import WIRE, Wire
from common.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedMediaTypeError

#: A body has this long to arrive.
BODY_TIMEOUT_S = 60.0


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body of ``request``, of at most ``limit`` bytes."""
    _check_type(request)
    data = await _read(request, limit)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            f"The request body is not valid JSON: {error.msg} (char {error.pos})."
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    return value


def _check_type(request: Request) -> None:
    headers = request.headers
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaTypeError("The Content-Type must be application/json.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaTypeError("The request body must not be compressed.")


async def _read(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limit:
        await _refuse(request.receive, limit)
    wire: Wire = request.scope[WIRE]
    whole = wire.whole_body()
    if whole is None:
        return await _collect(request, limit)
    if len(whole) > limit:
        raise _too_large(limit)
    return whole  # as it mostly is: one packet has it all


async def _collect(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in _chunks(request.receive):
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    await _refuse(request.receive, limit)
    except TimeoutError:
        raise RequestTimeoutError from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _refuse(receive: Receive, limit: int) -> None:
    left = DISCARD_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            async for chunk in _chunks(receive):
                left -= len(chunk)
                if left < 0:
                    break
    raise _too_large(limit)


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than the {limit} bytes allowed.")


async def _chunks(receive: Receive) -> Any:
    """The pieces of a body as they arrive; raises `ClientGoneError` when the client leaves in between."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        more = message.get("more_body", False)
        yield message.get("body", b"")
