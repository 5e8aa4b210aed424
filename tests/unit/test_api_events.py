"""Entries of a reply into wire text, event by event: golden text, offsets, ends and failures."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.answer import Answer
from api.events import ChatStream, CompletionStream, GapError
from common.errors import CancelledError, ContextLengthError, DeadlineError, MillstreamError
from common.messages import Kind, OutEntry, Request, Usage
from common.sampling import SamplingParams

UID = "0-" + "a" * 32
HEAD = '"created":7,"model":"asked","system_fingerprint":"fp_1","choices":['
CHAT = f'data: {{"id":"chatcmpl-{UID}","object":"chat.completion.chunk",{HEAD}'
TEXT = f'data: {{"id":"cmpl-{UID}","object":"text_completion",{HEAD}'
USAGE = (
    '{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":5},'
    '"completion_tokens_details":{"reasoning_tokens":0}}'
)


def request(kind: Kind = Kind.CHAT, *, choices: int = 1, **reply: Any) -> Request:
    shape = {"model": "asked", "created": 7, "fingerprint": "fp_1", "usage": False, "running_usage": False}
    return Request(UID, kind, "m", SamplingParams(), {}, {**shape, "stream": True, **reply}, choices=choices)


def delta(text: str, at: int = 0, choice: int = 0, n: int = 1) -> OutEntry:
    return OutEntry("1-1", choice, n, at, text)


def end(text: str = "", at: int = 0, choice: int = 0, **fields: Any) -> OutEntry:
    return OutEntry(
        "1-2", choice, 3, at, text, **{"finish": "stop", "end": "done", "usage": Usage(5, 3, 9), **fields}
    )


ACCEPTED = OutEntry("1-0", accepted=5)


def wire(stream: ChatStream | CompletionStream, *entries: OutEntry) -> str:
    return b"".join(stream.push(entry) for entry in entries).decode()


def test_a_chat_stream() -> None:
    stream = ChatStream(request())
    got = wire(stream, ACCEPTED, delta('a"\n'), delta("é🙂", 3), end(at=5, finish="length"))
    assert got == (
        f'{CHAT}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{CHAT}{{"index":0,"delta":{{"content":"a\\"\\n"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{CHAT}{{"index":0,"delta":{{"content":"é🙂"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{CHAT}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    assert stream.done


def test_a_chat_stream_with_usage() -> None:
    got = wire(ChatStream(request(usage=True)), delta("a"), end("b", 1, stop='"END"'))
    assert got == (
        f'{CHAT}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{CHAT}{{"index":0,"delta":{{"content":"a"}},"logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{CHAT}{{"index":0,"delta":{{"content":"b"}},"logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{CHAT}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop","stop_reason":"END"}}],"usage":null}}\n\n'
        f'{CHAT}],"usage":{USAGE}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_completion_stream() -> None:
    got = wire(
        CompletionStream(request(Kind.COMPLETION, usage=True)), ACCEPTED, delta("a"), end("b", 1, stop="2")
    )
    assert got == (
        f'{TEXT}{{"index":0,"text":"a","logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{TEXT}{{"index":0,"text":"b","logprobs":null,"finish_reason":"stop","stop_reason":2}}],"usage":null}}\n\n'
        f'{TEXT}],"usage":{USAGE}}}\n\n'
        "data: [DONE]\n\n"
    )


def parsed(text: str) -> list[Any]:
    return [json.loads(block[6:]) for block in text.split("\n\n") if block and block != "data: [DONE]"]


def test_every_choice_has_one_first_and_one_last_event() -> None:
    stream = ChatStream(request(choices=2))
    chunks = parsed(
        wire(
            stream,
            delta("a"),
            delta("x", choice=1),
            end(at=1, end=""),
            delta("y", 1, choice=1),
            end(at=2, choice=1),
        )
    )
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(c["delta"].get("content", "") for c in mine) == ("a" if index == 0 else "xy")


def test_a_choice_without_text_still_begins_and_ends() -> None:
    chunks = parsed(wire(ChatStream(request()), end()))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


def test_running_usage_counts_with_the_tokens() -> None:
    stream = CompletionStream(request(Kind.COMPLETION, usage=True, running_usage=True, choices=2))
    chunks = parsed(wire(stream, ACCEPTED, delta("a", n=2), delta("b", choice=1), delta("c", 1, n=3)))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 3, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}


@pytest.mark.parametrize("make", [ChatStream, CompletionStream])
def test_an_error_in_the_middle_is_an_event_and_then_done(make: Any) -> None:
    stream = make(request(Kind.CHAT if make is ChatStream else Kind.COMPLETION))
    failed = OutEntry("1-3", error="deadline", message="Too late.", end="error")
    got = wire(stream, delta("a"), failed)
    assert got.endswith(
        'data: {"error":{"message":"Too late.","type":"server_error","param":null,"code":"timeout"}}\n\n'
        "data: [DONE]\n\n"
    )
    assert stream.done


def test_what_comes_again_is_cut_and_never_repeated() -> None:
    stream = ChatStream(request())
    entries = [
        delta("ab"),
        delta("cd", 2),
        delta("ab"),
        delta("abcd"),
        delta("bcdé🙂x", 1),
        delta("x", 6),
        delta("y", 7),
    ]
    chunks = parsed(wire(stream, *entries, end(at=8), end(at=8)))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "abcdé🙂xy"
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1


def test_a_gap_is_an_error_never_skipped() -> None:
    for make in (ChatStream, CompletionStream):
        stream = make(request(Kind.CHAT if make is ChatStream else Kind.COMPLETION))
        stream.push(delta("ab"))
        with pytest.raises(GapError):
            stream.push(delta("d", 3))


@given(
    st.text(min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 29), st.integers(1, 8)), max_size=20),
)
def test_any_replay_gives_the_same_text(text: str, replays: list[tuple[int, int]]) -> None:
    """Whatever is sent again from wherever below what was sent, the client reads the text once."""
    stream, passed, got = ChatStream(request()), 0, b""
    for start, length in [*replays, (0, len(text))]:
        at = min(start, passed)
        got += stream.push(delta(text[at : at + length], at))
        passed = max(passed, min(at + length, len(text)))
    read = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in parsed(got.decode()))
    assert read == text


def test_a_collected_chat() -> None:
    answer = Answer(request())
    for entry in (ACCEPTED, delta("a"), delta("b", 1), end("c", 2, stop='"x"')):
        assert not answer.done
        answer.push(entry)
    assert answer.done
    assert answer.body().decode() == (
        f'{{"id":"chatcmpl-{UID}","object":"chat.completion","created":7,"model":"asked","choices":[{{"index":0,'
        '"message":{"role":"assistant","content":"abc","refusal":null},"logprobs":null,"finish_reason":"stop",'
        f'"stop_reason":"x"}}],"usage":{USAGE},"system_fingerprint":"fp_1"}}'
    )


def test_a_collected_completion_has_its_choices_in_order() -> None:
    answer = Answer(request(Kind.COMPLETION, choices=3))
    for choice in (2, 0, 1):
        answer.push(delta(f"t{choice}", choice=choice))
    for choice in (1, 2, 0):
        answer.push(end(at=2, choice=choice, end="done" if choice == 0 else ""))
    body = orjson.loads(answer.body())
    assert body["object"] == "text_completion"
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "t0", "stop"),
        (1, "t1", "stop"),
        (2, "t2", "stop"),
    ]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("context", ContextLengthError),
        ("cancelled", CancelledError),
        ("deadline", DeadlineError),
        ("of a later version", MillstreamError),
    ],
)
def test_an_error_entry_raises_its_error(kind: str, error: type[MillstreamError]) -> None:
    with pytest.raises(error, match="why") as caught:
        Answer(request()).push(OutEntry("1-3", error=kind, message="why", param="messages", end="error"))
    assert type(caught.value) is error
    assert caught.value.param == "messages"
