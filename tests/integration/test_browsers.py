"""Pages of other origins (CORS): browsers ask for permission without a key, pages may read what they get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.api_process import Answer, Stage, stage
from tests.helpers.keys import bearer

OURS, OTHERS = "https://app.example.com", "https://evil.example.com"
KEY = "static-secret"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    flags = ("--api-key", KEY, "--allowed-origins", f"{OURS},http://localhost:3000")
    with stage(tmp_path_factory.mktemp("browsers"), *flags) as running:
        yield running


def preflight(running: Stage, origin: str, path: str = CHAT) -> Answer:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    return running.api.request("OPTIONS", path, headers=headers)


def test_a_browser_may_ask_for_permission_without_a_key(running: Stage) -> None:
    got = preflight(running, OURS)
    assert got.status == 200
    assert got.headers["access-control-allow-origin"] == OURS
    assert "POST" in got.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in got.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in got.headers


def test_a_page_may_read_answers_and_refusals(running: Stage) -> None:
    answers = [
        running.api.post(CHAT, BODY, {"origin": OURS, **bearer(KEY)}),
        running.api.post(CHAT, BODY | {"stream": True}, {"origin": OURS, **bearer(KEY)}),
        running.api.post(CHAT, BODY, {"origin": OURS}),
        running.api.post(CHAT, {}, {"origin": OURS, **bearer(KEY)}),
    ]
    assert [got.status for got in answers] == [200, 200, 401, 400]
    for got in answers:
        assert got.headers["access-control-allow-origin"] == OURS
        shown = got.headers["access-control-expose-headers"]
        for name in ("x-request-id", "millstream-request", "retry-after", "x-ratelimit-remaining-tokens"):
            assert name in shown


def test_other_origins_get_no_permission(running: Stage) -> None:
    refused = preflight(running, OTHERS)
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert refused.error["message"] == "Disallowed CORS origin."
    for answer in (
        preflight(running, OTHERS),
        running.api.post(CHAT, BODY, {"origin": OTHERS, **bearer(KEY)}),
    ):
        assert "access-control-allow-origin" not in answer.headers


def test_an_option_that_asks_for_no_permission_needs_a_key(running: Stage) -> None:
    assert running.api.request("OPTIONS", CHAT).status == 401
    assert running.api.request("OPTIONS", CHAT, headers={"origin": OURS}).status == 401


def test_every_origin_and_none(tmp_path: Path) -> None:
    with stage(tmp_path, "--api-key", KEY, "--allowed-origins", "*") as running:
        got = preflight(running, OTHERS)
        assert got.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in got.headers
        assert running.api.get("/v1/models").status == 401
    with stage(tmp_path, "--api-key", KEY) as running:
        got = preflight(running, OURS)
        assert got.status == 401
        assert "access-control-allow-origin" not in got.headers
