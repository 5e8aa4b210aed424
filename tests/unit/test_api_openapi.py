"""The published description of the HTTP surface: complete, closed in itself, and true of our schemas."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from api import openapi
from api.app import description
from api.schemas import unsupported
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from common import errors

BODIES = {"ChatRequest": unsupported.CHAT, "CompletionRequest": unsupported.COMPLETION}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return orjson.loads(orjson.dumps(description()))  # type: ignore[no-any-return]


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}"),
        *("/v1/streams/{name}", "/v1/requests/{name}", "/v1/requests/{name}/cancel"),
        *("/tokenize", "/detokenize", "/health", "/ping", "/ready", "/version", "/abort_request"),
    }


def test_every_answer_has_a_shape_of_ours(document: dict[str, Any]) -> None:
    for name, operation in operations(document).items():
        assert {"200", "400", "408", "431", "500"} <= set(operation["responses"]), name
        for status, said in operation["responses"].items():
            assert said["headers"]["x-request-id"]["required"]
            for kind, content in said["content"].items():
                if kind == "text/event-stream":
                    assert status == "200"
                    assert content["itemSchema"]["required"] == ["data"]
                else:
                    shape = content["schema"]["$ref"].rpartition("/")[2]
                    assert (shape == "Error") == (status != "200" and (name, status) != ("GET /ready", "503"))


def test_every_status_of_an_error_is_described() -> None:
    kinds = [errors.MillstreamError]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        assert kind.status in openapi.FAILURES, kind


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', orjson.dumps(document).decode()))
    assert names >= {"ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest", "Message"}
    assert names <= set(document["components"]["schemas"])


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_every_field_is_described(document: dict[str, Any], schema: type[ChatRequest]) -> None:
    said = document["components"]["schemas"][schema.__name__]
    refused = BODIES[schema.__name__]
    assert set(said["properties"]) == set(schema.model_fields) | set(refused)
    assert not set(schema.model_fields) & set(refused)
    assert all(field["description"] for field in said["properties"].values())
    assert all("400" in said["properties"][name]["description"] for name in refused)


def test_types_are_as_they_are_checked(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatRequest"]
    assert set(chat["required"]) == {"model", "messages"}
    stop = {option.get("type") for option in chat["properties"]["stop"]["anyOf"]}
    assert stop == {"string", "array", "null"}
    assert chat["properties"]["tools"]["enum"] == [None, "", [], {}]


def test_an_endpoint_says_what_it_takes_and_gives(document: dict[str, Any]) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"Millstream-Resume", "Idempotency-Key"} <= {each["name"] for each in chat["parameters"]}
    stream = document["paths"]["/v1/streams/{name}"]["get"]
    assert set(stream["responses"]["200"]["content"]) == {"text/event-stream"}
    assert {"name", "Last-Event-ID", "after"} <= {each["name"] for each in stream["parameters"]}


def _fits(value: Any, rule: dict[str, Any]) -> bool:
    """Whether ``value`` is as ``rule`` says; of JSON schema this knows what our rules of two fields use."""
    kinds, fields = {"object": dict, "integer": int}, rule.get("properties", {})
    return (
        ("type" not in rule or type(value) is kinds[rule["type"]])
        and ("const" not in rule or (value == rule["const"] and type(value) is type(rule["const"])))
        and ("enum" not in rule or any(value is each for each in rule["enum"]))
        and ("minimum" not in rule or value >= rule["minimum"])
        and all(name in value for name in rule.get("required", ()))
        and all(_fits(value[name], each) for name, each in fields.items() if name in value)
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"stream_options": {}}, {"stream_options": {}, "stream": True}),
        ({"prompt_logprobs": 0, "stream": True}, {"prompt_logprobs": 0, "stream": False}),
        ({"top_logprobs": 1}, {"top_logprobs": 1, "logprobs": True}),
        ({"top_logprobs": 2, "logprobs": False}, {"top_logprobs": 0, "logprobs": False}),
        ({"max_tokens": 0, "echo": False}, {"max_tokens": 0, "echo": True}),
        ({"max_tokens": 0}, {"max_tokens": 1}),
    ],
)
def test_fields_that_need_each_other(
    document: dict[str, Any], wrong: dict[str, Any], right: dict[str, Any]
) -> None:
    schema, more = (
        (CompletionRequest, {"model": "m", "prompt": "a"})
        if "max_tokens" in wrong
        else (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}]})
    )
    rules = document["components"]["schemas"][schema.__name__]["allOf"]

    def follows(body: dict[str, Any]) -> bool:
        return all(_fits(body, rule["then"]) for rule in rules if _fits(body, rule["if"]))

    assert follows(right)
    schema.parse(right | more)
    assert not follows(wrong)
    with pytest.raises(errors.InvalidRequestError):
        schema.parse(wrong | more)
