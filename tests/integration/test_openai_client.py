"""The official `openai` client against the whole stack with a real model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.helpers.stack import Stack
from tests.helpers.waiting import until

MODEL = "smollm2-135m-instruct"
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_chat(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": FRANCE}], temperature=0
    )
    [choice] = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", PARIS, "stop")
    assert choice.message.tool_calls is None
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (37, 8, 45)
    assert (done.object, done.model) == ("chat.completion", MODEL)
    assert done.id.startswith("chatcmpl-")


def test_a_chat_stream(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": FRANCE}]}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *texts, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == PARIS
    assert [chunk.choices[0].delta.role for chunk in texts][:2] == ["assistant", None]
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * (len(texts) - 1) + ["stop"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_length_ends_it(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": FRANCE}], temperature=0, max_completion_tokens=3
    )
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 3


def test_a_completion(client: OpenAI) -> None:
    prompt = "Here is the English alphabet: ABC"
    done = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=14)
    [choice] = done.choices
    assert (choice.text, choice.finish_reason) == ("DEFGHIJKLMNOPQRSTUVWXYZ", "length")
    assert done.object == "text_completion"


def test_a_completion_stream(client: OpenAI) -> None:
    prompt = "Here is the English alphabet: ABC"
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=16, stop=["LMX", "OPQ"], stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "DEFGHIJKLMN"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_samples_are_independent_and_repeatable(client: OpenAI) -> None:
    def samples() -> list[str]:
        done = client.completions.create(
            model=MODEL, prompt="Once upon a time", n=3, seed=11, temperature=1.0, max_tokens=6
        )
        assert [choice.index for choice in done.choices] == [0, 1, 2]
        return [choice.text for choice in done.choices]

    first = samples()
    assert len(set(first)) == 3
    assert samples() == first


def test_a_chat_stream_of_several_choices(client: OpenAI) -> None:
    """Put together as the client's users do it: by index."""
    texts, finishes = ["", ""], ["", ""]
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": FRANCE}],
        n=2,
        seed=7,
        temperature=0,
        stop=["Paris", "London"],
        stream=True,
    ):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        finishes[choice.index] += choice.finish_reason or ""
    assert (texts, finishes) == (["The capital of France is "] * 2, ["stop", "stop"])


def test_headers(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="a", max_tokens=1)
    assert raw.headers["x-request-id"]
    assert raw.http_response.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].finish_reason == "length"
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt="a", max_tokens=1, stream=True
    ) as response:
        assert response.headers["x-request-id"]
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"


def test_a_batch_of_prompts(client: OpenAI) -> None:
    prompts = ["Here is the English alphabet: ABC", "Once upon a time"]
    done = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=5)
    alone = [client.completions.create(model=MODEL, prompt=p, temperature=0, max_tokens=5) for p in prompts]
    assert [choice.text for choice in done.choices] == [each.choices[0].text for each in alone]
    usages = [each.usage.prompt_tokens for each in alone if each.usage is not None]
    assert done.usage is not None
    assert done.usage.prompt_tokens == sum(usages)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_typed(client: OpenAI, stream: bool) -> None:
    message = {"role": "user", "content": "hi"}
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nothing", messages=[message], stream=stream)  # type: ignore[call-overload]
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[message], temperature=9, stream=stream)  # type: ignore[call-overload]
    assert refused.value.param == "temperature"
    assert refused.value.request_id is not None
    long = {"role": "user", "content": "word " * 20_000}
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as too_long:
        client.chat.completions.create(model=MODEL, messages=[long], stream=stream)  # type: ignore[call-overload]
    assert too_long.value.code == "context_length_exceeded"


def test_a_client_that_stops_reading_stops_the_work(client: OpenAI, stack: Stack) -> None:
    redis = stack.redis()
    places = [f"ms:{{{p}}}:inflight:{MODEL}:interactive" for p in (0, 1)]
    with client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count to a thousand."}], stream=True
    ) as stream:
        next(iter(stream))
        assert sum(redis.zcard(place) for place in places) == 1
    until(lambda: sum(redis.zcard(place) for place in places) == 0, "its place is free", 5)
