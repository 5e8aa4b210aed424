"""Chat messages as clients send them: their shape is checked here, what a template takes is the tokenizer's.

Clients replay our own answers, with fields of their own; whatever is not null goes on to the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError

MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS = 4096, 1024, 128

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A part of an answer of ours, as clients replay it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["refusal"]
    refusal: str


class CalledFunction(BaseModel):
    """What was called."""

    model_config = ConfigDict(extra="allow")

    name: str


class ToolCall(BaseModel):
    """A call of an earlier answer."""

    model_config = ConfigDict(extra="allow")

    function: CalledFunction


_Parts = Annotated[list[str | TextPart | RefusalPart], Field(max_length=MAX_PARTS)]
_AnyContent = str | _Parts | None
_AnyToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None


def _content(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) > MAX_PARTS:
            raise PydanticCustomError(
                "parts_count", "There may be at most {limit} parts", {"limit": MAX_PARTS}
            )
        for part in value:
            _check_part(part)
    elif value is not None and not isinstance(value, str):
        raise PydanticCustomError("content_type", "Input should be a string or a list of content parts")
    return value


def _check_part(part: Any) -> None:
    if isinstance(part, str):
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise PydanticCustomError("part_type", "Only content parts of type text are supported")
    if not isinstance(part.get(kind), str):
        raise PydanticCustomError("part_text", "A text part should have a string in its text field")


def _tool_calls(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise PydanticCustomError("tool_calls_type", "Input should be a list of tool calls")
    if len(value) > MAX_TOOL_CALLS:
        raise PydanticCustomError(
            "tool_calls_count", "There may be at most {limit} tool calls", {"limit": MAX_TOOL_CALLS}
        )
    for call in value:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise PydanticCustomError("tool_call_function", "A tool call should have a function with a name")
    return value


#: `Message._only_assistants_may_be_silent` as a JSON schema.
_SPEAKING: JsonDict = {
    "if": {"properties": {"role": {"not": {"const": "assistant"}}}},
    "then": {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
}


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow", frozen=True, json_schema_extra=_SPEAKING)

    role: Role
    content: Annotated[Any, PlainValidator(_content, json_schema_input_type=_AnyContent)] = None
    tool_calls: Annotated[Any, PlainValidator(_tool_calls, json_schema_input_type=_AnyToolCalls)] = None

    @model_validator(mode="after")
    def _only_assistants_may_be_silent(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content_missing", "Only assistant messages may be without content")
        return self


def text_of(message: Message) -> str:
    """Its content as one text."""
    content: str | list[str | dict[str, Any]] = message.content or ""
    parts = [content] if isinstance(content, str) else content
    return "".join(part if isinstance(part, str) else str(part[part["type"]]) for part in parts)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


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
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return {
        "messages": [message.model_dump(exclude_none=True) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": bool(continue_final_message),
        "chat_template_kwargs": chat_template_kwargs or {},
        # The template writes special tokens itself; adding more would double the first one.
        "add_special_tokens": bool(add_special_tokens),
    }
