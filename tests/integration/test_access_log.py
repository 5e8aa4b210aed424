"""The access log: a line for each request, which says nothing that is nobody's business."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.api_process import Stage, stage
from tests.helpers.keys import bearer
from tests.helpers.waiting import until

KEY = "static-secret"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "my own words"}]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("log"), "--api-key", KEY, "--log-format", "json") as running:
        yield running


def lines(running: Stage, request_id: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in running.api.log().splitlines() if request_id in line]
    return [line for line in found if line["message"] == "request"]


@pytest.mark.parametrize(
    ("method", "path", "body", "key", "status", "template"),
    [
        ("POST", CHAT, BODY, KEY, 200, CHAT),
        ("POST", CHAT, BODY | {"stream": True}, KEY, 200, CHAT),
        ("POST", CHAT + "?token=hidden", {}, KEY, 400, CHAT),
        ("POST", CHAT, BODY, None, 401, CHAT),
        ("GET", "/v1/models/test-model", None, KEY, 200, "/v1/models/{name:path}"),
        ("GET", "/v1/requests/0-1", None, KEY, 404, "/v1/requests/{name}"),
        ("GET", "/nothing/%1b%5b2J%0a%F0%9F", None, KEY, 404, "/nothing/%1B%5B2J%0A"),
        ("GET", "/version", None, None, 200, "/version"),
    ],
)
def test_a_line_for_each_request(
    running: Stage, method: str, path: str, body: Any, key: str | None, status: int, template: str
) -> None:
    label = f"label-{abs(hash((method, path, str(body), key)))}"
    headers = {"x-request-id": label, "content-type": "application/json", **(bearer(key) if key else {})}
    data = None if body is None else json.dumps(body).encode()
    assert running.api.request(method, path, data, headers).status == status
    [line] = until(lambda: lines(running, label), "its line", 5)
    assert (line["method"], line["status"]) == (method, status)
    assert line["path"].startswith(template)
    assert re.fullmatch(r"[!-~]+", line["path"])
    assert 0 < line["ms"] < 10_000
    assert line.get("key") == (None if key is None else "static-1")


def test_the_log_has_no_secrets(running: Stage) -> None:
    running.api.post(CHAT + f"?key={KEY}", BODY, bearer(KEY))
    running.api.post(CHAT, BODY, bearer("another-secret"))
    until(lambda: running.api.log().count('"request"') > 1, "lines", 5)
    for secret in (KEY, "another-secret", "my own words", "Hello"):
        assert secret not in running.api.log()


def test_probes_are_not_logged_and_nothing_is_without_a_log(tmp_path: Path) -> None:
    with stage(tmp_path) as running:
        running.api.get("/version")
        until(lambda: "path=/version" in running.api.log(), "a line", 5)
        assert "path=/health" not in running.api.log()
        assert "path=/ready" not in running.api.log()
    (tmp_path / "api.log").unlink()
    with stage(tmp_path, "--access-log", "off") as running:
        running.api.get("/version")
    assert "/version" not in (tmp_path / "api.log").read_text()
