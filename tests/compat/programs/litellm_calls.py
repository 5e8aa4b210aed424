"""LiteLLM in front of the server, as its library and so as its proxy uses it."""

from __future__ import annotations

import os

import litellm
import pytest

MODEL = os.environ["COMPAT_MODEL"]
AT = {"api_base": os.environ["COMPAT_URL"] + "/v1", "api_key": "none", "num_retries": 0, "max_retries": 0}
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def chat(**fields: object) -> object:
    said = {"model": f"openai/{MODEL}", "messages": FRANCE, "temperature": 0, **AT}
    return litellm.completion(**said | fields)


def test_completion() -> None:
    said = chat()
    assert said.choices[0].message.content == ANSWER
    assert said.choices[0].finish_reason == "stop"
    assert said.usage.total_tokens == 45


def test_stream() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    whole = litellm.stream_chunk_builder(chunks, messages=FRANCE)
    assert whole.choices[0].message.content == ANSWER
    assert whole.usage.total_tokens == 45


async def test_acompletion() -> None:
    said = await litellm.acompletion(model=f"openai/{MODEL}", messages=FRANCE, temperature=0, **AT)
    assert said.choices[0].message.content == ANSWER
    stream = await litellm.acompletion(
        model=f"openai/{MODEL}", messages=FRANCE, temperature=0, stream=True, **AT
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_text_completion(stream: bool) -> None:
    said = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="Here is the English alphabet: ABC",
        temperature=0,
        max_tokens=3,
        stream=stream,
        **AT,
    )
    texts = [chunk.choices[0].text or "" for chunk in said] if stream else [said.choices[0].text]
    assert "".join(texts) == "DEFGHI"


def test_errors_have_their_classes() -> None:
    with pytest.raises(litellm.NotFoundError):
        chat(model="openai/nothing")
    with pytest.raises(litellm.BadRequestError):
        chat(messages=[])
    with pytest.raises(litellm.ContextWindowExceededError):
        chat(messages=[{"role": "user", "content": "word " * 9000}])
