"""Choices in hand, and the rows by which they end."""

from __future__ import annotations

from dataclasses import dataclass

from common import errors
from common.bus.handoffs import EmitRow
from common.bus.streams import Entry
from common.messages import TokRecord, format_record
from workers.engine.types import Finish, Output


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


def end_row(job: Job, output: Output) -> EmitRow:
    """The record of an engine's end: a token with stop or length, or an error without one."""
    if output.finish is Finish.CANCELLED:
        end, kind, message = "error", "cancelled", errors.CancelledError().message
    elif output.finish is Finish.ERROR:
        end, kind, message = "error", "internal", output.error
    else:
        end, kind, message = str(output.finish), "", ""
    record = TokRecord(job.uid, job.choice, output.index, output.token, end, kind, message)
    piece = "" if output.token is None else f"{output.token},"
    return EmitRow(job.uid, job.choice, format_record(record), piece, job.log_size)


def error_row(job: Job, error: errors.MillstreamError) -> EmitRow:
    """The record of an end that no engine has seen."""
    record = TokRecord(job.uid, job.choice, job.tokens, None, "error", errors.kind_of(error), error.message)
    return EmitRow(job.uid, job.choice, format_record(record), "", job.log_size)
