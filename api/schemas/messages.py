"""Chat messages as clients send them, and as chat templates get them: content is always a string.

Clients replay our own answers, with fields of their own; whatever is not null goes on to the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError

MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS = 4096, 1024, 128

_AnyContent = str | list[dict[str, Any]] | None
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


def _content(value: Any) -> str | None:
    """Text parts are joined by line feeds, since templates of text models take strings only."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "Input should be a string or a list of content parts")
    if len(value) > MAX_PARTS:
        raise PydanticCustomError("parts_count", "There may be at most {limit} parts", {"limit": MAX_PARTS})
    return "\n".join([_part(part) for part in value])


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise PydanticCustomError("part_type", "Only content parts of type text are supported")
    text = part.get(kind)
    if not isinstance(text, str):
        raise PydanticCustomError("part_text", "A text part should have a string in its text field")
    return text


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Arguments travel as JSON text, but templates iterate over them: parsed, where they can be."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise PydanticCustomError("tool_calls_type", "Input should be a list of tool calls")
    if len(value) > MAX_TOOL_CALLS:
        raise PydanticCustomError(
            "tool_calls_count", "There may be at most {limit} tool calls", {"limit": MAX_TOOL_CALLS}
        )
    return [_tool_call(call) for call in value]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PydanticCustomError("tool_call_function", "A tool call should have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return call
        if isinstance(parsed, dict):
            return {**call, "function": {**function, "arguments": parsed}}
    return call


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Role
    content: Annotated[str | None, PlainValidator(_content, json_schema_input_type=_AnyContent)] = None
    tool_calls: Annotated[
        list[dict[str, Any]], PlainValidator(_tool_calls, json_schema_input_type=list[dict[str, Any]] | None)
    ] = Field(default_factory=list)

    @model_validator(mode="after")
    def _only_assistants_may_be_silent(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content_missing", "Only assistant messages may be without content")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message without nulls and empty lists: templates print None and trip over both."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": self.role, "content": self.content or "", **calls, **extra}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]

#: Arguments of the template call itself: a client that could set them would replace the template.
_RESERVED = frozenset(
    {
        "chat_template", "messages", "conversation", "tools", "documents", "tokenize", "return_dict",
        "return_tensors", "add_generation_prompt", "continue_final_message", "padding", "truncation",
        "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
    }
)  # fmt: skip


def chat_payload(
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: dict[str, Any] | None,
    add_special_tokens: bool | None,
) -> dict[str, Any]:
    """The tokenizer's input for a conversation. Raises `InvalidRequestError` for what cannot go together."""
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true.",
                param="continue_final_message",
            )
        if messages[-1].role != "assistant":
            raise InvalidRequestError(
                "continue_final_message needs an assistant message at the end.", param="messages"
            )
    if reserved := sorted(_RESERVED & set(chat_template_kwargs or {})):
        raise InvalidRequestError(
            f"chat_template_kwargs must not contain {', '.join(reserved)}.", param="chat_template_kwargs"
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return {
        "messages": [message.for_template() for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": bool(continue_final_message),
        "chat_template_kwargs": chat_template_kwargs or {},
        # The template writes special tokens itself; adding more would double the first one.
        "add_special_tokens": bool(add_special_tokens),
    }
