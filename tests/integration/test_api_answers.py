"""Answers of a real API process over a real Redis, with workers that play a script."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.messages import Request
from tests.helpers.api_process import Answer, ApiProcess, Stage, stage
from tests.helpers.fake_workers import Play

#: What a request with this first word gets.
PLAYS = {
    "stopped": Play(texts=("be", "fore"), stop='"END"'),
    "long": Play(texts=("x",) * 20, finish="length", silent_tokens=0),
    "odd": Play(texts=('"\n', "é🙂\u2028", "\\")),
    "silent": Play(texts=()),
}


def first_word(request: Request) -> str:
    payload = request.payload
    text = payload["messages"][-1]["content"] if "messages" in payload else payload["prompt"][0]
    return str(text).split()[0] if isinstance(text, str) else ""


def script(request: Request) -> Play:
    word = first_word(request)
    return PLAYS.get(word) or Play(texts=("echo", " ", word))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("answers"), script=script) as running:
        yield running


@pytest.fixture
def api(running: Stage) -> ApiProcess:
    return running.api


def test_a_chat(api: ApiProcess) -> None:
    got = api.chat("one two three")
    assert got.status == 200
    assert got.headers["content-type"] == "application/json"
    body = got.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "echo one", "refusal": None}
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", None)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)


def content(answer: Answer, choice: int = 0) -> str:
    """The text of one choice of a chat stream."""
    chunks = [event for event in answer.events()[:-1] if event["choices"]]
    mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(c["delta"].get("content", "") for c in mine)


def test_a_chat_stream(api: ApiProcess) -> None:
    got = api.chat("one two three", stream=True, stream_options={"include_usage": True})
    assert got.status == 200
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (got.headers["cache-control"], got.headers["x-accel-buffering"]) == ("no-cache", "no")
    *chunks, usage, done = got.events()
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in [*chunks, usage]}) == 1


@pytest.mark.parametrize("word", ["plain", *PLAYS])
def test_a_stream_adds_up_to_the_whole(api: ApiProcess, word: str) -> None:
    whole = api.chat(word).json()["choices"][0]
    streamed = api.chat(word, stream=True)
    assert content(streamed) == whole["message"]["content"]
    last = streamed.events()[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])


def test_what_stopped_it_is_told(api: ApiProcess) -> None:
    assert api.chat("stopped").json()["choices"][0]["stop_reason"] == "END"
    assert api.chat("long").json()["choices"][0]["finish_reason"] == "length"


def test_one_event_per_token(api: ApiProcess) -> None:
    events = api.chat("long", stream=True).events()
    assert len([e for e in events[:-1] if e["choices"][0]["delta"].get("content")]) == 20


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(api: ApiProcess, stream: bool) -> None:
    got = api.chat("word", n=3, stream=stream)
    if stream:
        assert [content(got, choice) for choice in range(3)] == ["echo word"] * 3
        ends = [c["index"] for e in got.events()[:-1] for c in e["choices"] if c["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]
    else:
        choices = got.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert got.json()["usage"]["prompt_tokens"] == 1
        assert got.json()["usage"]["completion_tokens"] == 12


def test_a_completion_of_several_prompts(api: ApiProcess) -> None:
    body = api.complete(["first a", "second b c"], n=2).json()
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5


def test_a_completion_stream(api: ApiProcess) -> None:
    *chunks, done = api.complete("one", stream=True).events()
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "echo one"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


def test_the_request_on_the_bus(running: Stage) -> None:
    running.api.complete([[1, 2], [3]], n=2, seed=5, max_tokens=9, stop="x")
    request = running.workers.seen[-1]
    assert request.payload == {"prompt": [[1, 2], [3]], "add_special_tokens": True}
    assert (request.n, request.params.seed, request.params.max_tokens) == (2, 5, 9)
    assert request.params.stop == ("x",)
    assert request.api.startswith("api-")


def test_an_alias_is_answered_under_its_own_name(api: ApiProcess) -> None:
    body = api.chat("x", model="alias/of-it").json()
    assert body["model"] == "alias/of-it"


def test_models(api: ApiProcess) -> None:
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["alias/of-it", "test-model"]
    assert listed["data"][1] == {
        "id": "test-model", "object": "model", "created": 1_700_000_000, "owned_by": "millstream",
        "root": "test-model", "parent": None, "max_model_len": 4096,
    }  # fmt: skip
    assert api.get("/v1/models/alias/of-it").json()["id"] == "alias/of-it"
    missing = api.get("/v1/models/nothing")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_tokenize_and_detokenize(api: ApiProcess) -> None:
    assert api.post("/tokenize", {"prompt": "a b c"}).json()["count"] == 3
    assert api.post("/tokenize", {"model": "test-model", "prompt": "a"}).json()["tokens"] == [0]
    assert api.post("/detokenize", {"tokens": [4, 5]}).json() == {"prompt": "4 5"}


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes(api: ApiProcess, method: str, path: str) -> None:
    got = api.request(method, path)
    assert got.status == 200
    assert (got.body == b"") is (method == "HEAD")


def test_the_version(api: ApiProcess) -> None:
    assert api.get("/version").json().keys() == {"version"}


def test_the_surface_describes_itself(api: ApiProcess) -> None:
    assert "/v1/chat/completions" in api.get("/openapi.json").json()["paths"]
    assert api.get("/docs").headers["content-type"].startswith("text/html")


def test_every_answer_has_a_request_id(api: ApiProcess) -> None:
    answers = [
        api.chat("x"),
        api.chat("x", stream=True),
        api.get("/nowhere"),
        api.chat("x", n=0),
        api.get("/health"),
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    assert all(answer.headers["openai-processing-ms"].isdigit() for answer in answers)
    assert api.post("/tokenize", {"prompt": "a"}, {"x-request-id": "mine"}).headers["x-request-id"] == "mine"


def test_a_connection_is_kept(api: ApiProcess) -> None:
    body = json.dumps({"model": "test-model", "messages": [{"role": "user", "content": "x"}], "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        for _ in range(3):
            connection.sendall((head + body).encode())
            got = b""
            while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                piece = connection.recv(65536)
                assert piece, got
                got += piece
            assert got.startswith(b"HTTP/1.1 200 OK\r\n")


def test_two_processes_on_one_redis_do_not_mix(
    running: Stage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with ApiProcess(running.redis.url, log=tmp_path_factory.mktemp("second") / "log") as second:
        second.wait_ready()
        barrier = threading.Barrier(8)

        def ask(number: int) -> tuple[str, str]:
            if number < 8:
                barrier.wait(10)
            api, word = (running.api, second)[number % 2], f"w{number}"
            if number % 4 < 2:
                return word, content(api.chat(word, stream=True))
            return word, api.chat(word).json()["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(8) as pool:
            for word, text in pool.map(ask, range(40)):
                assert text == f"echo {word}"
