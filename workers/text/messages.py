"""Chat messages as clients send them, made into what chat templates can read.

Templates differ in what they take and break on what they do not expect (a null, a list of parts, arguments
as JSON text); all of that is settled here, so that templates see one plain form. Knows no template language.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from common.errors import InvalidRequestError

#: Content parts whose text is text, and the field that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
#: Names under which reasoning comes back from clients; templates read the first.
_REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class ContentForm:
    """What a template takes as ``content``, and whether it knows the developer role."""

    strings: bool = True
    parts: bool = False
    developer: bool = False


def normalize(messages: Any, form: ContentForm) -> list[dict[str, Any]]:
    """Messages in the form a template takes; raises `InvalidRequestError` for what cannot be one."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message", param="messages")
    return [_normalize_one(message, index, form) for index, message in enumerate(messages)]


def _normalize_one(message: Any, index: int, form: ContentForm) -> dict[str, Any]:
    param = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{param} must be an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{param} has no role", param="messages")
    # A null means the same as no key, but templates print it or fail on it.
    plain = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and not form.developer:
        plain["role"] = "system"
    calls = _tool_calls(plain.pop("tool_calls", None), param)
    if calls:
        plain["tool_calls"] = calls
    if "content" not in plain and role != "assistant":
        raise InvalidRequestError(f"{param} of role {role} has no content", param="messages")
    plain["content"] = _content(plain.get("content", ""), param, form)
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain[_REASONING[0]] = reasoning
    return plain


def _content(content: Any, param: str, form: ContentForm) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content if form.strings else [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{param}.content must be a string or a list of parts", param="messages")
    texts = [_part_text(part, f"{param}.content[{place}]") for place, part in enumerate(content)]
    if form.parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{param} is of type {kind!r}; this model takes text only", param="messages"
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{param} has no text", param="messages")
    return text


def _tool_calls(calls: Any, param: str) -> list[Any]:
    if calls is None:
        return []
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(f"{param}.tool_calls must be a list of objects", param="messages")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates iterate over the arguments, JSON text on the wire; text that is no JSON object stays."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
