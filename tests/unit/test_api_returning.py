"""The headers by which a client says that it may come back."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from api.returning import Returning, read
from common.errors import InvalidRequestError
from common.messages import Kind

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "é"}], "seed": 1}


def said(body: dict[str, Any] = BODY, kind: Kind = Kind.CHAT, tenant: str = "", **headers: str) -> Returning:
    return read(
        Headers({name.replace("_", "-"): value for name, value in headers.items()}), kind, body, tenant
    )


def test_by_default_nobody_comes_back() -> None:
    assert said() == Returning(0, "", "")


@pytest.mark.parametrize(("text", "milliseconds"), [("1", 1_000), ("90", 90_000), ("3600", 3_600_000)])
def test_seconds(text: str, milliseconds: int) -> None:
    assert said(millstream_resume=text) == Returning(milliseconds)


@pytest.mark.parametrize("text", ["", "0", "3601", "-1", "1.5", "1e3", "ten", " 5", "0x10", "99999", "\xb2"])
def test_seconds_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        said(millstream_resume=text)
    assert (caught.value.status, caught.value.param) == (400, "Millstream-Resume")


def test_a_key_implies_a_minute_unless_told_otherwise() -> None:
    assert said(idempotency_key="k").resume_ms == 60_000
    assert said(idempotency_key="k", millstream_resume="7").resume_ms == 7_000


@pytest.mark.parametrize("text", ["", "x" * 256, "a\tb", "é", "\x7f"])
def test_keys_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        said(idempotency_key=text)
    assert (caught.value.status, caught.value.param) == (400, "Idempotency-Key")


@pytest.mark.parametrize("text", ["k", "x" * 255, "with spaces ~!"])
def test_keys_of_every_kind(text: str) -> None:
    assert len(said(idempotency_key=text).idem) == 64


@pytest.mark.parametrize("name", ["millstream-resume", "idempotency-key"])
def test_twice_is_once_too_often(name: str) -> None:
    headers = Headers(raw=[(name.encode(), b"5"), (name.encode(), b"6")])
    with pytest.raises(InvalidRequestError, match="once"):
        read(headers, Kind.CHAT, BODY)


def test_keys_of_tenants_are_their_own() -> None:
    keys = {said(tenant=tenant, idempotency_key="k").idem for tenant in ("", "a", "b")}
    assert len(keys) == 3
    assert said(idempotency_key="k").idem == said({"other": 1}, idempotency_key="k").idem


def test_what_is_asked_is_the_same_in_any_order() -> None:
    turned = {"seed": 1, "messages": [{"content": "é", "role": "user"}], "model": "m"}
    assert said(turned, idempotency_key="k") == said(idempotency_key="k")


@pytest.mark.parametrize(
    "other", [BODY | {"seed": 2}, BODY | {"user": "u"}, BODY | {"seed": "1"}, BODY | {"seed": None}, {}]
)
def test_something_else_is_something_else(other: dict[str, Any]) -> None:
    assert said(other, idempotency_key="k").digest != said(idempotency_key="k").digest


def test_the_endpoint_counts() -> None:
    chat, text = (said(kind=kind, idempotency_key="k") for kind in (Kind.CHAT, Kind.COMPLETION))
    assert chat.digest != text.digest


def test_nesting_too_deep_to_be_written_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(600):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested"):
        said(BODY | {"extra": deep}, idempotency_key="k")
