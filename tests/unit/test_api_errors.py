"""Errors on the wire: shape, retry advice, and nothing of what the client sent."""

from __future__ import annotations

import asyncio

import httpx
import orjson
import pytest

from api import errors
from api.app import create_routes
from api.middleware import Envelope, _request_id
from api.pressure import FinishRate
from common.errors import (
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    MillstreamError,
    QueueFullError,
    UnavailableError,
)


def test_the_shape() -> None:
    response = errors.response(InvalidRequestError("Wrong.", param="n"))
    assert response.status_code == 400
    assert orjson.loads(response.body) == {
        "error": {"message": "Wrong.", "type": "invalid_request_error", "param": "n", "code": None}
    }


@pytest.mark.parametrize(
    ("seconds", "header", "millis"), [(0.2, "1", "200"), (1.0, "1", "1000"), (2.1, "3", "2100")]
)
def test_retry_after_is_whole_seconds(seconds: float, header: str, millis: str) -> None:
    got = errors.error_headers(UnavailableError(retry_after=seconds))
    assert got == {"retry-after": header, "retry-after-ms": millis}


def test_errors_that_say_more() -> None:
    assert errors.error_headers(QueueFullError())["retry-after"] == "1"
    for again in (DeadlineError(), ConflictError()):
        assert errors.error_headers(again) == {"x-should-retry": "false"}
    assert errors.error_headers(InvalidRequestError("x")) == {}


def test_advice_follows_the_rate_of_finished_requests() -> None:
    now = 0.0
    rate = FinishRate(lambda: now)
    assert rate.retry_after(100) == 5.0, "nothing is known yet"
    for _ in range(400):
        now += 0.1
        rate.finished()
    assert rate.per_second() == pytest.approx(10, rel=0.05)
    assert rate.retry_after(0) == 1.0
    assert rate.retry_after(50) == pytest.approx(5, rel=0.1)
    assert rate.retry_after(100_000) == 30.0
    now += 1000
    assert rate.retry_after(50) == 5.0, "what was known is forgotten"


@pytest.mark.parametrize(
    ("value", "kept"), [(b"abc-123", True), (b"a" * 129, False), (b"a b", False), ("é".encode(), False)]
)
def test_a_clients_own_request_id_is_a_label(value: bytes, kept: bool) -> None:
    got = _request_id({"headers": [(b"host", b"x"), (b"x-request-id", value)]})
    assert (got == value) is kept
    assert kept or got.startswith(b"req_")


def test_a_fault_of_ours_has_the_same_shape() -> None:
    """Nobody foresaw it: the client is told no more, the log has it all."""

    async def ask() -> httpx.Response:
        # The service that is not there is the fault.
        app = Envelope(create_routes(None), None)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/ready")

    got = asyncio.run(ask())
    assert got.status_code == 500
    assert got.json() == {"error": errors.error_object(MillstreamError())}
    assert got.headers["x-request-id"].startswith("req_")
