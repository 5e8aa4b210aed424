"""Choices in hand, and the rows that are sent of them."""

from __future__ import annotations

from dataclasses import dataclass

from common import errors
from common.bus.handoffs import EmitRow
from common.bus.streams import Entry
from common.messages import TokRecord, format_record
from workers.engine.types import Finish, Output, TokenLogprobs


@dataclass(slots=True)
class Job:
    """One choice in hand: where its entry is pending, and how long its token log is."""

    uid: str
    choice: int
    partition: int
    cls: str
    entry: Entry
    #: Length of the log once all that was sent is applied.
    log_size: int
    #: How many tokens it had when it was taken.
    tokens: int
    #: The engine has it.
    running: bool = False
    #: Redis refused a row of it: the log is gone, or another worker's. Nothing of it is sent any more.
    disowned: bool = False


def row_of(job: Job, output: Output) -> EmitRow:
    """The row of whatever an engine gave: a token, an end (an error has no token), logprobs."""
    record = TokRecord(job.uid, job.choice, output.index, output.token)
    if output.finish is Finish.CANCELLED:
        record.end, record.error, record.message = "error", "cancelled", errors.CancelledError().message
    elif output.finish is Finish.ERROR:
        record.end, record.error, record.message = "error", "internal", output.error
    elif output.finish is not None:
        record.end = str(output.finish)
    if output.logprobs is not None:
        record.logprobs = _words(output.logprobs)
    if output.prompt is not None:
        record.prompt = ";".join([str(output.prompt.start), *map(_words, output.prompt.tokens)])
    piece = "" if output.token is None else f"{output.token},"
    return EmitRow(job.uid, job.choice, format_record(record), piece, job.log_size)


def _words(token: TokenLogprobs) -> str:
    """A token's logprob and the likeliest ids with theirs, as `TokRecord` has them."""
    best = [f"{number}:{_decimal(value)}" for number, value in token.top]
    return ",".join([_decimal(token.logprob), *best])


def _decimal(value: float) -> str:
    """Six digits, which is what float32 is good for, and never an exponent."""
    return f"{value:.6g}" if value < -1e-4 else f"{value:z.7f}"


def error_row(job: Job, error: errors.MillstreamError) -> EmitRow:
    """The record of an end that no engine has seen."""
    record = TokRecord(job.uid, job.choice, job.tokens, None, "error", errors.kind_of(error), error.message)
    return EmitRow(job.uid, job.choice, format_record(record), "", job.log_size)
