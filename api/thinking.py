"""Events of a chat whose reasoning is told apart from its content. Pure, as `api.events` is."""

from __future__ import annotations

import orjson

from api.events import NULL, ChatStream
from api.reasoning import Thoughts
from common.messages import OutEntry, Request


class ThinkingStream(ChatStream):
    """A `ChatStream` with the reasoning in `delta.reasoning_content`."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._thoughts = Thoughts(request.reply)
        self._entry = OutEntry("")

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._thoughts.tokens

    def push(self, entry: OutEntry) -> bytes:
        """The events of one entry, framed; none of text that may yet turn out to be a part of a tag."""
        self._entry = entry
        return super().push(entry)

    def _text(self, choice: int, text: str, logprobs: bytes = NULL) -> bytes:
        return self._apart(choice, *self._take(self._entry, text), logprobs)

    def _finish(self, entry: OutEntry, text: str, logprobs: bytes) -> bytes:
        events = self._apart(entry.choice, *self._take(entry, text), logprobs)
        return events + super()._finish(entry, "", NULL)

    def _take(self, entry: OutEntry, text: str) -> tuple[str, str]:
        """Reasoning and content in what is new; events count its tokens from here on."""
        thought, said = self._thoughts.take(entry, text)
        self._tell_usage()
        return thought, said

    def _apart(self, choice: int, thought: str, said: str, logprobs: bytes) -> bytes:
        """The logprobs of all that came go with the first event of it."""
        events = b""
        if thought:
            delta = b'{"reasoning_content":%b}' % orjson.dumps(thought)
            events, logprobs = self._delta(choice, delta, logprobs), NULL
        return events + super()._text(choice, said, logprobs) if said or logprobs != NULL else events
