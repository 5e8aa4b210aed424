"""Logprobs of tokens as rows for the reply stream: each token by its name, its place in the text, its rivals.

A row is JSON: ``{"id":7042,"token":" Paris","logprob":-0.2612,"at":12,"top":[[" Paris",-0.2612,7042],...]}``.
A token's name is its text, or the list of its bytes if these are no text by themselves. ``at`` is the offset
of the character that holds its first byte, in code points; ``"hidden":true`` says that it adds nothing to the
text. ``logprob`` is null where there is none. What of this a client sees, and when, is the API's: a row comes
with its token, and so may come before its text, which may yet be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.messages import dumps
from workers.text.decoder import DecodingTable, IncrementalDecoder
from workers.text.place import Place

#: What stands for a logprob that JSON cannot hold, and for all that are less.
LEAST = -9999.0


class RowWriter:
    """Writes the rows of one model's tokens; ``shown`` is its table with special tokens shown."""

    def __init__(self, shown: DecodingTable) -> None:
        self._shown = shown

    def row(self, token: int, values: str, place: Place) -> dict[str, Any]:
        """The row of ``token``; ``values`` are in the form of `common.messages.TokRecord`, or empty."""
        own, *others = values.split(",")
        row: dict[str, Any] = {
            "id": token,
            "token": self._name(token),
            "logprob": _number(own) if own else None,
            "at": place.at,
            "top": [self._rival(other) for other in others],
        }
        if place.hidden:
            row["hidden"] = True
        return row

    def prompt(self, ids: Sequence[int], done: int = 0) -> PromptRows:
        """The rows of a prompt, of which the first ``done`` have been published."""
        return PromptRows(self, self._shown, ids, done)

    def _rival(self, text: str) -> tuple[str | list[int], float, int]:
        token, _, value = text.partition(":")
        return self._name(int(token)), _number(value), int(token)

    def _name(self, token: int) -> str | list[int]:
        if token >= len(self._shown.texts):
            return ""
        text = self._shown.texts[token]
        return list(self._shown.pieces[token]) if text is None else text


class PromptRows:
    """The rows of one choice's prompt, in order and each once, whatever comes again after a crash.

    A stretch of them is JSON: ``{"from":1,"end":24,"rows":[...]}``, with the position of the first, and the
    offset up to which their text is known. Special tokens count with their text.
    """

    def __init__(self, writer: RowWriter, shown: DecodingTable, ids: Sequence[int], done: int) -> None:
        self._writer = writer
        self._decoder = IncrementalDecoder(shown)
        self._ids = ids
        self._at = 0
        #: Rows published or about to be.
        self.done = 0
        for _ in range(min(done, len(ids))):
            self._next()

    def take(self, stretch: str) -> str:
        """What ``stretch`` (the form of `common.messages.TokRecord`, or empty) adds; "" if that is nothing.

        The first token has no logprob, and its row comes with whatever comes first. Should the engine leave
        a position out, its row is without one too, so that the others keep their places.
        """
        start, rows = self.done, []
        if not start and self._ids:
            rows.append(self._row(""))
        first, *values = stretch.split(";")
        for position, value in enumerate(values, int(first or 0)):
            while self.done < min(position, len(self._ids)):
                rows.append(self._row(""))
            if position == self.done < len(self._ids):
                rows.append(self._row(value))
        return dumps({"from": start, "end": self._at, "rows": rows}) if rows else ""

    def _row(self, values: str) -> dict[str, Any]:
        token = self._ids[self.done]
        place = Place(self._at + self._decoder.lead(token), hidden=False)
        self._next()
        return self._writer.row(token, values, place)

    def _next(self) -> None:
        self._at += len(self._decoder.push(self._ids[self.done]))
        self.done += 1


def _number(text: str) -> float:
    value = float(text)
    return value if value > LEAST else LEAST  # also when it is no number
