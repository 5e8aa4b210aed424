"""The OpenAPI document at `/openapi.json`, which `/docs` shows: made when first asked for, from our schemas.

Endpoints parse their bodies and make their answers themselves (FastAPI would answer a bad body in its own
shape), so they say here what they take, what they give, and how they may fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.auth import PUBLIC
from api.body import BODY_TIMEOUT_S
from api.protocol import HEAD_TIMEOUT_S
from api.returning import KEY, KEY_RESUME_S, MAX_RESUME_S, RESUME
from api.schemas import unsupported
from api.schemas.abort import AbortRequest
from api.schemas.answers import ANSWERS
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from common.version import VERSION

#: Bodies, and their fields that are refused by name.
BODIES: dict[type[BaseModel], Mapping[str, unsupported.Harmless]] = {
    ChatRequest: unsupported.CHAT,
    CompletionRequest: unsupported.COMPLETION,
    TokenizeRequest: unsupported.TOKENIZE,
    DetokenizeRequest: {},
    AbortRequest: {},
}
#: Every status of an answer that is an error, and when it comes.
FAILURES: dict[int, str] = {
    400: "Not valid HTTP or JSON, a wrong field or header, or a prompt that is too long "
    "(`context_length_exceeded`).",
    401: "An API key is needed, or is not valid (`invalid_api_key`), with `WWW-Authenticate: Bearer`.",
    403: "The API key does not allow this model (`permission_error`).",
    404: "There is no such model (`model_not_found`), request or path.",
    405: "The path has no such method; `Allow` names those it has.",
    408: f"The headers took longer than {HEAD_TIMEOUT_S:g} s to arrive, or the body longer than "
    f"{BODY_TIMEOUT_S:g} s.",
    409: f"The `{KEY}` was used with another body or endpoint (`idempotency_error`).",
    413: "The body is larger than `--max-body-bytes`.",
    415: "The body is not JSON, or compressed.",
    429: "The queue is full, or the API key has used up a rate limit (`rate_limit_exceeded`).",
    431: "The headers are too large.",
    499: "The request was cancelled (`cancelled`).",
    500: "A fault of the server, or workers crashed on this request (`worker_crashed`).",
    503: "No worker for the model, Redis away, almost full or allowed to evict, shutting down, or too long "
    "in the queue (`service_unavailable`).",
    504: "`--request-timeout` has passed (`timeout`).",
}
#: What any request may end in.
ALWAYS = (400, 408, 431, 500)
#: What a request with a body may end in, and one that waits for workers, and one that is a generation.
WITH_BODY = (413, 415)
WITH_WORKERS = (403, 404, 429, 499, 503, 504)
#: What a request that asks Redis may end in.
WITH_REDIS = (503,)

#: How a key is sent.
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_PLACE = "#/components/schemas/"
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "A label of the client's own, 1 to 128 printable ASCII characters: it comes back.",
    "schema": {"type": "string"},
}
#: Parameters of requests that start a generation.
COMING_BACK = (
    {
        "name": RESUME,
        "in": "header",
        "description": "Seconds for which the request outlives its connection while nobody reads it.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_RESUME_S},
    },
    {
        "name": KEY,
        "in": "header",
        "description": "Asking the same again under the same key joins the first request; implies "
        f"`{RESUME}: {KEY_RESUME_S}`.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]{1,255}$"},
    },
)
_CURSOR = {"type": "string", "pattern": r"^[0-9]{1,19}-[0-9]{1,19}(\.[1-9][0-9]{0,3})?$"}
#: Parameters of requests that go on with a stream.
GOING_ON = (
    {
        "name": "Last-Event-ID",
        "in": "header",
        "description": "Go on after this event; wins over `after`.",
        "schema": _CURSOR,
    },
    {"name": "after", "in": "query", "description": "Go on after this event.", "schema": _CURSOR},
)


def _header(description: str, kind: str = "string", *, always: bool = False) -> dict[str, Any]:
    return {"description": description, "required": always, "schema": {"type": kind}}


_EVERY_ANSWER = {
    "x-request-id": _header("The client's own label, or a new one.", always=True),
    "openai-processing-ms": _header("Milliseconds until the headers of the answer were sent.", "integer"),
    "millstream-request": _header("Of a generation: its id at `/v1/requests` and `/v1/streams`."),
    **{
        f"x-ratelimit-{what}-{of}": _header(
            f"Of an API key with a limit on {of} per minute: {meaning}.", kind
        )
        for of in ("requests", "tokens")
        for what, kind, meaning in (
            ("limit", "integer", "the limit"),
            ("remaining", "integer", "what is left of it now"),
            ("reset", "string", "when all of it is there again, as `6m0s` or `12ms`"),
        )
    },
}
_WHEN_TO_RETRY = {
    "retry-after": _header("Seconds until it is worth trying again.", "integer"),
    "retry-after-ms": _header("The same in milliseconds.", "integer"),
}
_HOW_TO_ASK = {"www-authenticate": _header("`Bearer`.", always=True)}
_WHETHER_TO_RETRY = {"x-should-retry": _header("`false`: it would end the same way again.")}


def describe(
    *gives: type[BaseModel],
    takes: type[BaseModel] | None = None,
    streams: tuple[type[BaseModel], ...] = (),
    parameters: tuple[Mapping[str, Any], ...] = (),
    fails: tuple[int, ...] = (),
    not_ready: bool = False,
) -> dict[str, Any]:
    """What an endpoint passes to FastAPI as `openapi_extra`.

    ``gives`` is the answer, ``streams`` what the events of a stream hold; ``fails`` are the statuses beside
    those of every request; with ``not_ready`` the answer's own shape comes with 503 as well.
    """
    success: dict[str, Any] = {
        "description": " ".join((shape.__doc__ or "").strip() for shape in gives or streams[:1]),
        "headers": _EVERY_ANSWER,
        "content": {},
    }
    for shape in gives:
        success["content"] |= _json(shape)
    if streams:
        success["content"] |= _events(streams)
    responses = {"200": success}
    if not_ready:
        responses["503"] = success
    body_fails = WITH_BODY if takes is not None else ()
    for status in sorted({*ALWAYS, *body_fails, *fails}):
        responses.setdefault(str(status), _failure(status))
    said: dict[str, Any] = {"parameters": [_REQUEST_ID, *parameters], "responses": responses}
    if takes is not None:
        said["requestBody"] = {"required": True, "content": _json(takes)}
    return said


def _json(shape: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _PLACE + shape.__name__}}}


def _events(shapes: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    names = [shape.__name__ for shape in shapes]
    content = {"anyOf": [{"$ref": _PLACE + name} for name in (*names, "Error")]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    event = {
        "type": "object",
        "description": f"The `data` of an event is a {' or '.join(names)}; a failure after the beginning is "
        "an Error; the last one is `[DONE]`.",
        "properties": {"id": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
    return {"text/event-stream": {"itemSchema": event}}


def _failure(status: int) -> dict[str, Any]:
    headers = dict(_EVERY_ANSWER)
    if status == 401:
        headers |= _HOW_TO_ASK
    if status in (429, 503):
        headers |= _WHEN_TO_RETRY
    if status in (409, 500, 504):
        headers |= _WHETHER_TO_RETRY
    return {
        "description": FAILURES[status],
        "headers": headers,
        "content": {"application/json": {"schema": {"$ref": _PLACE + "Error"}}},
    }


class Described(FastAPI):
    """The framework's application, which describes itself with our schemas."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = _document(self)
        return self.openapi_schema


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=VERSION, routes=app.routes)
    made["components"] = {"schemas": _schemas(), "securitySchemes": _SCHEMES}
    for path, methods in made["paths"].items():
        for operation in methods.values():
            if path not in PUBLIC:
                operation["security"] = [{name: []} for name in _SCHEMES] + [{}]  # open without any key
                operation["responses"]["401"] = _failure(401)
            # FastAPI announces an answer of its own for a bad path parameter; ours are never bad.
            operation["responses"].pop("422", None)
            # And JSON of no known shape, also for what is no JSON.
            content = operation["responses"]["200"]["content"]
            if not content["application/json"]["schema"]:
                del content["application/json"]
    return made


def _schemas() -> dict[str, Any]:
    models: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
        *((body, "validation") for body in BODIES),
        *((answer, "serialization") for answer in ANSWERS),
    ]
    _, made = models_json_schema(models, ref_template=_PLACE + "{model}")
    schemas: dict[str, Any] = made["$defs"]
    for body, refused in BODIES.items():
        schemas[body.__name__]["properties"] |= {
            name: {"description": "Not served: any other value gets 400.", **harmless.schema}
            for name, harmless in refused.items()
        }
    return schemas
