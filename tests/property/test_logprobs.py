"""Whatever is held, cut, crashes or comes again: every token's logprobs come once, and with its text.

From records of tokens to what a client reads, without Redis between: decoders are rebuilt from the tokens at
any record, as by a new owner of a partition, and entries come again, as from a Redis that lost its last
second.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from api.answer import Answer
from api.events import ChatStream, CompletionStream
from api.resume import Numbered, Position
from common.messages import Kind, OutEntry, Request, Usage
from common.sampling import SamplingParams
from tests.helpers.text import byte_codec
from workers.text.codec import TokenCodec
from workers.text.echo import write_echo
from workers.text.stream import ChoiceDecoder, TextStreams

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba b",
    b"\xf0\x9f",
    b"\x99\x82",
    b"\xc3",
    b"\xa9",
    b"\xff",
    "é🙂".encode(),
    b"\xe6\x97",
]
CODEC = byte_codec(PIECES, special=["<s>", "ab</s>"])
STREAMS = TextStreams(CODEC)
TOKEN = st.integers(0, CODEC.vocab_size)  # the last one has no token
UID = "0-" + "a" * 32
PROMPT_LEAST = 1000


def request(kind: Kind, **reply: Any) -> Request:
    shape = {"model": "m", "created": 7, "fingerprint": "f", "usage": False, "running_usage": False}
    return Request(UID, kind, "m", SamplingParams(), {}, {**shape, "logprobs": 1, **reply}, choices=1)


def logprob(index: int) -> str:
    return f"-{index + 1},3:-0.5"


class Generation:
    """One choice's tokens, and the entries that a detokenizer makes of them."""

    def __init__(self, data: st.DataObject) -> None:
        draw = data.draw
        self.ids: list[int] = draw(st.lists(TOKEN, min_size=1, max_size=14))
        self.prompt: list[int] = draw(st.lists(TOKEN, max_size=3))
        self.finish: str = draw(st.sampled_from(["length", "stop"]))
        stops = st.sampled_from(["ab", "b a", "aba", "é🙂a", "\ufffd", "<s>", "bb"])
        self.params = SamplingParams(
            stop=tuple(draw(st.lists(stops, max_size=2))),
            min_tokens=draw(st.sampled_from([0, 0, 3])),
            include_stop_str_in_output=draw(st.booleans()),
            skip_special_tokens=draw(st.booleans()),
        )
        self.shared = STREAMS.open(self.params)
        #: Records before which a new owner takes over.
        self.takeovers: set[int] = draw(st.sets(st.integers(0, 14), max_size=4))

    def entries(self, *, takeovers: bool) -> list[OutEntry]:
        decoder, entries = ChoiceDecoder(self.shared, self.prompt), [OutEntry("1-0", accepted=3)]
        for index, token in enumerate(self.ids):
            if takeovers and index in self.takeovers:
                decoder = ChoiceDecoder(self.shared, self.prompt)
                decoder.replay(self.ids[:index])
            finish = self.finish if index == len(self.ids) - 1 else None
            place = decoder.place(token, finish)
            row = orjson.dumps(STREAMS.rows.row(token, logprob(index), place)).decode()
            delta = decoder.push(index, token, finish)
            entry = OutEntry("1-1", 0, delta.n, delta.at, delta.text, logprobs=row)
            entries.append(entry)
            if delta.finish_reason:
                entry.finish, entry.end, entry.usage = delta.finish_reason, "done", Usage(3, delta.n, 0)
                entry.stop = orjson.dumps(delta.stop_reason).decode() if delta.stop_reason is not None else ""
                break
        return entries


def with_repeats(data: st.DataObject, entries: list[OutEntry]) -> list[OutEntry]:
    """The entries as somebody reads them from a Redis that falls back now and then."""
    read, at = [], 0
    backs = data.draw(st.lists(st.integers(0, 5), max_size=4))
    while at < len(entries):
        stop = data.draw(st.integers(at + 1, len(entries)))
        read += entries[at:stop]
        at = stop if not backs or stop == len(entries) else max(0, stop - backs.pop())
    for number, entry in enumerate(read):
        copy = OutEntry(**{name: getattr(entry, name) for name in OutEntry.__slots__})
        copy.id = f"{number + 1}-0"
        read[number] = copy
    return read


def answer_of(kind: Kind, entries: list[OutEntry], **reply: Any) -> Any:
    answer = Answer(request(kind, **reply))
    for entry in entries:
        answer.push(entry)
    return orjson.loads(answer.body())["choices"][0]


def events_of(kind: Kind, entries: list[OutEntry], **reply: Any) -> list[Any]:
    stream = {Kind.CHAT: ChatStream, Kind.COMPLETION: CompletionStream}[kind](request(kind, **reply))
    blocks = b"".join(map(stream.push, entries)).decode().split("\n\n")
    return [json.loads(block[6:])["choices"][0] for block in blocks if block and block != "data: [DONE]"]


def joined(events: list[Any]) -> dict[str, list[Any]]:
    """A completion's logprobs, from all events of its stream."""
    whole: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        for name, values in (event["logprobs"] or {}).items():
            whole[name] += values
    return whole


def characters_of(generation: Generation, codec: TokenCodec = CODEC) -> list[tuple[int, int] | None]:
    """By Python's own decoder: of each token its number and its first byte's character; None if not shown."""
    places: list[tuple[int, int] | None] = []
    data = b""
    last, params = len(generation.ids) - 1, generation.params
    for index, token in enumerate(generation.ids):
        hidden = token >= codec.vocab_size or (params.skip_special_tokens and codec.is_special(token))
        if hidden or (
            index == last and generation.finish == "stop" and not params.include_stop_str_in_output
        ):
            places.append(None)
            continue
        piece = codec.token_bytes(token)
        places.append((index, len((data + piece[:1]).decode("utf-8", "replace")) - 1))
        data += piece
    return places


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_each_row_comes_once_and_with_its_text(data: st.DataObject) -> None:
    generation = Generation(data)
    entries = generation.entries(takeovers=False)
    read = with_repeats(data, generation.entries(takeovers=True))

    chat, completion = answer_of(Kind.CHAT, entries), answer_of(Kind.COMPLETION, entries)
    assert answer_of(Kind.CHAT, read) == chat
    assert answer_of(Kind.COMPLETION, read) == completion

    events = events_of(Kind.CHAT, read)
    assert "".join(event["delta"].get("content", "") for event in events) == chat["message"]["content"]
    rows = [event["logprobs"]["content"] for event in events if event["logprobs"]]
    assert [entry for some in rows for entry in some] == chat["logprobs"]["content"]

    events = events_of(Kind.COMPLETION, read)
    assert "".join(event["text"] for event in events) == completion["text"]
    assert joined(events) == completion["logprobs"]
    places, before = characters_of(generation), 0
    for event in events[:-1]:
        after = before + len(event["text"])
        said = joined([event])
        for value, offset in zip(said["token_logprobs"], said["text_offset"], strict=True):
            assert before <= offset < after or (offset == after and places[int(-value) - 1] is None)
        before = after


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_rows_are_of_the_tokens_in_the_text(data: st.DataObject) -> None:
    generation = Generation(data)
    generation.prompt = []
    entries = generation.entries(takeovers=False)
    last = entries[-1]
    chat = answer_of(Kind.CHAT, entries)
    text, content = chat["message"]["content"], chat["logprobs"]["content"]
    places = characters_of(generation)[: last.n]
    cut = last.stop.startswith('"')
    expected = [place for place in places if place is not None and (place[1] < len(text) or not cut)]
    if not (cut and last.stop == '"<s>"'):  # matched by its id, and shown or cut with it
        assert [-entry["logprob"] - 1 for entry in content] == [index for index, _ in expected]
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    assert raw.decode("utf-8", "replace").startswith(text)
    if not cut and "\ufffd" not in raw.decode("utf-8", "replace"):
        assert raw == text.encode()

    completion = answer_of(Kind.COMPLETION, entries)["logprobs"]
    offsets = dict(zip(completion["token_logprobs"], completion["text_offset"], strict=True))
    assert all(offsets[-index - 1] == at for index, at in expected)
    if not cut:
        assert len(completion["tokens"]) == last.n, "a completion's end id has a row too"


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_stream_can_be_gone_on_with_anywhere(data: st.DataObject) -> None:
    entries = with_repeats(data, Generation(data).entries(takeovers=True))
    kind = data.draw(st.sampled_from([Kind.CHAT, Kind.COMPLETION]))
    make = {Kind.CHAT: ChatStream, Kind.COMPLETION: CompletionStream}[kind]
    whole = b"".join(map(Numbered(make(request(kind))).push, entries))
    blocks = whole.split(b"\n\n")[:-1]
    cut = data.draw(st.integers(0, len(blocks) - 2))
    seen = Position.parse(blocks[cut].split(b"\n")[0].removeprefix(b"id: ").decode())
    rest = b"".join(map(Numbered(make(request(kind)), seen).push, entries))
    assert rest.split(b"\n\n")[:-1] == blocks[cut + 1 :]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_prompt_is_echoed_once_with_all_its_rows(data: st.DataObject) -> None:
    ids = data.draw(st.lists(TOKEN, min_size=1, max_size=12))
    values = [f"-{PROMPT_LEAST + position},3:-0.5" for position in range(len(ids))]
    echo = write_echo(CODEC, [ids], [ids])
    [[text, _]] = json.loads(echo)
    entries, rows, done = [OutEntry("1-0", accepted=len(ids), echo=echo)], STREAMS.rows.prompt(ids), 0
    for _ in range(data.draw(st.integers(1, 3))):  # owners of the choice, each of whom begins anew
        position = 1
        while position < len(ids):
            stop = data.draw(st.integers(position + 1, len(ids)))
            if data.draw(st.integers(0, 3)) == 0:
                rows = STREAMS.rows.prompt(ids, done)
            if stretch := rows.take(";".join([str(position), *values[position:stop]])):
                entries.append(OutEntry("1-1", 0, 0, 0, "", prompt_logprobs=stretch))
                done = json.loads(stretch)["from"] + len(json.loads(stretch)["rows"])
            position = stop
            if data.draw(st.integers(0, 9)) == 0:
                break
    everything = ";".join(["1", *values[1:]])
    end = OutEntry("1-2", 0, 0, 0, "", "length", end="done", usage=Usage(len(ids), 0, 0))
    end.prompt_logprobs = rows.take(everything)
    read = with_repeats(data, [*entries, end])

    asked = {"echo": True, "prompt_logprobs": 1}
    completion = answer_of(Kind.COMPLETION, read, **asked)
    assert completion["text"] == text
    assert completion["logprobs"]["token_logprobs"] == [
        None,
        *(-PROMPT_LEAST - at for at in range(1, len(ids))),
    ]
    assert len(completion["prompt_logprobs"]) == len(ids)
    offsets = completion["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)

    events = events_of(Kind.COMPLETION, read, **asked)
    assert joined(events) == completion["logprobs"]
    assert "".join(event["text"] for event in events) == text
