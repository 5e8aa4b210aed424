"""Logprobs and echoes through the whole path: numbers of the bundled model, and kills that must not show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.helpers.asking import Body, Live, chat, completion, null_text, path_of, post, request
from tests.helpers.returning import Event, Stream, text_of
from tests.helpers.stack import Stack
from tests.helpers.text import BUNDLED, bundled_codec
from workers.engine.null import logprobs_at, token_at

FRANCE = "The capital of France is"
#: Of the bundled model in float32, by transformers.
FRANCE_LOGPROBS = [None, -11.55, -0.34, -2.421, -0.449]
QUESTION = "What is the capital of France?"
NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def close(expected: Any) -> Any:
    return pytest.approx(expected, abs=0.02)


def choice_of(stack: Stack, body: Body) -> Any:
    answer = post(stack.port, body)
    assert answer.status == 200, answer
    return answer.json()["choices"][0]


def streamed(events: list[Event]) -> tuple[str, dict[str, list[Any]]]:
    """The text and the logprobs that all events of a stream add up to."""
    whole: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        for choice in (event.value or {}).get("choices", ()):
            for name, values in (choice["logprobs"] or {}).items():
                whole[name] += values or []
    return text_of(events), whole


@pytest.fixture(autouse=True)
def _streams_are_closed() -> Iterator[None]:
    yield
    Stream.close_all()


def test_a_prompt_is_scored(stack: Stack) -> None:
    got = choice_of(stack, completion(FRANCE, max_tokens=0, echo=True, logprobs=2))
    assert (got["text"], got["finish_reason"]) == (FRANCE, "length")
    logprobs = got["logprobs"]
    assert logprobs["tokens"] == ["The", " capital", " of", " France", " is"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == close(FRANCE_LOGPROBS[1:])
    assert logprobs["top_logprobs"][0] is None
    assert [len(best) for best in logprobs["top_logprobs"][1:]] == [3, 2, 2, 2]
    assert logprobs["text_offset"] == [0, 3, 11, 14, 21]


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_likelihood_as_lm_eval_asks_for_it(stack: Stack, tokens: int) -> None:
    """Several prompts of ids at once; each has as many entries as its ids, and one for what is generated."""
    context, continuation = bundled_codec().encode_batch([FRANCE, " Paris"], add_special_tokens=False)
    prompts = [context + continuation, context, [*context, 2]]
    answer = post(stack.port, completion(prompts, max_tokens=tokens, echo=True, logprobs=1, seed=1234)).json()
    assert answer["usage"]["completion_tokens"] == 3 * tokens
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert {len(choice["logprobs"][name]) for name in NAMES} == {len(prompt) + tokens}
    paris = answer["choices"][0]["logprobs"]
    assert paris["token_logprobs"][len(context)] == close(-0.261)
    assert paris["top_logprobs"][len(context)] == {" Paris": close(-0.261)}
    assert sum(paris["token_logprobs"][1 : len(context)]) == pytest.approx(-14.76, abs=0.05)
    assert answer["choices"][1]["logprobs"]["token_logprobs"][: len(context)][1:] == close(
        FRANCE_LOGPROBS[1:]
    )


@pytest.mark.parametrize(
    "body",
    [
        completion(FRANCE, max_tokens=8, logprobs=3),
        completion(FRANCE, max_tokens=8, logprobs=0, echo=True),
        completion([19556, 905, 15107, 230], max_tokens=3, logprobs=1, echo=True),
        completion("🙂🙂🙂🙂🙂🙂", max_tokens=7, logprobs=1),
        completion("日本語日本語日本語", max_tokens=5, logprobs=1, stop="本語"),
        completion(FRANCE, max_tokens=12, logprobs=1, echo=True, stop=["city of", "the"]),
    ],
    ids=["plain", "echo", "inside a character", "never text", "stop", "stop and echo"],
)
def test_a_stream_adds_up_to_the_whole(stack: Stack, body: Body) -> None:
    whole = choice_of(stack, body)
    text, logprobs = streamed(list(Stream.ask(stack.port, body)))
    assert text == whole["text"]
    assert logprobs == {name: whole["logprobs"][name] for name in NAMES} | {
        "token_logprobs": close(whole["logprobs"]["token_logprobs"]),
        "top_logprobs": [best and close(best) for best in whole["logprobs"]["top_logprobs"]],
    }


def test_tokens_that_are_no_text_are_named_by_their_bytes(stack: Stack) -> None:
    got = choice_of(stack, completion("😀 😃 😄 😁 😆 😅 😂 🤣 😊 😇 🙂", max_tokens=2, logprobs=0))
    assert got["text"] == " 😊"
    assert got["logprobs"]["tokens"] == ["bytes:\\x20\\xf0\\x9f\\x98", "bytes:\\x8a"]
    assert got["logprobs"]["text_offset"] == [0, 1]


def test_a_chat_with_the_official_client(stack: Stack) -> None:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        asked: Any = {
            "model": BUNDLED, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0,
            "logprobs": True, "top_logprobs": 2,
        }  # fmt: skip
        [choice] = client.chat.completions.create(**asked).choices
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        text = choice.message.content or ""
        assert b"".join(bytes(entry.bytes or []) for entry in content) == text.encode()
        assert [entry.token for entry in content] == [
            "The",
            " capital",
            " of",
            " France",
            " is",
            " Paris",
            ".",
        ]
        for entry in content:
            assert [best.logprob for best in entry.top_logprobs] == sorted(
                (best.logprob for best in entry.top_logprobs), reverse=True
            )
            assert entry.top_logprobs[0].token == entry.token
            assert entry.top_logprobs[0].logprob == entry.logprob
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        said = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or []]
        assert [entry.token for entry in said] == [entry.token for entry in content]
        assert [entry.logprob for entry in said] == close([entry.logprob for entry in content])
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**(asked | {"logprobs": False}))


def test_logprobs_of_a_chats_prompt(stack: Stack) -> None:
    answer = post(stack.port, chat(QUESTION, max_tokens=1, prompt_logprobs=1)).json()
    prompt = answer["prompt_logprobs"]
    assert len(prompt) == answer["usage"]["prompt_tokens"] == 37
    assert prompt[0] is None
    assert all(
        entry["decoded_token"] and entry["logprob"] <= 0 for each in prompt[1:] for entry in each.values()
    )
    assert all(entry["rank"] == 1 for each in prompt[1:] for entry in list(each.values())[-1:])


@pytest.mark.parametrize(
    "body", [completion(FRANCE, max_tokens=6, logprobs=1, echo=True), chat(QUESTION, logprobs=True)]
)
def test_whoever_comes_back_is_told_the_same(stack: Stack, body: Body) -> None:
    first = Stream.ask(stack.port, body, Millstream_Resume="60")
    events = list(first)
    for cut in range(0, len(events) - 1, 2):
        again = list(Stream.again(stack.port, first.uid, events[cut].id))
        assert [event.value for event in again] == [event.value for event in events[cut + 1 :]]
    shown = request(stack.port, "GET", f"/v1/requests/{first.uid}").json()["response"]["choices"][0]
    key = {"idempotency-key": f"logprobs {path_of(body)}"}
    once, twice = (request(stack.port, "POST", path_of(body), body, key).json() for _ in range(2))
    assert once == twice
    assert once["choices"][0]["logprobs"].keys() == shown["logprobs"].keys()
    assert streamed(events)[1] == {name: values or [] for name, values in shown["logprobs"].items()}


@pytest.fixture(scope="module")
def slow_stack() -> Iterator[Stack]:
    """The null engine, at a pace that leaves time to kill."""
    with Stack("--engine", "null", "--null-step-ms", "10") as running:
        yield running


@pytest.mark.parametrize("role", ["detokenizer", "scheduler", "redis"])
def test_a_kill_loses_and_repeats_no_logprobs(slow_stack: Stack, role: str) -> None:
    seed, tokens = len(role), 200
    text = null_text(seed, tokens)
    # Half of the characters begin what could be a stop string, so text is held back at most times.
    stops = [char + "\n" for char in sorted(set(text))[::2][:32]]
    body = completion("hello", seed=seed, max_tokens=tokens, logprobs=1, echo=True, stop=stops)
    live = Live(slow_stack.port, body)
    live.wait_for(20)
    slow_stack.wait_replaced(role, slow_stack.kill(role))
    assert live.result().texts == ("hello" + text,)
    _, got = streamed([Event("", event) for event in live._events])
    ids = [token_at(seed, index) for index in range(tokens)]
    assert got["text_offset"] == [0, *(len("hello") + index for index in range(tokens))]
    assert got["tokens"] == ["hello", *text]
    expected = [logprobs_at(token, index, 1, vocab_size=49152).logprob for index, token in enumerate(ids)]
    assert got["token_logprobs"] == [None, *expected]
