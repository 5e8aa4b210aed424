"""Prompts that come back before their completions. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from api.logprobs import Row
from common.messages import OutEntry, Request


class Echo:
    """The prompts of one reply (`workers.text.echo` writes them), and how much of them was passed on."""

    def __init__(self, request: Request) -> None:
        self._samples = request.n
        #: Of each prompt: its text, and by how much offsets in rows of logprobs are too large.
        self._prompts: list[tuple[str, int]] = []
        self._passed: dict[int, int] = {}

    def learn(self, entry: OutEntry) -> None:
        """Takes the prompts that come with the accepted entry."""
        if entry.echo:
            self._prompts = orjson.loads(entry.echo)

    def text(self, choice: int) -> str:
        """The prompt of a choice; empty if nobody sent it, as a tokenizer of an older version."""
        return self._prompt(choice)[0]

    def offsets(self, choice: int, rows: Iterable[Row]) -> list[int]:
        """Where the tokens of rows of the prompt stand in it; one that is not shown stands at its start."""
        shift = self._prompt(choice)[1]
        return [max(0, row["at"] - shift) for row in rows]

    def pass_on(self, choice: int, end: int | None = None) -> str:
        """What has not been passed on yet, up to an offset as rows have it, or to the prompt's end."""
        text, shift = self._prompt(choice)
        start = self._passed.get(choice, 0)
        stop = len(text) if end is None else max(start, end - shift)
        self._passed[choice] = stop
        return text[start:stop]

    def _prompt(self, choice: int) -> tuple[str, int]:
        index = choice // self._samples
        return self._prompts[index] if index < len(self._prompts) else ("", 0)
