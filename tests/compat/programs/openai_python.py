"""The official Python client: whole answers, streams, async, raw responses, errors, timeouts, retries."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

URL, BUSY_URL, MODEL = os.environ["COMPAT_URL"], os.environ["COMPAT_BUSY_URL"], os.environ["COMPAT_MODEL"]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
ALPHABET = "Here is the English alphabet: ABC"


@pytest.fixture
def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert said.choices[0].message.content == ANSWER
    assert (said.choices[0].finish_reason, said.choices[0].message.role) == ("stop", "assistant")
    assert (said.usage.prompt_tokens, said.usage.completion_tokens, said.usage.total_tokens) == (37, 8, 45)
    assert said._request_id


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert (chunks[0].choices[0].delta.role, chunks[-2].choices[0].finish_reason) == ("assistant", "stop")
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 45)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_helper_for_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=FRANCE, temperature=0) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER
    assert {"content.delta", "content.done"} <= set(events)


def test_completions(client: openai.OpenAI) -> None:
    said = client.completions.create(model=MODEL, prompt=ALPHABET, temperature=0, stop=["HI"])
    assert (said.choices[0].text, said.choices[0].finish_reason) == ("DEFG", "stop")
    parts = client.completions.create(model=MODEL, prompt=ALPHABET, temperature=0, stream=True, max_tokens=3)
    assert "".join(part.choices[0].text for part in parts) == "DEFGHI"


def test_several_prompts_and_samples(client: openai.OpenAI) -> None:
    said = client.completions.create(
        model=MODEL, prompt=["a b", "c d"], n=2, max_tokens=4, seed=1, temperature=1
    )
    assert [choice.index for choice in said.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model=MODEL, prompt=[19556, 905], max_tokens=2, temperature=0)
    assert ids.usage.prompt_tokens == 2


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by


async def test_async() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        asked = [
            client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0) for _ in range(4)
        ]
        assert {said.choices[0].message.content for said in await asyncio.gather(*asked)} == {ANSWER}
        stream = await client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=0, stream=True
        )
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == ANSWER
        broken = await client.completions.create(model=MODEL, prompt="a", max_tokens=4000, stream=True)
        await anext(aiter(broken))
        await broken.close()


def test_raw_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=FRANCE, temperature=0, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert (raw.headers["x-request-id"], raw.parse().choices[0].message.content) == ("mine-1", ANSWER)
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=FRANCE, stream=True
    ) as streamed:
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert list(streamed.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_classes(client: openai.OpenAI, stream: bool) -> None:
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=MODEL, messages=[], stream=stream)
    assert (bad.value.param, bad.value.type) == ("messages", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="nothing", messages=FRANCE, stream=stream)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as long:
        ask(model=MODEL, messages=[{"role": "user", "content": "word " * 9000}], stream=stream)
    assert long.value.code == "context_length_exceeded"
    assert long.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


def test_a_timeout_ends_the_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(model=MODEL, prompt="a", max_tokens=4000)
    assert client.completions.create(model=MODEL, prompt=ALPHABET, temperature=0).choices[0].text


def flaky(url: str) -> str:
    """A way to ``url`` that loses the first connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, to: socket.socket) -> None:
        while data := source.recv(65536):
            to.sendall(data)

    def serve() -> None:
        listener.accept()[0].close()
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        threading.Thread(target=pump, args=(near, far), daemon=True).start()
        pump(far, near)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_lost_connection_is_tried_again() -> None:
    client = openai.OpenAI(base_url=f"{flaky(URL)}/v1", api_key="none")
    said = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert said.choices[0].message.content == ANSWER


def test_a_full_server_says_when_to_come_back() -> None:
    client = openai.OpenAI(base_url=f"{BUSY_URL}/v1", api_key="none", max_retries=0)

    def ask(client: openai.OpenAI) -> openai.APIStatusError | None:
        try:
            client.completions.create(model=MODEL, prompt="a", max_tokens=30)
        except openai.RateLimitError as error:
            return error
        return None

    with ThreadPoolExecutor(6) as pool:
        refused = [error for error in pool.map(ask, [client] * 6) if error is not None]
        assert refused
        for error in refused:
            assert error.code == "rate_limit_exceeded"
            assert int(error.response.headers["retry-after"]) >= 1
        patient = client.with_options(max_retries=8)
        assert list(pool.map(ask, [patient] * 6)) == [None] * 6
