"""The small fields of the HTTP surface over a real API process and Redis, with workers that play a script."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.messages import Request
from tests.helpers.api_process import Answer, ApiProcess, Stage, stage
from tests.helpers.fake_workers import Play
from tests.helpers.waiting import until

THOUGHT = ("<think>", "h", "m</th", "ink>", "yes")
QUIET_S = 0.4
#: Held back until a test lets it go on.
gate = threading.Event()


def hold(request: Request, index: int) -> None:
    gate.wait(20)


def script(request: Request) -> Play:
    text = str(request.payload.get("messages", [{"content": ""}])[-1]["content"])
    if text == "think":
        return Play(texts=THOUGHT)
    if text == "wait":
        return Play(texts=("</think>late",), before=hold)
    if text == "talk":
        return Play(texts=("x",) * 20, before=lambda request, index: time.sleep(QUIET_S / 4))
    return Play()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    flags = ("--reasoning-parser", "deepseek_r1", "--sse-keep-alive-interval", str(QUIET_S))
    with stage(tmp_path_factory.mktemp("fields"), *flags, script=script) as running:
        yield running


@pytest.fixture
def api(running: Stage) -> Iterator[ApiProcess]:
    gate.clear()
    yield running.api
    gate.set()


@pytest.fixture(scope="module")
def strict(running: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    """Another replica, with other rules."""
    flags = ("--strict-fields", "--enable-force-include-usage")
    log = tmp_path_factory.mktemp("strict") / "log"
    with ApiProcess(running.redis.url, *flags, log=log) as second:
        second.wait_ready()
        yield second


def status(api: ApiProcess, answer: Answer) -> Any:
    return api.get(f"/v1/requests/{answer.headers['millstream-request']}").json()


def test_x_request_id_is_echoed_and_a_label(api: ApiProcess) -> None:
    body = {"model": "test-model", "prompt": "x", "request_id": "in-the-body"}
    got = api.post("/v1/completions", body, {"x-request-id": "mine/1"})
    assert got.headers["x-request-id"] == "mine/1"
    assert status(api, got)["label"] == "mine/1"
    assert "mine/1" not in got.json()["id"]
    again = api.post("/v1/completions", body, {"x-request-id": "mine/1"})
    assert again.json()["id"] != got.json()["id"], "a label names nothing"
    for strange in ("two words", "x" * 129, "\u00fc"):
        answer = api.post("/v1/completions", body, {"x-request-id": strange})
        assert answer.headers["x-request-id"].startswith("req_")
        assert status(api, answer)["label"] == "in-the-body"
    assert status(api, api.complete(rid="r"))["label"] == "r"
    assert status(api, api.complete())["label"] is None


def test_a_label_finds_nothing(api: ApiProcess) -> None:
    api.complete(request_id="findable")
    assert api.get("/v1/requests/findable").status == 404
    assert api.post("/abort_request", {"rid": "findable"}).status == 404


def test_abort_request(running: Stage, api: ApiProcess) -> None:
    body = {"model": "test-model", "messages": [{"role": "user", "content": "wait"}], "stream": True}
    with api.open("/v1/chat/completions", body) as connection:
        head = connection.recv(4096).decode().lower()
        uid = head.partition("millstream-request: ")[2].partition("\r\n")[0]
        got = api.post("/abort_request", {"rid": f"chatcmpl-{uid}"})
        assert (got.status, got.json()["id"]) == (200, uid)
        gate.set()
        until(lambda: api.get(f"/v1/requests/{uid}").json()["state"] == "ended", "it ends", 10.0)
    assert f"{uid}/0" in running.workers.cancelled
    for wrong in ({}, {"rid": ""}, {"rid": 5}, {"abort_all": True}):
        assert api.post("/abort_request", wrong).status == 400
    assert api.post("/abort_request", {"rid": uid[:-1] + "0"}).status == 404


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_ping(api: ApiProcess, method: str) -> None:
    assert api.request(method, "/ping").status == 200


def test_priority_and_cache_salt_on_the_bus(running: Stage, api: ApiProcess) -> None:
    assert api.complete(priority=-7, cache_salt="s").status == 200
    request = running.workers.seen[-1]
    assert (request.priority, request.salt) == (-7, "s")
    assert api.complete(priority=101).error["param"] == "priority"


def test_service_tier_in_the_answer(api: ApiProcess) -> None:
    assert api.chat(service_tier="auto").json()["service_tier"] == "default"
    *chunks, _ = api.chat(service_tier="default", stream=True).events()
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}
    assert "service_tier" not in api.chat().json()


def test_fields_that_are_accepted(api: ApiProcess) -> None:
    fields = {
        "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"},
        "store": False, "modalities": ["text"], "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "parallel_tool_calls": False, "made_up": 1,
    }  # fmt: skip
    assert api.chat(**fields).status == 200
    until(
        lambda: "a field is not known and was ignored field=made_up" in api.log(), "it is written down", 5.0
    )
    assert api.log().count("field=") == 1


def test_strict_fields(strict: ApiProcess) -> None:
    got = strict.chat(made_up=1)
    assert (got.status, got.error["param"]) == (400, "made_up")
    assert strict.chat(user="u", verbosity="low").status == 200


def test_enable_force_include_usage(strict: ApiProcess) -> None:
    assert strict.chat(stream=True).events()[-2]["usage"]["total_tokens"] == 7


def joined(answer: Answer, name: str) -> str:
    return "".join(c["delta"].get(name) or "" for e in answer.events()[:-1] for c in e["choices"])


def test_reasoning_content(api: ApiProcess) -> None:
    whole = api.chat("think").json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    streamed = api.chat("think", stream=True, stream_options={"include_usage": True})
    assert (joined(streamed, "reasoning_content"), joined(streamed, "content")) == ("hm", "yes")
    assert streamed.events()[-2]["usage"] == whole["usage"]


def test_separate_reasoning_and_include_reasoning(api: ApiProcess) -> None:
    left = api.chat("think", separate_reasoning=False).json()["choices"][0]["message"]
    assert (left["content"], "reasoning_content" in left) == ("".join(THOUGHT), False)
    without = api.chat("think", include_reasoning=False).json()["choices"][0]["message"]
    assert (without["content"], "reasoning_content" in without) == ("yes", False)


def test_a_replica_with_another_parser_tells_it_the_same_way(api: ApiProcess, strict: ApiProcess) -> None:
    body = {"model": "test-model", "messages": [{"role": "user", "content": "think"}], "stream": True}
    got = api.post("/v1/chat/completions", body, {"millstream-resume": "60"})
    uid = got.headers["millstream-request"]
    assert strict.get(f"/v1/streams/{uid}").body == got.body
    ids = [line[4:] for line in got.body.decode().splitlines() if line.startswith("id: ")]
    blocks = got.body.decode().split("\n\n")[:-1]
    for seen, place in enumerate(ids[:-1]):
        rest = strict.get(f"/v1/streams/{uid}?after={place}").body.decode().split("\n\n")[:-1]
        assert rest == blocks[seen + 1 :]
    assert (
        strict.get(f"/v1/requests/{uid}").json()["response"]["choices"][0]["message"]["reasoning_content"]
        == "hm"
    )


def comments(connection: socket.socket, seconds: float) -> tuple[bytes, list[float]]:
    """What comes for so long, and when comments did."""
    connection.settimeout(0.05)
    begun, got, times = time.monotonic(), b"", []
    while time.monotonic() - begun < seconds:
        try:
            piece = connection.recv(65536)
        except TimeoutError:
            continue
        got += piece
        times += [time.monotonic() - begun] * piece.count(b": keep-alive\n\n")
    return got, times


def test_sse_keep_alive_interval(api: ApiProcess) -> None:
    body = {"model": "test-model", "messages": [{"role": "user", "content": "wait"}], "stream": True}
    with api.open("/v1/chat/completions", body) as connection:
        got, times = comments(connection, 5 * QUIET_S)
        assert b"200 OK" in got
        assert b"data:" not in got
        assert len(times) >= 1
        assert len(times) <= 6
        gate.set()
        rest, _ = comments(connection, 1.0)
    text = rest.decode()
    assert '"content":"late"' in text
    assert text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b": keep-alive" not in got.partition(b"\r\n\r\n")[0]


def test_sse_keep_alive_does_not_disturb_a_client(api: ApiProcess) -> None:
    import openai

    with openai.OpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="test-model", messages=[{"role": "user", "content": "wait"}], stream=True
        )
        threading.Timer(2 * QUIET_S, gate.set).start()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "late"


def test_sse_keep_alive_interval_0_is_off(running: Stage, tmp_path: Path) -> None:
    gate.clear()
    flags = ("--sse-keep-alive-interval", "0")
    with ApiProcess(running.redis.url, *flags, log=tmp_path / "log") as second:
        second.wait_ready()
        body = {"model": "test-model", "messages": [{"role": "user", "content": "wait"}], "stream": True}
        with second.open("/v1/chat/completions", body) as connection:
            _, times = comments(connection, 3 * QUIET_S)
            gate.set()
            comments(connection, 0.5)
    assert times == []


def test_a_stream_that_talks_gets_no_comments(api: ApiProcess) -> None:
    """But for those of pauses that it makes under load; one that counts as silent gets five."""
    begun = time.monotonic()
    assert api.chat("talk", stream=True).body.count(b": keep-alive") <= 1
    assert time.monotonic() - begun >= 5 * QUIET_S
    assert json.loads(api.chat("hi").body)["object"] == "chat.completion"
