"""Fields that would change the answer and are not served: refused by name, never silently ignored.

Each has a test for values that ask for nothing special (null, a default), which clients send all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Harmless:
    """The values of a field that ask for nothing: a test for one, and the same as a JSON schema."""

    test: Callable[[Any], bool]
    schema: Mapping[str, Any]

    def __call__(self, value: Any) -> bool:
        """Whether ``value`` asks for nothing."""
        return self.test(value)


def _one_of(*values: object) -> Harmless:
    # By identity of type too: 0 == False, and only one of them is meant.
    return Harmless(
        lambda value: any(value is each or (type(value) is type(each) and value == each) for each in values),
        {"enum": values},
    )


_null = _one_of(None)
_null_or_false = _one_of(None, False)
_null_or_empty = _one_of(None, "", [], {})


_plain_text = Harmless(
    lambda value: value is None or (isinstance(value, dict) and value.get("type") == "text"),
    {"type": ["object", "null"], "properties": {"type": {"const": "text"}}, "required": ["type"]},
)


_BOTH: dict[str, Harmless] = {
    "response_format": _plain_text,
    "structured_outputs": _null_or_empty,
    "guided_json": _null,
    "guided_regex": _null_or_empty,
    "guided_choice": _null_or_empty,
    "guided_grammar": _null_or_empty,
    "structural_tag": _null_or_empty,
    "json_schema": _null,
    "regex": _null_or_empty,
    "ebnf": _null_or_empty,
    "use_beam_search": _null_or_false,
    "prompt_embeds": _null,
    "input_ids": _null,
    "return_token_ids": _null_or_false,
    "return_tokens_as_token_ids": _null_or_false,
    "bad_words": _null_or_empty,
    "allowed_token_ids": _null,
    "logits_processors": _null_or_empty,
    "store": _null_or_false,
}
CHAT: dict[str, Harmless] = _BOTH | {
    "tools": _null_or_empty,
    "tool_choice": _one_of(None, "none", "auto"),
    "functions": _null_or_empty,
    "function_call": _one_of(None, "none", "auto"),
    "echo": _null_or_false,
    "modalities": _one_of(None, [], ["text"]),
    "audio": _null,
    "web_search_options": _null,
    "chat_template": _null_or_empty,
    "documents": _null_or_empty,
    "mm_processor_kwargs": _null_or_empty,
}
COMPLETION: dict[str, Harmless] = _BOTH | {
    "suffix": _null_or_empty,
}
TOKENIZE: dict[str, Harmless] = {
    "tools": _null_or_empty,
    "chat_template": _null_or_empty,
    "documents": _null_or_empty,
    "mm_processor_kwargs": _null_or_empty,
}

#: Fields that change nothing which this server does, so that they are accepted whatever they say.
IGNORED: dict[str, str] = {
    "prompt_cache_retention": "what is used often is kept",
    "prediction": "only promises to be faster",
    "verbosity": "no model that is served knows it",
    "moderation": "nothing is moderated",
    "spaces_between_special_tokens": "none are added",
    "parallel_tool_calls": "there are no tools to call",
}

_ADVICE = {
    "functions": " Deprecated by OpenAI in favour of tools.",
    "function_call": " Deprecated by OpenAI in favour of tool_choice.",
}


def refuse(body: Mapping[str, Any], rules: Mapping[str, Harmless]) -> None:
    """Raises `InvalidRequestError` for the first field of ``body`` that asks for what is not served."""
    for name, value in body.items():
        harmless = rules.get(name)
        if harmless is not None and not harmless(value):
            raise InvalidRequestError(
                f"{name} is not supported by this server.{_ADVICE.get(name, '')}", param=name
            )
