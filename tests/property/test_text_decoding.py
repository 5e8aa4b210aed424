"""Whatever bytes tokens hold, however they are cut: deltas joined are the text, nothing is held too long."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import SamplingParams
from tests.helpers.text import byte_codec
from workers.text.decoder import DecodingTable, IncrementalDecoder
from workers.text.stream import ChoiceDecoder, TextStreams
from workers.text.utf8 import decode_known, incomplete_tail

#: Every way a character can be begun and not ended, from Unicode's own encoder.
BEGUN = {
    chr(code).encode()[:length]
    for code in range(0x80, 0x110000, 64)
    if not 0xD800 <= code < 0xE000
    for length in range(1, len(chr(code).encode()))
}
#: Bytes in which characters, cut characters and rubbish are all common.
RAW = st.lists(
    st.one_of(
        st.binary(max_size=3),
        st.text(max_size=3).map(str.encode),
        st.sampled_from(["🙂", "日", "é", "\U0010ffff", "\ufffd"]).map(str.encode),
        st.sampled_from(sorted(BEGUN)),
        st.sampled_from([b"\xed\xa0", b"\xf4\x90", b"\xf0\x80", b"\xc0", b"\xff", b"\xe0\x80"]),
    ),
    max_size=12,
).map(b"".join)


def tail_of(data: bytes) -> bytes:
    """The incomplete character at the end, by the definition: what more bytes could complete."""
    return next((data[-n:] for n in (3, 2, 1) if len(data) >= n and data[-n:] in BEGUN), b"")


def text_of(data: bytes) -> str:
    """The whole text, by Python's decoder on what is left without the incomplete end."""
    return data[: len(data) - len(tail_of(data))].decode("utf-8", "replace")


@given(RAW)
def test_known_text_and_tail(data: bytes) -> None:
    assert decode_known(data) == (text_of(data), tail_of(data))


@given(RAW, st.data())
def test_any_cut_gives_the_same_text(data: bytes, cuts: st.DataObject) -> None:
    at = sorted(cuts.draw(st.sets(st.integers(0, len(data)))))
    text, held = "", b""
    for start, end in zip([0, *at], [*at, len(data)], strict=True):
        more, held = decode_known(held + data[start:end])
        text += more
        assert (text, held) == (text_of(data[:end]), tail_of(data[:end]))  # nothing known is kept back


@given(RAW, RAW)
def test_the_tail_does_not_depend_on_where_the_view_starts(before: bytes, data: bytes) -> None:
    assert incomplete_tail(data) == tail_of(data)
    if len(data) >= 3:
        assert incomplete_tail(before + data) == incomplete_tail(data)


PIECES = st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=8, unique=True)


@given(PIECES, st.data())
@settings(max_examples=60)
def test_stream_of_tokens(pieces: list[bytes], data: st.DataObject) -> None:
    codec = byte_codec(pieces, special=["<s>", "é</s>"])
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 1), max_size=30))
    skip = data.draw(st.booleans())
    table = DecodingTable(codec, skip_special_tokens=skip)
    push = IncrementalDecoder(table).push
    parts = [push(token) for token in ids]
    shown = b"".join(
        codec.token_bytes(token)
        for token in ids
        if token < codec.vocab_size and not (skip and codec.is_special(token))
    )
    assert "".join(parts) == text_of(shown) == codec.decode(ids, skip_special_tokens=skip)


@given(PIECES, st.data())
@settings(max_examples=60)
def test_replay_is_a_function_of_the_tokens(pieces: list[bytes], data: st.DataObject) -> None:
    codec = byte_codec(pieces, special=["<s>"])
    token = st.integers(0, codec.vocab_size - 1)
    prompt, ids = data.draw(st.lists(token, max_size=5)), data.draw(st.lists(token, max_size=25))
    stops = data.draw(st.lists(st.text("ab\ufffd", min_size=1, max_size=3), max_size=3))
    params = SamplingParams(stop=tuple(stops), min_tokens=data.draw(st.integers(0, 4)))
    shared = TextStreams(codec).open(params)

    whole = ChoiceDecoder(shared, prompt)
    deltas = [whole.push(index, each) for index, each in enumerate(ids)]
    cut = data.draw(st.integers(0, len(ids)))
    rebuilt = ChoiceDecoder(shared, prompt)
    assert rebuilt.replay(ids[:cut]) == sum(len(delta.text) for delta in deltas[:cut])
    if not any(delta.finish_reason for delta in deltas[:cut]):
        assert [rebuilt.push(index, ids[index]) for index in range(cut, len(ids))] == deltas[cut:]
    else:  # the end fell into what was replayed: it is said once more, for whoever had not published it
        ended = next(delta for delta in deltas if delta.finish_reason)
        again = rebuilt.end("length")
        assert (again.finish_reason, again.stop_reason, again.n) == ("stop", ended.stop_reason, ended.n)
        assert again.text == rebuilt.end("length").text == ""
