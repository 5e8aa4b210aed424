"""Prompts around the context length: a right answer, or a quick and clear no."""

from __future__ import annotations

import time

import pytest

from tests.helpers.asking import Body, RefusedError, ask, both, chat, completion, null_text, whole
from tests.helpers.stack import Stack

#: ` the`, again and again: a prompt of exactly so many tokens.
TOKEN = 260
#: A refusal is promised within one second; asserted is five times that.
QUICK_S = 5.0


def tokens(count: int, **fields: object) -> Body:
    return completion([TOKEN] * count, ignore_eos=True, **fields)


def assert_refused(stack: Stack, body: Body, context: int, param: str) -> None:
    for stream in (False, True):
        start = time.monotonic()
        with pytest.raises(RefusedError) as refused:
            ask(stack.port, body | {"stream": stream})
        assert time.monotonic() - start < QUICK_S
        answer, error = refused.value.answer, refused.value.error
        assert answer is not None, "refused before any 200"
        assert answer.status == 400
        assert (error["code"], error["type"], error["param"]) == (
            "context_length_exceeded",
            "invalid_request_error",
            param,
        )
        assert f"maximum context length is {context} tokens" in error["message"]


def test_the_longest_prompt_is_answered(small_stack: Stack, stack: Stack) -> None:
    said = both(small_stack.port, tokens(511))
    assert (said.usage, said.finishes) == ((511, 1), ("length",))
    elsewhere = whole(stack.port, tokens(511, max_tokens=1))
    assert said.text == elsewhere.text


def test_the_context_length_ends_an_answer(small_stack: Stack) -> None:
    """Also one that asked for more, or for as much as there is."""
    said = both(small_stack.port, tokens(500, max_tokens=4000))
    assert (said.usage, said.finishes) == ((500, 12), ("length",))
    said = both(small_stack.port, chat("word " * 450, ignore_eos=True))
    assert sum(said.usage) == 512
    assert said.finishes == ("length",)


@pytest.mark.parametrize("count", [512, 513, 4000])
def test_a_prompt_without_room_for_an_answer_is_refused(small_stack: Stack, count: int) -> None:
    assert_refused(small_stack, tokens(count), 512, "prompt")


def test_twenty_thousand_words_are_refused(small_stack: Stack, null_stack: Stack) -> None:
    words = " ".join(f"word{number}" for number in range(20_000))
    for stack, context in ((small_stack, 512), (null_stack, 8192)):
        assert_refused(stack, completion(words), context, "prompt")
        assert_refused(stack, chat(words), context, "messages")
        assert_refused(stack, completion(["short", words]), context, "prompt")


def test_the_model_s_own_context_length(null_stack: Stack) -> None:
    said = both(null_stack.port, tokens(8191, seed=3))
    assert (said.text, said.usage, said.finishes) == (null_text(3, 1), (8191, 1), ("length",))
    assert_refused(null_stack, tokens(8192), 8192, "prompt")
    assert_refused(null_stack, tokens(8193), 8192, "prompt")
