"""Logprobs and echoes on the wire: golden text, and what is held, cut, repeated or missing."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from api.answer import Answer
from api.events import ChatStream, CompletionStream
from common.messages import Kind, OutEntry, Request, Usage
from common.sampling import SamplingParams

UID = "0-" + "a" * 32
HEAD = '"created":7,"model":"asked","system_fingerprint":"fp_1","choices":['
CHAT = f'data: {{"id":"chatcmpl-{UID}","object":"chat.completion.chunk",{HEAD}'
TEXT = f'data: {{"id":"cmpl-{UID}","object":"text_completion",{HEAD}'
ACCEPTED = OutEntry("1-0", accepted=2, echo='[["Say",3]]')
STREAMS = {Kind.CHAT: ChatStream, Kind.COMPLETION: CompletionStream}


def request(kind: Kind = Kind.CHAT, *, choices: int = 1, n: int = 1, **reply: Any) -> Request:
    shape = {"model": "asked", "created": 7, "fingerprint": "fp_1", "usage": False, "running_usage": False}
    return Request(
        UID, kind, "m", SamplingParams(), {}, {**shape, "logprobs": 1, **reply}, n=n, choices=choices
    )


def row(token: str | list[int], at: int, logprob: float | None = -0.5, top: Any = None, **more: Any) -> str:
    best = [[token, logprob, 9]] if top is None and logprob is not None else top or []
    return orjson.dumps({"id": 9, "token": token, "logprob": logprob, "at": at, "top": best} | more).decode()


def delta(n: int, text: str, at: int, logprobs: str = "", choice: int = 0, **more: Any) -> OutEntry:
    return OutEntry("1-1", choice, n, at, text, logprobs=logprobs, **more)


def end(n: int, text: str, at: int, logprobs: str = "", **more: Any) -> OutEntry:
    return delta(n, text, at, logprobs, **{"finish": "stop", "end": "done", "usage": Usage(2, n, 0), **more})


def stretch(start: int, upto: int, *rows: str) -> str:
    return f'{{"from":{start},"end":{upto},"rows":[{",".join(rows)}]}}'


def wire(asked: Request, *entries: OutEntry) -> str:
    stream = STREAMS[asked.kind](asked)
    return b"".join(stream.push(entry) for entry in entries).decode()


def chunks(asked: Request, *entries: OutEntry) -> list[Any]:
    blocks = wire(asked, *entries).split("\n\n")
    return [json.loads(block[6:])["choices"][0] for block in blocks if block and block != "data: [DONE]"]


def answer(asked: Request, *entries: OutEntry) -> Any:
    whole = Answer(asked)
    for entry in entries:
        whole.push(entry)
    return orjson.loads(whole.body())


def test_a_chat_stream() -> None:
    first = row("H", 0, -0.25, [["H", -0.25, 9], ["h", -2.5, 8]])
    got = wire(request(), delta(1, "H", 0, first), end(2, "", 1, row("<end>", 1, hidden=True)))
    assert got == (
        f'{CHAT}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{CHAT}{{"index":0,"delta":{{"content":"H"}},"logprobs":{{"content":[{{"token":"H","logprob":-0.25,'
        '"bytes":[72],"top_logprobs":[{"token":"H","logprob":-0.25,"bytes":[72]}]}],"refusal":null},'
        '"finish_reason":null}]}\n\n'
        f'{CHAT}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_completion_stream_with_its_prompt() -> None:
    prompt = stretch(0, 6, row("<s>", 0, None), row("Say", 3, -3.0, [["No", -1.0, 4]]))
    got = wire(
        request(Kind.COMPLETION, echo=True),
        ACCEPTED,
        delta(0, "", 0, prompt_logprobs=prompt),
        delta(1, "é", 0, row("é", 0)),
        end(2, "", 1, row("<end>", 1, hidden=True)),
    )
    assert got == (
        f'{TEXT}{{"index":0,"text":"Say","logprobs":{{"tokens":["<s>","Say"],"token_logprobs":[null,-3.0],'
        '"top_logprobs":[null,{"No":-1.0,"Say":-3.0}],"text_offset":[0,0]},"finish_reason":null}]}\n\n'
        f'{TEXT}{{"index":0,"text":"é","logprobs":{{"tokens":["é"],"token_logprobs":[-0.5],'
        '"top_logprobs":[{"é":-0.5}],"text_offset":[3]},"finish_reason":null}]}\n\n'
        f'{TEXT}{{"index":0,"text":"","logprobs":{{"tokens":["<end>"],"token_logprobs":[-0.5],'
        '"top_logprobs":[{"<end>":-0.5}],"text_offset":[4]},"finish_reason":"stop","stop_reason":null}]}\n\n'
        "data: [DONE]\n\n"
    )


LEAD, REST = row([240, 159], 0, -1.0), row([153, 130], 0, -2.0)


def test_a_row_waits_for_its_character() -> None:
    entries = [delta(1, "", 0, LEAD), delta(2, "🙂", 0, REST), end(3, "!", 1, row("!", 1))]
    _, whole, last, _ = chunks(request(), *entries)
    assert [entry["bytes"] for entry in whole["logprobs"]["content"]] == [[240, 159], [153, 130]]
    assert whole["logprobs"]["content"][0]["token"] == "\ufffd"
    assert whole["delta"]["content"] == "🙂"
    assert last["logprobs"]["content"][0]["token"] == "!"
    logprobs = answer(request(Kind.COMPLETION), *entries)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x99\\x82", "!"]
    assert logprobs["top_logprobs"][0] == {"bytes:\\xf0\\x9f": -1.0}
    assert logprobs["text_offset"] == [0, 0, 1]


@pytest.mark.parametrize("kind", list(STREAMS))
def test_an_incomplete_character_at_the_end_keeps_its_rows(kind: Kind) -> None:
    entries = [delta(1, "a", 0, row("a", 0)), end(2, "", 1, row([240], 1), finish="length")]
    *_, last = [chunk for chunk in chunks(request(kind), *entries) if chunk["logprobs"]]
    named = last["logprobs"].get("tokens") or [entry["token"] for entry in last["logprobs"]["content"]]
    assert named == (["\ufffd"] if kind is Kind.CHAT else ["bytes:\\xf0"])


def cut_by(stop: str) -> list[OutEntry]:
    """ "ab" and then "c|d|", where the text ends behind "abc"; a special token between."""
    return [
        delta(1, "ab", 0, row("ab", 0)),
        delta(2, "", 2, row("<tool>", 2, hidden=True)),
        delta(3, "", 2, row("cd", 2)),
        end(4, "c", 2, row("e", 4), stop=stop),
    ]


def test_a_stop_string_cuts_rows_with_their_text() -> None:
    got = answer(request(Kind.COMPLETION), *cut_by('"de"'))["choices"][0]
    assert got["logprobs"]["tokens"] == ["ab", "<tool>", "cd"], "of the last one here one byte is in the text"
    assert got["text"] == "abc"
    assert answer(request(Kind.COMPLETION), *cut_by("7"))["choices"][0]["logprobs"]["tokens"][-1] == "e"
    for chunk in chunks(request(), *cut_by('"de"')):
        if chunk["logprobs"]:
            assert [entry["token"] for entry in chunk["logprobs"]["content"]] in (["ab"], ["cd"])


def test_a_hidden_token_before_what_is_cut_stays() -> None:
    entries = [delta(1, "", 0, row("<tool>", 0, hidden=True)), end(2, "", 0, row("END", 0), stop='"END"')]
    assert answer(request(Kind.COMPLETION), *entries)["choices"][0]["logprobs"]["tokens"] == ["<tool>"]
    assert [
        chunk["logprobs"] and chunk["logprobs"]["tokens"]
        for chunk in chunks(request(Kind.COMPLETION), *entries)
    ] == [
        ["<tool>"],
        None,
    ]


def test_what_comes_again_is_not_said_again() -> None:
    entries = [delta(1, "a", 0, row("a", 0)), delta(2, "", 1, row("b", 1)), delta(3, "bc", 1, row("c", 2))]
    again = [*entries, entries[1], entries[2], end(4, "", 3), entries[2], end(4, "", 3)]
    said = [chunk["logprobs"]["content"] for chunk in chunks(request(), *again) if chunk["logprobs"]]
    assert [entry["token"] for content in said for entry in content] == ["a", "b", "c"]
    content = answer(request(), *again)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "c"]


def test_no_more_than_was_asked_for() -> None:
    best = [["x", -0.1, 1], ["y", -0.2, 2], ["z", -0.3, 3]]
    entries = [delta(1, "q", 0, row("q", 0, -9.0, best)), end(2, "", 1)]
    none = answer(request(logprobs=0), *entries)["choices"][0]["logprobs"]["content"][0]
    assert (none["logprob"], none["top_logprobs"]) == (-9.0, [])
    two = answer(request(logprobs=2), *entries)["choices"][0]["logprobs"]["content"][0]
    assert [entry["token"] for entry in two["top_logprobs"]] == ["x", "y"]
    for count, names in ((0, "q"), (2, "xyq"), (20, "xyzq")):
        asked = request(Kind.COMPLETION, logprobs=count)
        assert "".join(answer(asked, *entries)["choices"][0]["logprobs"]["top_logprobs"][0]) == names


def test_two_tokens_with_one_text() -> None:
    best = [["q", -0.1, 1], ["x", -0.2, 2]]
    got = answer(request(Kind.COMPLETION, logprobs=2), end(1, "q", 0, row("q", 0, -9.0, best)))
    logprobs = got["choices"][0]["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-9.0], [{"q": -0.1, "x": -0.2}])


@pytest.mark.parametrize("kind", list(STREAMS))
def test_workers_of_an_older_version_send_no_rows(kind: Kind) -> None:
    entries = [OutEntry("1-0", accepted=2), delta(1, "a", 0), end(2, "b", 1)]
    empty = {
        Kind.CHAT: {"content": [], "refusal": None},
        Kind.COMPLETION: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []},
    }
    asked = request(kind, echo=kind is Kind.COMPLETION, prompt_logprobs=1)
    got = answer(asked, *entries)
    assert got["choices"][0]["logprobs"] == empty[kind]
    assert (got if kind is Kind.CHAT else got["choices"][0])["prompt_logprobs"] == []
    assert {chunk["logprobs"] for chunk in chunks(asked, *entries)} == {None}


@pytest.mark.parametrize("kind", list(STREAMS))
def test_who_did_not_ask_is_told_nothing(kind: Kind) -> None:
    """Though there are rows, as where a completion's `logprobs` are there for its neighbour's sake."""
    asked = request(kind, logprobs=None)
    prompt = stretch(0, 1, row("P", 0, None))
    entries = [delta(1, "a", 0, row("a", 0), prompt_logprobs=prompt), end(2, "", 1)]
    got = answer(asked, *entries)
    assert got["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in orjson.dumps(got).decode()
    assert {chunk["logprobs"] for chunk in chunks(asked, *entries)} == {None}


def test_an_echo_without_logprobs() -> None:
    asked = request(Kind.COMPLETION, logprobs=None, echo=True, choices=4, n=2)
    accepted = OutEntry("1-0", accepted=2, echo='[["One ",0],["Two ",0]]')
    entries = [delta(1, f"t{choice}", 0, choice=choice) for choice in (3, 0, 1, 2)]
    ends = [end(1, "", 2, choice=choice, end="done" if choice == 0 else "") for choice in (1, 2, 3, 0)]
    texts = ["One t0", "One t1", "Two t2", "Two t3"]
    assert [each["text"] for each in answer(asked, accepted, *entries, *ends)["choices"]] == texts
    streamed = chunks(asked, accepted, *entries, *ends)
    joined = ["".join(chunk["text"] for chunk in streamed if chunk["index"] == index) for index in range(4)]
    assert joined == texts
    assert streamed[0]["text"] == "Two "


def test_an_echo_of_which_nothing_is_generated() -> None:
    prompt = stretch(0, 6, row("<s>", 0, None), row("Say", 3, -3.0))
    asked = request(Kind.COMPLETION, echo=True)
    entries = [ACCEPTED, delta(0, "", 0, prompt_logprobs=prompt), end(0, "", 0, finish="length")]
    got = answer(asked, *entries)
    assert got["choices"][0]["text"] == "Say"
    assert got["choices"][0]["logprobs"]["token_logprobs"] == [None, -3.0]
    assert got["usage"]["completion_tokens"] == 0
    assert [(chunk["text"], chunk["finish_reason"]) for chunk in chunks(asked, *entries)] == [
        ("Say", None),
        ("", "length"),
    ]


def test_a_prompt_comes_in_stretches() -> None:
    asked = request(Kind.COMPLETION, echo=True)
    entries = [
        OutEntry("1-0", accepted=3, echo='[["abc",0]]'),
        delta(0, "", 0, prompt_logprobs=stretch(0, 2, row("a", 0, None), row("b", 1))),
        delta(0, "", 0, prompt_logprobs=stretch(0, 3, row("a", 0, None), row("b", 1), row("c", 2))),
        end(1, "d", 0, row("d", 0)),
    ]
    got = [(chunk["text"], chunk["logprobs"]["text_offset"]) for chunk in chunks(asked, *entries)]
    assert got == [("ab", [0, 1]), ("c", [2]), ("d", [3])]
    assert answer(asked, *entries)["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", list(STREAMS))
def test_logprobs_of_a_prompt_by_id(kind: Kind) -> None:
    best = [["x", -0.1, 1], ["y", -0.2, 2]]
    rows = [
        row("a", 0, None),
        row("y", 1, -0.2, best).replace('"id":9', '"id":2'),
        row([240], 2, -7.0, best),
    ]
    entries = [delta(1, "b", 0, prompt_logprobs=stretch(0, 3, *rows)), end(2, "", 1)]
    got = answer(request(kind, logprobs=None, prompt_logprobs=1), *entries)
    assert (got if kind is Kind.CHAT else got["choices"][0])["prompt_logprobs"] == [
        None,
        {
            "2": {"logprob": -0.2, "rank": 2, "decoded_token": "y"},
            "1": {"logprob": -0.1, "rank": 1, "decoded_token": "x"},
        },
        {
            "9": {"logprob": -7.0, "decoded_token": "\ufffd"},
            "1": {"logprob": -0.1, "rank": 1, "decoded_token": "x"},
        },
    ]
