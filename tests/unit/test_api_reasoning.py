"""Reasoning apart from content: by both parsers, whichever way the text comes, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.answer import Answer
from api.reasoning import CLOSE, OPEN, PARSERS, Splitter
from api.resume import Numbered, Position
from api.routes.generation import events_of
from common.messages import Kind, OutEntry, Request, Usage
from common.sampling import SamplingParams

UID = "0-" + "a" * 32
R1, QWEN = "deepseek_r1", "qwen3"
#: Texts full of tags, parts of tags, and white space.
SNIPPETS = st.lists(
    st.sampled_from(
        [
            *(OPEN, CLOSE, "<", "</", "<th", "ink>", "think>", "</thin", "<</think>"),
            " ",
            "\n",
            " " * 40,
            "a",
            "é🙂",
        ]
    ),
    max_size=12,
).map("".join)


def split(parser: str, *pieces: str) -> tuple[str, str]:
    splitter = Splitter(begins_thinking=PARSERS[parser])
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(thought for thought, _ in parts), "".join(said for _, said in parts)


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "content"),
    [
        (R1, "hm</think>yes", "hm", "yes"),
        (R1, "<think>hm</think>yes", "hm", "yes"),
        (R1, "\n<think>\nhm\n</think>\n\nyes", "\nhm\n", "\n\nyes"),
        (R1, "never closed", "never closed", ""),
        (R1, "</think>at once", "", "at once"),
        (R1, "a</think>b</think>c<think>d", "a", "b</think>c<think>d"),
        (R1, "hm</thin", "hm</thin", ""),
        (R1, "<thi", "<thi", ""),
        (R1, "a < b</think>", "a < b", ""),
        (QWEN, "<think>hm</think>yes", "hm", "yes"),
        (QWEN, "\n\n<think>hm</think>yes", "hm", "yes"),
        (QWEN, "<think>\n\n</think>\n\nyes", "\n\n", "\n\nyes"),
        (QWEN, "no tag", "", "no tag"),
        (QWEN, "late <think>hm</think>", "", "late <think>hm</think>"),
        (QWEN, "hm</think>yes", "", "hm</think>yes"),
        (QWEN, "<thin", "", "<thin"),
        (QWEN, "  ", "", "  "),
        (QWEN, " " * 65 + "<think>a", "", " " * 65 + "<think>a"),
        (QWEN, "<think>cut of", "cut of", ""),
        (QWEN, "", "", ""),
    ],
)
def test_what_is_reasoning(parser: str, text: str, reasoning: str, content: str) -> None:
    assert split(parser, text) == (reasoning, content)
    assert split(parser, *text) == (reasoning, content)


@given(st.sampled_from(sorted(PARSERS)), SNIPPETS, st.sets(st.integers(0, 80)))
def test_the_same_in_whatever_pieces_it_comes(parser: str, text: str, cuts: set[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    reasoning, content = split(parser, *pieces)
    assert (reasoning, content) == split(parser, text)
    assert CLOSE not in reasoning
    # Nothing but tags, and what is before the first, is left out.
    assert text.endswith(content)
    assert text.removesuffix(content).removesuffix(CLOSE).endswith(reasoning)


@given(st.text(alphabet="ab <>/", max_size=30), st.text(max_size=30))
def test_nothing_is_held_longer_than_it_may_be_a_tag(thought: str, said: str) -> None:
    splitter = Splitter(begins_thinking=True)
    splitter.push("x")  # no opening tag
    got = ""
    for place, letter in enumerate(thought, 1):
        got += splitter.push(letter)[0]
        held = ("x" + thought[:place])[len("x" + got) :]
        assert CLOSE.startswith(held)
    splitter.push(CLOSE)
    assert splitter.push(said) == ("", said)


def request(parser: str = R1, choices: int = 1, **reply: Any) -> Request:
    shape = {
        "model": "m", "created": 7, "fingerprint": "fp", "stream": True, "usage": True,
        "running_usage": False, "choices": choices, "reasoning": parser,
    }  # fmt: skip
    return Request(UID, Kind.CHAT, "m", SamplingParams(), {}, shape | reply, choices=choices)


def entries_of(pieces: Sequence[str], choice: int = 0) -> list[OutEntry]:
    """One entry per piece, one token each; the last is the end, and has a token without text."""
    made, at = [OutEntry("1-0", accepted=5)], 0
    for number, piece in enumerate(pieces, 1):
        made.append(OutEntry(f"1-{number}", choice, number, at, piece))
        at += len(piece)
    total = len(pieces) + 1
    made.append(OutEntry("2-0", choice, total, at, "", "stop", end="done", usage=Usage(5, total, 0)))
    return made


def chunks(request: Request, entries: Iterable[OutEntry]) -> list[Any]:
    stream = events_of(request)
    made = b"".join(map(stream.push, entries)).decode().split("\n\n")
    return [json.loads(block[6:]) for block in made if block and block != "data: [DONE]"]


def joined(some: Iterable[Any], name: str) -> str:
    return "".join(c["delta"].get(name, "") for chunk in some for c in chunk["choices"])


def test_reasoning_in_a_stream_is_golden() -> None:
    stream = events_of(request())
    got = b"".join(map(stream.push, entries_of(["<think>", "h", "m</thi", "nk>ye", "s"]))).decode()
    head = (
        f'data: {{"id":"chatcmpl-{UID}","object":"chat.completion.chunk","created":7,"model":"m",'
        '"system_fingerprint":"fp","choices":['
    )
    tail = ',"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    assert got == (
        f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}}{tail}'
        f'{head}{{"index":0,"delta":{{"reasoning_content":"h"}}{tail}'
        f'{head}{{"index":0,"delta":{{"reasoning_content":"m"}}{tail}'
        f'{head}{{"index":0,"delta":{{"content":"ye"}}{tail}'
        f'{head}{{"index":0,"delta":{{"content":"s"}}{tail}'
        f'{head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop","stop_reason":null}}],"usage":null}}\n\n'
        f'{head}],"usage":{{"prompt_tokens":5,"completion_tokens":6,"total_tokens":11,'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":4}}}\n\n'
        "data: [DONE]\n\n"
    )


@given(st.sampled_from(sorted(PARSERS)), SNIPPETS, st.sets(st.integers(1, 80)), st.booleans())
def test_a_stream_adds_up_to_the_whole_and_can_be_gone_on_with(
    parser: str, text: str, cuts: set[int], hidden: bool
) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    entries = entries_of([text[start:end] for start, end in pairwise(places)])
    asked = request(parser, hide_reasoning=hidden)
    streamed, answer = chunks(asked, entries), Answer(asked)
    for entry in entries:
        answer.push(entry)
    whole = orjson.loads(answer.body())
    message = whole["choices"][0]["message"]
    assert joined(streamed, "content") == message["content"] == split(parser, text)[1]
    assert joined(streamed, "reasoning_content") == (message.get("reasoning_content") or "")
    assert streamed[-1]["usage"] == whole["usage"]
    assert ("reasoning_content" in message) is not hidden
    everything = _numbered(asked, entries, "0-0")
    for seen, event in enumerate(everything[:-1]):
        after = event.partition("\n")[0].removeprefix("id: ")
        assert _numbered(asked, entries, after) == everything[seen + 1 :]


def _numbered(request: Request, entries: Iterable[OutEntry], after: str) -> list[str]:
    numbered = Numbered(events_of(request), Position.parse(after))
    return b"".join(map(numbered.push, entries)).decode().split("\n\n")[:-1]


def test_reasoning_tokens_are_those_up_to_the_closing_tag() -> None:
    def counted(parser: str, *pieces: str) -> int:
        usage = chunks(request(parser), entries_of(pieces))[-1]["usage"]
        return int(usage["completion_tokens_details"]["reasoning_tokens"])

    assert counted(R1, "<think>", "a", "b", "</think>", "c") == 4
    assert counted(R1, "a", "</think>", "c") == 2
    assert counted(R1, "a", "b") == 3  # never closed: all of them
    assert counted(QWEN, "<think>", "a", "</think>", "c") == 3
    assert counted(QWEN, "<think></think>c") == 1
    assert counted(QWEN, "a", "b") == 0


def test_running_usage_counts_the_reasoning_it_comes_with() -> None:
    got = chunks(request(running_usage=True), entries_of(["<think>", "a", "b", "</think>c", "d"]))
    texts = [chunk for chunk in got if chunk["choices"] and chunk["choices"][0]["delta"].get("role") is None]
    counts = [
        (
            chunk["usage"]["completion_tokens"],
            chunk["usage"]["completion_tokens_details"]["reasoning_tokens"],
        )
        for chunk in texts
    ]
    assert counts == [(2, 2), (3, 3), (4, 4), (5, 4), (6, 4)]


def test_each_choice_has_its_own_reasoning() -> None:
    first, second = entries_of(["a", "</think>b"]), entries_of(["c", "d</think>e"], choice=1)
    first[-1].end = ""
    entries = [first[1], second[1], second[2], first[2], first[3], second[3]]
    got = chunks(request(choices=2), entries)
    for index, reasoning, content in ((0, "a", "b"), (1, "cd", "e")):
        mine = [chunk for chunk in got if chunk["choices"] and chunk["choices"][0]["index"] == index]
        assert (joined(mine, "reasoning_content"), joined(mine, "content")) == (reasoning, content)
    assert got[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_what_redis_lost_and_brought_again_is_read_once() -> None:
    entries = entries_of(["<thi", "nk>ab", "c</th", "ink>de"])
    again = [*entries[:3], *entries[1:4], *entries[2:]]
    assert joined(chunks(request(), again), "reasoning_content") == "abc"
    assert joined(chunks(request(), again), "content") == "de"


@given(st.sampled_from(sorted(PARSERS)), SNIPPETS, st.sets(st.integers(1, 80)), st.booleans())
def test_logprobs_of_reasoning_tags_and_content_all_come_once(
    parser: str, text: str, cuts: set[int], hidden: bool
) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [piece for piece in (text[start:end] for start, end in pairwise(places)) if piece]
    entries = entries_of(pieces)
    for entry in entries[1:-1]:
        row = {"id": 9, "token": entry.text, "logprob": -0.5, "at": entry.at, "top": []}
        entry.logprobs = orjson.dumps(row).decode()
    asked = request(parser, hide_reasoning=hidden, logprobs=0)
    streamed, answer = chunks(asked, entries), Answer(asked)
    for entry in entries:
        answer.push(entry)
    [whole] = orjson.loads(answer.body())["choices"]
    told = [c["logprobs"] for chunk in streamed for c in chunk["choices"] if c["logprobs"] is not None]
    assert [each["token"] for logprobs in told for each in logprobs["content"]] == pieces
    assert [each["token"] for each in whole["logprobs"]["content"]] == pieces
    assert joined(streamed, "content") == whole["message"]["content"] == split(parser, text)[1]
