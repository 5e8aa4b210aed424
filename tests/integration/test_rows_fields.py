"""Row by row, what each field of a request may say: what is served, and what gets 400 and the name of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.asking import Body, chat, completion, path_of
from tests.helpers.raw_http import Raw, ask
from tests.helpers.stack import Stack
from tests.helpers.text import BUNDLED

#: For both endpoints. Values are JSON texts, as some are none that a client's library would write.
GOOD: dict[str, list[str]] = {
    "max_tokens": ["null", "1", "2147483647"],
    "temperature": ["null", "0", "0.0", "1e-9", "1", "2"],
    "top_p": ["null", "0", "1e-9", "1", "1.0"],
    "top_k": ["null", "0", "-1", "1", "49153", "9223372036854775807"],
    "min_p": ["null", "0", "1"],
    "repetition_penalty": ["null", "1", "0.5", "2"],
    "presence_penalty": ["null", "-2", "2"],
    "frequency_penalty": ["null", "-2", "2"],
    "logit_bias": ["null", "{}", '{"5": -100}', '{"49151": 100}'],
    "seed": ["null", "0", "-9223372036854775808", "9223372036854775807"],
    "n": ["null", "1", "2"],
    "stream": ["null", "false"],
    "stream_options": ["null"],
    "stop": ["null", "[]", '"x"', '["x"]', '["x", "y", "z", "a", "b"]'],
    "stop_token_ids": ["null", "[]", "[2]"],
    "include_stop_str_in_output": ["null", "true", "false"],
    "ignore_eos": ["null", "true"],
    "skip_special_tokens": ["null", "true", "false"],
    "response_format": ["null", '{"type": "text"}'],
    "user": ["null", '"u"'],
    "safety_identifier": ['"u"'],
    "prompt_cache_key": ['"k"'],
    "metadata": ["null", '{"a": "b"}'],
    "store": ["null", "false"],
    "cache_salt": ["null", '"s"'],
    "priority": ["null", "-100", "0", "100"],
    "request_id": ["null", '"a-label"'],
    "service_tier": ["null", '"auto"', '"default"'],
    "modalities": ["null", '["text"]'],
    "prediction": ['{"type": "content", "content": "x"}'],
    "verbosity": ['"low"'],
    "web_search_options": ["null"],
    "tools": ["null", "[]"],
    "something_unknown": ["1", "null", '{"a": [1]}'],
}
_NOT_FINITE = ["NaN", "Infinity", "-Infinity", "1e400"]
_NO_NUMBER = ["true", '"1"', "[]", "{}"]
BAD: dict[str, list[str]] = {
    "max_tokens": ["0", "-1", "9223372036854775808", "1e30", "1.5", *_NOT_FINITE, *_NO_NUMBER],
    "temperature": ["-1", "-0.1", "2.1", *_NOT_FINITE, *_NO_NUMBER],
    "top_p": ["-0.1", "1.1", *_NOT_FINITE, *_NO_NUMBER],
    "top_k": ["-2", "1.5", "9223372036854775808", *_NO_NUMBER],
    "min_p": ["-0.1", "1.1", *_NOT_FINITE, *_NO_NUMBER],
    "repetition_penalty": ["0", "-1", *_NOT_FINITE, *_NO_NUMBER],
    "presence_penalty": ["-2.1", "2.1", *_NOT_FINITE, *_NO_NUMBER],
    "frequency_penalty": ["-2.1", "2.1", *_NOT_FINITE, *_NO_NUMBER],
    "logit_bias": ['{"a": 1}', '{"-1": 1}', '{"49152": 1}', '{"1": 101}', '{"1": null}', "[]", '{"1": true}'],
    "seed": ["9223372036854775808", "-9223372036854775809", "1.5", "9" * 5000, *_NO_NUMBER],
    "n": ["0", "-1", "129", "1.5", *_NO_NUMBER],
    "stream": ["1", '"true"', "[]"],
    "stream_options": ["{}", '{"include_usage": true}', '{"include_usage": 1}'],
    "stop": ['""', '["x", ""]', "5", "[5]", "{}", json.dumps(["x"] * 33), json.dumps("x" * 1025)],
    "stop_token_ids": ["[-1]", "[49152]", "[1099511627776]", "[true]", '["1"]', "5"],
    "response_format": ['{"type": "json_object"}', '{"type": "json_schema"}', '{"type": "x"}', "{}", "5"],
    "structured_outputs": ['{"regex": "a"}'],
    "guided_json": ["{}", '"{}"'],
    "guided_choice": ['["a"]'],
    "user": ["5", "{}", json.dumps("u" * 1025)],
    "metadata": ['{"a": 1}', "[]", json.dumps({f"{n}": "" for n in range(17)})],
    "cache_salt": ['""', "5", json.dumps("s" * 257)],
    "priority": ["-101", "101", "0.5", *_NO_NUMBER],
    "request_id": ['""', '"a b"', "5", json.dumps("r" * 129)],
    "prompt_logprobs": ["-1", "21", *_NO_NUMBER],
}
#: For chats alone.
CHAT_GOOD: dict[str, list[str]] = {
    "max_completion_tokens": ["null", "1"],
    "tool_choice": ["null", '"none"', '"auto"'],
    "logprobs": ["null", "false", "true"],
    "reasoning_effort": ["null", '"low"'],
    "chat_template_kwargs": ["null", "{}", '{"enable_thinking": false}'],
    "continue_final_message": ["null", "false"],
    "add_generation_prompt": ["null", "true", "false"],
}
CHAT_BAD: dict[str, list[str]] = {
    "max_completion_tokens": ["0", "-1", "9223372036854775808", *_NO_NUMBER],
    "logprobs": ["0", "1", '"true"'],
    "top_logprobs": ["1", "21", "-1", *_NO_NUMBER],
    "store": ["true"],
    "modalities": ['["text", "audio"]', '["audio"]'],
    "web_search_options": ["{}"],
    "tools": ['[{"type": "function", "function": {"name": "f"}}]'],
    "functions": ['[{"name": "f"}]'],
    "function_call": ['{"name": "f"}'],
    "chat_template": ['"{{ x }}"'],
}
#: (role, content) of the one message, as JSON texts.
CONTENTS_GOOD = [
    *(("user", '""'), ("user", "[]"), ("user", '["x"]'), ("assistant", "null"), ("developer", '"x"')),
    *(("user", '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'), ("tool", '"x"')),
]
CONTENTS_BAD = [
    *(("user", "null"), ("system", "null"), ("user", "5"), ("user", "{}"), ("robot", '"x"')),
    *(("user", '[{"type": "image_url", "image_url": {"url": "u"}}]'), ("user", '[{"type": "text"}]')),
    ("user", '[{"type": "text", "text": null}]'),
]
PROMPTS_GOOD = ['"x"', '["x", "y"]', "[5, 6]", "[[5], [6, 7]]", "[49151]"]
PROMPTS_BAD = [
    *('""', "[]", '[""]', "[[]]", "[[5], []]", '[1, "a"]', "[-1]", "[49152]", "[1099511627776]", "[true]"),
    *("null", "5", "{}", '["a", ["b"]]', "[1.5]"),
]


def send(stack: Stack, body: Body, more: str = "") -> tuple[int, Any]:
    """The status, and the answer; ``more`` is put into the body as it is."""
    text = json.dumps({name: value for name, value in body.items() if name != "temperature"})
    data = text[:-1] + (f",{more}" if more else "") + "}"
    return post(stack, path_of(body), data)


def post(stack: Stack, path: str, data: str) -> tuple[int, Any]:
    headers = ((b"content-type", b"application/json"),)
    answer = ask(stack.port, Raw(b"POST", path.encode(), headers, data.encode()))
    assert answer is not None
    return answer.status, answer.error if answer.status >= 400 else answer.json()


def bodies() -> list[Body]:
    return [chat("x"), completion("x")]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GOOD for value in GOOD[name]])
def test_values_that_are_served(null_stack: Stack, name: str, value: str) -> None:
    limit = "" if name == "max_tokens" else '"max_tokens": 2,'
    for body in bodies():
        if name == "max_tokens" and value != "1":
            continue  # to the end of the context; the unit tests see to it
        status, said = send(null_stack, body, f'{limit}"{name}": {value}')
        assert status == 200, said


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_values_that_are_refused(null_stack: Stack, name: str, value: str) -> None:
    for body in bodies():
        _refused(send(null_stack, body, f'"{name}": {value}'), name, value)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in CHAT_GOOD for value in CHAT_GOOD[name]]
)
def test_values_that_are_served_in_chats(null_stack: Stack, name: str, value: str) -> None:
    limit = "" if name == "max_completion_tokens" else '"max_completion_tokens": 2,'
    status, said = send(null_stack, chat("x", max_tokens=3), f'{limit}"{name}": {value}')
    assert status == 200, said


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in CHAT_BAD for value in CHAT_BAD[name]])
def test_values_that_are_refused_in_chats(null_stack: Stack, name: str, value: str) -> None:
    _refused(send(null_stack, chat("x"), f'"{name}": {value}'), name, value)


def _refused(got: tuple[int, Any], name: str, value: str) -> None:
    status, error = got
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    # What is not JSON has no field yet; orjson gives 1e400 and its kind back as no JSON.
    assert (error["param"] or name).startswith(name), (value, error)


@pytest.mark.parametrize(("role", "content"), CONTENTS_GOOD)
def test_contents_that_are_served(null_stack: Stack, role: str, content: str) -> None:
    assert _message(null_stack, role, content)[0] == 200


@pytest.mark.parametrize(("role", "content"), CONTENTS_BAD)
def test_contents_that_are_refused(null_stack: Stack, role: str, content: str) -> None:
    status, error = _message(null_stack, role, content)
    assert status == 400
    assert error["param"].startswith("messages")


def _message(stack: Stack, role: str, content: str) -> tuple[int, Any]:
    message = f'{{"role": "{role}", "content": {content}, "refusal": null, "annotations": [], "x": 1}}'
    data = f'{{"model": "{BUNDLED}", "max_tokens": 2, "messages": [{message}]}}'
    return post(stack, "/v1/chat/completions", data)


@pytest.mark.parametrize("prompt", PROMPTS_GOOD)
def test_prompts_that_are_served(null_stack: Stack, prompt: str) -> None:
    data = f'{{"model": "{BUNDLED}", "prompt": {prompt}}}'
    status, said = post(null_stack, "/v1/completions", data)
    assert status == 200
    assert all(choice["finish_reason"] == "length" for choice in said["choices"])
    assert said["usage"]["completion_tokens"] == 16 * len(said["choices"]), "OpenAI's default"


@pytest.mark.parametrize("prompt", PROMPTS_BAD)
def test_prompts_that_are_refused(null_stack: Stack, prompt: str) -> None:
    status, error = post(null_stack, "/v1/completions", f'{{"model": "{BUNDLED}", "prompt": {prompt}}}')
    assert status == 400
    assert error["param"].startswith("prompt")
