"""What newer versions add is ignored, and what older ones do not write has a default (B10)."""

from __future__ import annotations

import pytest

from common.messages import (
    Kind,
    OutEntry,
    Request,
    TokRecord,
    Usage,
    format_record,
    parse_out,
    parse_records,
)
from common.sampling import SamplingParams

UID = "0-" + "0" * 32
RECORDS = [
    TokRecord(UID, 0, 3, 17),
    TokRecord(UID, 1, 4, 18, "length"),
    TokRecord(UID, 0, 5, None, "error", "internal", "a=b c"),
    TokRecord(UID, 0, 6, 9, "stop", logprobs="-0.5,9:-0.5,8:-9999"),
    TokRecord(UID, 0, 0, None, prompt="1;-11.55,28:-1.2;-0.34,4:-0.34"),
]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("more", ["{} later=x", "{} later=x other=1,2=3"])
def test_words_that_a_record_may_have_later(record: TokRecord, more: str) -> None:
    assert parse_records(more.format(format_record(record))) == [record]


@pytest.mark.parametrize("record", RECORDS[1:4])
def test_a_word_that_stands_before_the_end(record: TokRecord) -> None:
    words = format_record(record).split(" ")
    words.insert(4, "logprobs=-0.1,-2")
    assert parse_records(" ".join(words)) == [record]


def test_fields_of_an_entry() -> None:
    plain = [b"at", b"0 2 1", b"text", b"x"]
    assert parse_out(b"1-0", [*plain, b"later", b"y"]) == parse_out(b"1-0", plain)
    ended = parse_out(b"1-0", [b"usage", b"3 4", b"later", b"y", b"end", b"done"])
    assert ended == OutEntry("1-0", end="done", usage=Usage(3, 4, 0))


def test_fields_of_a_request() -> None:
    request = Request(UID, Kind.COMPLETION, "m", SamplingParams(seed=7), {"prompt": "x"}, tenant="t", api="a")
    fields = {name.encode(): str(value).encode() for name, value in request.to_fields().items()}
    assert Request.from_fields(UID, fields | {b"v": b"2", b"later": b"x"}) == request
    needed = {name: fields[name] for name in (b"kind", b"model", b"params", b"payload")}
    assert Request.from_fields(UID, needed) == Request(
        UID, Kind.COMPLETION, "m", SamplingParams(seed=7), {"prompt": "x"}
    )
