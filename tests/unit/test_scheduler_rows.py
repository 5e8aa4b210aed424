"""What an engine gives, as the text of a row: every number is a plain decimal that JSON can hold."""

from __future__ import annotations

import re

import pytest

from common.bus.streams import Entry
from common.messages import TokRecord, parse_records
from workers.engine.types import LOWEST, Finish, Output, PromptLogprobs, TokenLogprobs
from workers.scheduler.jobs import Job, row_of

JOB = Job("0-uid", 1, 0, "interactive", Entry("stream", "1-1", "0-uid", 1), 12, 3)


def parsed(output: Output) -> TokRecord:
    [record] = parse_records(row_of(JOB, output).record)
    return record


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-11.550312, "-11.5503"),
        (-0.26120001, "-0.2612"),
        (-123.456789, "-123.457"),
        (LOWEST, "-9999"),
        (-9998.96, "-9998.96"),
        (-1.1920929e-07, "-0.0000001"),
        (-4e-8, "0.0000000"),
        (-0.0, "0.0000000"),
        (-0.00012345678, "-0.000123457"),
        (-9.87654e-05, "-0.0000988"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    words = parsed(Output("k", 0, 5, logprobs=TokenLogprobs(value, ((7, value),)))).logprobs
    assert words == f"{text},7:{text}"
    assert float(text) == pytest.approx(value, rel=1e-5, abs=1e-7)


def test_no_number_has_an_exponent() -> None:
    values = [-(10.0**exponent) * digits for exponent in range(-45, 5) for digits in (1.0, 1.2345678, 9.9999)]
    for value in values:
        words = parsed(Output("k", 0, 5, logprobs=TokenLogprobs(max(value, LOWEST), ()))).logprobs
        assert re.fullmatch(r"-?\d+(\.\d+)?", words), words


def test_a_token_with_its_logprobs_is_one_piece_of_the_log() -> None:
    row = row_of(JOB, Output("k", 3, 9, logprobs=TokenLogprobs(-0.5, ((9, -0.5), (8, LOWEST)))))
    assert (row.record, row.piece, row.at) == ("0-uid 1 3 9 lp=-0.5,9:-0.5,8:-9999", "9,", 12)


def test_the_last_token_has_its_end_too() -> None:
    row = row_of(JOB, Output("k", 3, 9, Finish.STOP, logprobs=TokenLogprobs(-0.5, ())))
    assert (row.record, row.piece) == ("0-uid 1 3 9 stop lp=-0.5", "9,")


def test_logprobs_of_a_prompt_have_no_piece() -> None:
    prompt = PromptLogprobs(4, [TokenLogprobs(-1.5, ((2, -0.25),)), TokenLogprobs(-2.5, ((3, -0.75),))])
    row = row_of(JOB, Output("k", 0, None, prompt=prompt))
    assert (row.record, row.piece, row.at) == ("0-uid 1 0 - plp=4;-1.5,2:-0.25;-2.5,3:-0.75", "", 12)


@pytest.mark.parametrize(
    ("output", "record"),
    [
        (Output("k", 3, None, Finish.LENGTH), TokRecord("0-uid", 1, 3, None, "length")),
        (
            Output("k", 3, None, Finish.ERROR, "why = this"),
            TokRecord("0-uid", 1, 3, None, "error", "internal", "why = this"),
        ),
    ],
)
def test_ends_without_a_token(output: Output, record: TokRecord) -> None:
    assert parsed(output) == record
    assert row_of(JOB, output).piece == ""


def test_a_cancel_says_so() -> None:
    record = parsed(Output("k", 3, None, Finish.CANCELLED))
    assert (record.token, record.end, record.error) == (None, "error", "cancelled")
    assert record.message
