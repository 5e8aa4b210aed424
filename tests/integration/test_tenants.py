"""Tenants: what one asked for does not exist for another, by whatever name it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.api_process import Answer, Stage, stage
from tests.helpers.keys import bearer
from tests.helpers.waiting import until

BODY: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
NOBODYS = "0-00000000000070008000000000000000"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    (folder / "keys").write_text("alice team-a\nanna team-a\nbob team-b\nnone\n")
    with stage(folder, "--api-key-file", str(folder / "keys")) as running:
        yield running


def ask(running: Stage, who: str, method: str, path: str) -> Answer:
    return running.api.request(method, path, headers=bearer(who))


def seen(answer: Answer) -> tuple[int, bytes, set[str]]:
    return answer.status, answer.body, set(answer.headers)


def test_another_tenants_request_does_not_exist(running: Stage) -> None:
    sent = {**bearer("alice"), "millstream-resume": "60"}
    uid = running.api.post(CHAT, BODY, sent).headers["millstream-request"]
    for who in ("alice", "anna"):
        assert ask(running, who, "GET", f"/v1/requests/{uid}").json()["state"] == "ended"
        assert ask(running, who, "GET", f"/v1/streams/chatcmpl-{uid}").status == 200
    for who in ("bob", "none"):
        for method, path in (
            *(("GET", "/v1/requests/{}"), ("GET", "/v1/requests/chatcmpl-{}"), ("GET", "/v1/streams/{}")),
            *(("DELETE", "/v1/requests/{}"), ("POST", "/v1/requests/{}/cancel")),
        ):
            theirs = ask(running, who, method, path.format(uid))
            assert theirs.status == 404
            assert theirs.error["message"] == "There is no such request, or it has expired."
            assert seen(theirs) == seen(ask(running, who, method, path.format(NOBODYS)))


def test_another_tenants_request_cannot_be_cancelled(running: Stage) -> None:
    running.workers.working = False
    connection = running.api.open(CHAT, BODY, bearer("alice"))
    try:
        keys, bus = running.workers.keys, running.workers.bus
        queues = [keys.inflight(p, "test-model", "interactive") for p in (0, 1)]
        (uid,) = until(lambda: [u for q in queues for u in bus.do("ZRANGE", q, 0, -1)], "it waits")
        name = uid.decode()
        assert bus.do("HGET", keys.req(name), "tenant") == b"team-a"
        assert ask(running, "bob", "DELETE", f"/v1/requests/{name}").status == 404
        assert bus.do("HGET", keys.req(name), "state") == b"queued"
        assert not any(bus.do("SMEMBERS", keys.cancel(p)) for p in (0, 1))
        assert ask(running, "anna", "DELETE", f"/v1/requests/{name}").json()["state"] == "ended"
    finally:
        connection.close()
        running.workers.working = True


def test_an_idempotency_key_is_its_tenants_own(running: Stage) -> None:
    def uid_for(who: str, **change: Any) -> str:
        got = running.api.post(CHAT, BODY | change, {**bearer(who), "idempotency-key": "the same"})
        assert got.status == 200, got.body
        return got.headers["millstream-request"]

    first = uid_for("alice")
    assert uid_for("anna") == first
    assert uid_for("bob", seed=1) != first, "not even a conflict"
    assert uid_for("none") not in (first, uid_for("bob", seed=1))
