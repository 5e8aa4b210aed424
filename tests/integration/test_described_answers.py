"""Real answers of a real server have the shapes that its OpenAPI document gives them, and nothing beside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.schemas import answers
from tests.helpers.asking import Body, chat, completion, request
from tests.helpers.stack import Stack

CASES: dict[str, tuple[str, str, Body | None, int, type[answers.Shape]]] = {
    "a chat": (
        *("POST", "/v1/chat/completions", chat("x", max_tokens=3, n=2)),
        *(200, answers.ChatCompletion),
    ),
    "a chat that a token stops": (
        *("POST", "/v1/chat/completions", chat("x", stop_token_ids=list(range(17, 94)))),
        *(200, answers.ChatCompletion),
    ),
    "a completion": (
        "POST",
        "/v1/completions",
        completion(["a", "b"], max_tokens=3),
        200,
        answers.Completion,
    ),
    "the models": ("GET", "/v1/models", None, 200, answers.ModelList),
    "a model": ("GET", "/v1/models/smollm2-135m-instruct", None, 200, answers.Model),
    "tokens": ("POST", "/tokenize", {"prompt": "a b"}, 200, answers.Tokens),
    "tokens as text": ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}, 200, answers.Tokens),
    "text": ("POST", "/detokenize", {"tokens": [30, 40]}, 200, answers.DetokenizedText),
    "health": ("GET", "/health", None, 200, answers.Health),
    "readiness": ("GET", "/ready", None, 200, answers.Ready),
    "the version": ("GET", "/version", None, 200, answers.Version),
    "a bad body": ("POST", "/v1/completions", {}, 400, answers.Error),
    "an unknown path": ("GET", "/nothing", None, 404, answers.Error),
    "an unknown model": ("GET", "/v1/models/nothing", None, 404, answers.Error),
    "a wrong method": ("GET", "/v1/completions", None, 405, answers.Error),
}


@pytest.mark.parametrize("name", CASES)
def test_whole_answers(null_stack: Stack, name: str) -> None:
    method, path, body, status, shape = CASES[name]
    answer = request(null_stack.port, method, path, body)
    assert answer.status == status
    shape.model_validate_json(answer.body, strict=True)


@pytest.mark.parametrize("options", [None, {"include_usage": True, "continuous_usage_stats": True}])
@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (chat("x", max_tokens=3, n=2), answers.ChatCompletionChunk),
        (completion("a", max_tokens=3), answers.CompletionChunk),
    ],
)
def test_streams(null_stack: Stack, body: Body, shape: type[answers.Shape], options: Any) -> None:
    streamed = body | {"stream": True, "stream_options": options}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = request(null_stack.port, "POST", path, streamed)
    *events, done = answer.events()
    assert (len(events) >= 3, done) == (True, "[DONE]")
    for event in events:
        shape.model_validate_json(json.dumps(event), strict=True)


@pytest.mark.parametrize("body", [chat("x", max_tokens=3), completion("a", max_tokens=3)])
def test_the_state_of_a_generation(null_stack: Stack, body: Body) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    uid = request(null_stack.port, "POST", path, body).headers["millstream-request"]
    answer = request(null_stack.port, "GET", f"/v1/requests/{uid}")
    answers.GenerationStatus.model_validate_json(answer.body, strict=True)


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/health", "GET, HEAD"), ("/v1/requests/x", "DELETE, GET"), ("/v1/completions", "POST")],
)
def test_a_wrong_method_is_told_the_right_ones(null_stack: Stack, path: str, methods: str) -> None:
    answer = request(null_stack.port, "PUT", path)
    assert (answer.status, answer.headers["allow"]) == (405, methods)
