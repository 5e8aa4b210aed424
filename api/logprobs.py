"""Rows of logprobs (`workers.text.logprobs` writes them) into the shapes of both endpoints. Pure.

A row comes as soon as its token, its text perhaps later: here it waits for that, so that it travels with it
and vanishes with what a stop string cuts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from common.messages import OutEntry

#: See `workers.text.logprobs`.
Row = dict[str, Any]
Name = str | list[int]


class Rows:
    """The rows of one choice, each once, whatever comes again after Redis lost its last second (B6)."""

    __slots__ = ("_covered", "_prompt", "_waiting")

    def __init__(self) -> None:
        self._covered = 0
        self._prompt = 0
        #: As they came: parsed they take five times as much.
        self._waiting: deque[str] = deque()

    def take(self, entry: OutEntry) -> None:
        """Takes the row of an entry's token, if it has one."""
        if entry.logprobs and entry.n > self._covered:
            self._covered = entry.n
            self._waiting.append(entry.logprobs)

    def release(self, at: int) -> list[Row]:
        """The rows whose tokens are in the text, of which ``at`` code points are out by now."""
        released: list[Row] = []
        while self._waiting:
            row: Row = orjson.loads(self._waiting[0])
            if not _is_within(row, at):
                break
            self._waiting.popleft()
            released.append(row)
        return released

    def last(self, at: int, *, cut: bool) -> list[Row]:
        """The rows that are left when the text has ended after ``at`` code points; ``cut``: by a stop string.

        A stop string cuts tokens from the text, and so their rows; an incomplete character at the end is cut
        as well, but its tokens are the model's answer and stay.
        """
        rows: list[Row] = [orjson.loads(row) for row in self._waiting]
        return [row for row in rows if not cut or _is_within(row, at)]

    def prompt(self, stretch: str) -> tuple[list[Row], int]:
        """What is new of a stretch of the prompt's rows, and the offset up to which its text is known."""
        parsed = orjson.loads(stretch)
        rows: list[Row] = parsed["rows"][max(0, self._prompt - parsed["from"]) :]
        self._prompt = max(self._prompt, parsed["from"] + len(parsed["rows"]))
        return rows, parsed["end"]


def _is_within(row: Row, at: int) -> bool:
    """Whether a byte of the token is in a text of ``at`` code points, or for a hidden one, its place."""
    return bool(row["at"] < at or (row["at"] == at and row.get("hidden")))


def chat_content(rows: Iterable[Row], count: int) -> list[dict[str, Any]]:
    """Rows as a chat's `logprobs.content`; hidden tokens are no content."""
    return [
        _named(row["token"], row["logprob"])
        | {"top_logprobs": [_named(name, value) for name, value, _ in row["top"][:count]]}
        for row in rows
        if not row.get("hidden")
    ]


def chat_logprobs(content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A chat's `logprobs`."""
    return {"content": content, "refusal": None}


def completion_logprobs(rows: Sequence[Row], count: int, offsets: Iterable[int]) -> dict[str, Any]:
    """Rows as a completion's `logprobs`; ``offsets`` are of their tokens in the text that is shown."""
    return {
        "tokens": [_key(row["token"]) for row in rows],
        "token_logprobs": [row["logprob"] for row in rows],
        "top_logprobs": [_rivals(row, count) for row in rows],
        "text_offset": list(offsets),
    }


def prompt_logprobs(rows: Iterable[Row], count: int) -> list[dict[str, Any] | None]:
    """Rows as vLLM's `prompt_logprobs`. The rank of a token that is not among the likeliest is not known."""
    return [_by_id(row, count) if row["logprob"] is not None else None for row in rows]


def _by_id(row: Row, count: int) -> dict[str, Any]:
    known = {
        str(token): {"logprob": value, "rank": rank, "decoded_token": _text(name)}
        for rank, (name, value, token) in enumerate(row["top"], 1)
    }
    own = str(row["id"])
    chosen = known.get(own, {"logprob": row["logprob"], "decoded_token": _text(row["token"])})
    return {own: chosen} | {token: known[token] for token in list(known)[:count]}


def _rivals(row: Row, count: int) -> dict[str, float] | None:
    """The likeliest tokens by name, and the token itself; None where there are none."""
    if row["logprob"] is None:
        return None
    rivals: dict[str, float] = {}
    for name, value, _ in row["top"][:count]:
        rivals.setdefault(_key(name), value)  # of two tokens with one text the likelier
    rivals.setdefault(_key(row["token"]), row["logprob"])
    return rivals


def _named(name: Name, logprob: float) -> dict[str, Any]:
    return {
        "token": _text(name),
        "logprob": logprob,
        "bytes": list(name.encode()) if isinstance(name, str) else name,
    }


def _text(name: Name) -> str:
    return name if isinstance(name, str) else bytes(name).decode("utf-8", "replace")


def _key(name: Name) -> str:
    """A token as OpenAI names it in completions: what is no text by itself by its bytes."""
    return name if isinstance(name, str) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)
