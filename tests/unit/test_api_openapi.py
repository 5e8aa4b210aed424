"""The published description of the HTTP surface: complete, closed in itself, and true of our schemas."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from api import openapi
from api.app import create_routes
from api.schemas.chat import ChatRequest


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    app = create_routes(None)  # type: ignore[arg-type]  # nothing of the service is used to describe it
    return orjson.loads(orjson.dumps(app.openapi()))  # type: ignore[no-any-return]


def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}"),
        *("/v1/streams/{name}", "/v1/requests/{name}", "/v1/requests/{name}/cancel"),
        *("/tokenize", "/detokenize", "/health", "/ping", "/ready", "/version", "/abort_request"),
    }
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert "default" in operation["responses"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', orjson.dumps(document).decode()))
    assert names >= {"ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest", "Message"}
    assert names <= set(document["components"]["schemas"])


def test_every_field_is_named(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatRequest"]
    assert set(chat["properties"]) == set(ChatRequest.model_fields)
    assert set(chat["required"]) == {"model", "messages"}
    stop = {option.get("type") for option in chat["properties"]["stop"]["anyOf"]}
    assert stop == {"string", "array", "null"}


def test_a_body_is_named_by_its_schema() -> None:
    assert openapi.takes(ChatRequest)["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatRequest"
    }
