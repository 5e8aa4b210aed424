"""The OpenAPI document at `/openapi.json`, which `/docs` shows: made when first asked for, from our schemas.

Endpoints parse their bodies themselves (FastAPI would answer a bad one in its own shape), so they name the
schema of their body here.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.schemas.abort import AbortRequest
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from common.version import VERSION

_BODIES: tuple[type[BaseModel], ...] = (
    *(ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, AbortRequest),
)
_PLACE = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """What an endpoint with this body passes to FastAPI as `openapi_extra`."""
    content = {"application/json": {"schema": {"$ref": _PLACE + body.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


class Described(FastAPI):
    """The framework's application, which describes itself with our schemas."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = _document(self)
        return self.openapi_schema


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=VERSION, routes=app.routes)
    inputs: list[tuple[type[BaseModel], Literal["validation"]]] = [(body, "validation") for body in _BODIES]
    _, schemas = models_json_schema(inputs, ref_template=_PLACE + "{model}")
    made["components"] = {"schemas": schemas["$defs"] | {"Error": _ERROR}}
    failure = {
        "description": "Any failure, whatever its status",
        "content": {"application/json": {"schema": {"$ref": _PLACE + "Error"}}},
    }
    for methods in made["paths"].values():
        for operation in methods.values():
            # FastAPI announces an answer of its own for a bad path parameter; ours are never bad.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = failure
    return made
