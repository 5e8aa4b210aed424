"""Messages as clients send them, made plain for templates."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from workers.text.messages import ContentForm, normalize

STRINGS = ContentForm()
PARTS = ContentForm(strings=False, parts=True)
BOTH = ContentForm(strings=True, parts=True, developer=True)


def one(message: dict[str, Any], form: ContentForm = STRINGS) -> dict[str, Any]:
    (plain,) = normalize([message], form)
    return plain


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "form", "expected"),
    [
        ("hi", STRINGS, "hi"),
        ("hi", PARTS, [part("hi")]),
        ("hi", BOTH, "hi"),
        ([part("a"), part("b")], STRINGS, "a\nb"),
        ([part("a"), "b"], STRINGS, "a\nb"),
        ([part("a"), part("b")], BOTH, [part("a"), part("b")]),
        ([{"type": "input_text", "text": "a"}], PARTS, [part("a")]),
        ([{"type": "refusal", "refusal": "no"}], STRINGS, "no"),
        ([], STRINGS, ""),
        ([], PARTS, []),
    ],
)
def test_content(content: Any, form: ContentForm, expected: Any) -> None:
    assert one({"role": "user", "content": content}, form)["content"] == expected


def test_a_null_is_no_content() -> None:
    assert one({"role": "assistant", "content": None})["content"] == ""
    assert one({"role": "assistant"})["content"] == ""
    for role in ("user", "system", "tool"):
        with pytest.raises(InvalidRequestError, match="no content"):
            one({"role": role, "content": None})


def test_nulls_and_empty_lists_are_dropped_and_extra_keys_kept() -> None:
    plain = one(
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "name": "n", "own": {"a": 1}}
    )
    assert plain == {"role": "assistant", "content": "x", "name": "n", "own": {"a": 1}}


def test_developer_is_system_where_it_is_not_known() -> None:
    message = {"role": "developer", "content": "x"}
    assert one(message)["role"] == "system"
    assert one(message, BOTH)["role"] == "developer"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1]}', {"a": [1]}), ("not json", "not json"), ("", ""), ({"a": 1}, {"a": 1})],
)
def test_arguments_of_tool_calls(arguments: Any, expected: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    plain = one({"role": "assistant", "content": None, "tool_calls": [call]})
    assert plain["tool_calls"] == [{**call, "function": {"name": "f", "arguments": expected}}]
    assert call["function"]["arguments"] == arguments, "what the client sent is not changed"


def test_reasoning_has_one_name() -> None:
    assert one({"role": "assistant", "content": "x", "reasoning": "r"})["reasoning_content"] == "r"
    assert one({"role": "assistant", "content": "x", "reasoning_content": "r"})["reasoning_content"] == "r"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        {},
        ["hi"],
        [{}],
        [{"role": "", "content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{"type": ["text"]}]}],
        [{"role": "assistant", "content": "x", "tool_calls": "f"}],
        [{"role": "assistant", "content": "x", "tool_calls": ["f"]}],
    ],
)
def test_what_is_no_conversation(messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        normalize(messages, STRINGS)
    assert caught.value.param == "messages"
