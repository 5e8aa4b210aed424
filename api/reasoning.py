"""What a model thought, apart from what it says: `<think>...</think>` in the text of a choice. Pure.

It works on the text from its start, so any process takes the same text apart in the same way, however it was
cut into entries. Nothing but the tags (and white space before the first) is left out: reasoning and content
together are the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.messages import OutEntry

#: The parsers there are, by vLLM's names, and whether the text begins as reasoning: some chat templates end
#: in the opening tag.
PARSERS = {"deepseek_r1": True, "qwen3": False}
OPEN, CLOSE = "<think>", "</think>"
#: The one whose text always begins as reasoning.
BEGUN = "deepseek_r1"
#: White space that may come before the opening tag.
_MARGIN = 64


class Splitter:
    """Takes the text of one choice apart as it comes.

    ``begins_thinking``: the text is reasoning up to the closing tag, whether or not it has the opening one.
    Otherwise it is reasoning only from an opening tag that it begins with.
    """

    __slots__ = ("_begins_thinking", "_held", "_started", "begun", "ended")

    def __init__(self, *, begins_thinking: bool) -> None:
        self._begins_thinking = begins_thinking
        #: What may be the beginning of a tag.
        self._held = ""
        #: Whether it is known how the text begins.
        self._started = False
        #: Whether there is reasoning in it.
        self.begun = begins_thinking
        #: Whether all further text is content.
        self.ended = False

    def push(self, text: str) -> tuple[str, str]:
        """What ``text`` adds to the reasoning and to the content."""
        if self.ended:
            return "", text
        self._held += text
        if not self._started and not self._start():
            return "", ""
        if self.ended:
            return "", self._take(len(self._held))
        at = self._held.find(CLOSE)
        if at < 0:
            return self._take(len(self._held) - _overlap(self._held)), ""
        self.ended = True
        return self._take(at), self._take(len(self._held))[len(CLOSE) :]

    def flush(self) -> tuple[str, str]:
        """What was held back, now that nothing follows: it was no tag."""
        rest = self._take(len(self._held))
        return (rest, "") if self.begun and not self.ended else ("", rest)

    def _start(self) -> bool:
        """Looks for the opening tag; whether it is known now if there is one."""
        begun = self._held.lstrip()
        near = len(self._held) - len(begun) <= _MARGIN
        if near and begun.startswith(OPEN):
            self._held = begun[len(OPEN) :]
            self.begun = True
        elif near and OPEN.startswith(begun):
            return False
        elif not self._begins_thinking:
            self.ended = True
        self._started = True
        return True

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def _overlap(text: str) -> int:
    """Length of the longest end of ``text`` that the closing tag begins with."""
    at = text.rfind("<", -len(CLOSE) + 1)
    return len(text) - at if at >= 0 and CLOSE.startswith(text[at:]) else 0


def is_open(text: str) -> bool:
    """Whether what goes on after ``text`` is reasoning, as ``text`` ends within some."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


class Thoughts:
    """The reasoning in one reply, of all its choices. ``reply`` is `Request.reply`."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        self._begins_thinking = PARSERS[reply["reasoning"]]
        #: Whether the client wants to see none of it.
        self.hidden = bool(reply.get("hide_reasoning"))
        self._splitters: dict[int, Splitter] = {}
        self._tokens: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        """Tokens of reasoning so far: of each choice, all up to the one that closed it."""
        return sum(self._tokens.values())

    def take(self, entry: OutEntry, text: str) -> tuple[str, str]:
        """Reasoning and content in ``text``, which is what is new of the text of ``entry``."""
        splitter = self._splitters.get(entry.choice)
        if splitter is None:
            splitter = self._splitters[entry.choice] = Splitter(begins_thinking=self._begins_thinking)
        if splitter.ended:
            return "", text
        thought, said = splitter.push(text)
        if entry.finish:
            more = splitter.flush()
            thought, said = thought + more[0], said + more[1]
        if splitter.begun:
            self._tokens[entry.choice] = max(entry.n, self._tokens.get(entry.choice, 0))
        return "" if self.hidden else thought, said
