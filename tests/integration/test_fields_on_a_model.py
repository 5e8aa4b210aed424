"""The small fields with a real model behind them: what reaches the engine, and what comes back from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.asking import post
from tests.helpers.stack import Stack

#: Beside prompts that it fits, so that a chat is known to be rendered by it.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ more }}"
ALPHABET = "Here is the English alphabet: ABC"
CONTEXT, BLOCK = 96, 16


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = (
        *("--chat-template", str(template), "--default-chat-template-kwargs", '{"more": "ABC"}'),
        *("--override-generation-config", '{"temperature": 0, "max_new_tokens": 9}'),
        *("--served-model-aliases", "other, and/another", "--max-model-len", str(CONTEXT)),
    )
    with Stack(*flags) as stack:
        yield stack.port


def complete(port: int, prompt: Any, **fields: Any) -> Any:
    answer = post(port, {"model": "other", "prompt": prompt, "max_tokens": 2, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


def cached(port: int, prompt: Any, **fields: Any) -> int:
    return int(complete(port, prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"])


def ids(first: int, count: int = 3 * BLOCK) -> list[int]:
    return [first, *range(1000, 1000 + count - 1)]


def test_cached_tokens_come_from_the_engine(port: int) -> None:
    assert cached(port, ids(11)) == 0
    assert cached(port, ids(11)) == 2 * BLOCK, "the last token is always computed"
    assert cached(port, [*ids(11), 12]) == 3 * BLOCK


def test_cached_tokens_of_samples_count_once_and_of_prompts_add_up(port: int) -> None:
    cached(port, ids(21))
    assert cached(port, ids(21), n=3) == 2 * BLOCK
    assert cached(port, [ids(21), ids(22)]) == 2 * BLOCK
    assert cached(port, [ids(21), ids(22)], n=2) == 4 * BLOCK


def test_cache_salt_keeps_prompts_apart(port: int) -> None:
    assert cached(port, ids(31), cache_salt="a") == 0
    assert cached(port, ids(31), cache_salt="b") == cached(port, ids(31)) == 0
    assert cached(port, ids(31), cache_salt="a") == cached(port, ids(31)) == 2 * BLOCK


def test_n_with_temperature_0_gives_equal_choices(port: int) -> None:
    choices = complete(port, ALPHABET, n=3, temperature=0, max_tokens=5)["choices"]
    assert [choice["text"] for choice in choices] == ["DEFGHIJK"] * 3


def test_top_p_0_is_greedy(port: int) -> None:
    assert complete(port, ALPHABET, top_p=0, temperature=2)["choices"][0]["text"] == "DEFGH"


def test_override_generation_config(port: int) -> None:
    got = complete(port, ALPHABET, max_tokens=100)
    assert got["usage"]["completion_tokens"] == 9
    assert got["choices"][0]["text"] == complete(port, ALPHABET, max_tokens=9)["choices"][0]["text"]
    assert got["choices"][0]["text"].startswith("DEFGH")


def test_chat_template_and_default_chat_template_kwargs(port: int) -> None:
    body = {"model": "and/another", "messages": [{"role": "user", "content": ALPHABET[:-3]}]}
    whole = complete(port, ALPHABET, max_tokens=9)["choices"][0]["text"]
    said = post(port, body).json()
    assert (said["choices"][0]["message"]["content"], said["model"]) == (whole, "and/another")
    other = post(port, body | {"chat_template_kwargs": {"more": "ABCDEFG"}}).json()
    assert other["usage"]["prompt_tokens"] > said["usage"]["prompt_tokens"]


def test_truncate_prompt_tokens(port: int) -> None:
    prompt = ids(41, 40)
    cut = complete(port, prompt, truncate_prompt_tokens=5, max_tokens=4)
    assert cut["usage"]["prompt_tokens"] == 5
    assert cut["choices"] == complete(port, prompt[-5:], max_tokens=4)["choices"]
    assert complete(port, prompt, truncate_prompt_tokens=CONTEXT)["usage"]["prompt_tokens"] == 40
    full = complete(port, "word " * 2 * CONTEXT, truncate_prompt_tokens=-1)
    assert full["usage"]["prompt_tokens"] == CONTEXT - 1
    chat = {"model": "other", "messages": [{"role": "user", "content": "word " * 2 * CONTEXT}]}
    assert post(port, chat).json()["error"]["code"] == "context_length_exceeded"
    assert post(port, chat | {"truncate_prompt_tokens": 7}).json()["usage"]["prompt_tokens"] == 7
    too_many = post(port, chat | {"truncate_prompt_tokens": CONTEXT + 1})
    assert too_many.json()["error"]["param"] == "truncate_prompt_tokens"


def test_the_developer_is_the_system_for_templates_without_one(port: int) -> None:
    body = {"model": "other", "messages": [{"role": "developer", "content": ALPHABET}], "max_tokens": 2}
    body["chat_template_kwargs"] = {"more": ""}
    assert post(port, body).json()["choices"][0]["message"]["content"] == "DEFGH"
