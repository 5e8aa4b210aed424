"""Entries of a reply stream into what the client reads: events of a stream, or one collected answer. Pure.

Everything here follows from `Request.reply` and the entries, so that any process can shape any answer, again
if need be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import orjson

from api.errors import error_object
from api.reasoning import Thoughts
from api.sse import DONE, event
from common import errors
from common.errors import MillstreamError
from common.messages import Kind, OutEntry, Request, Usage

_ID_PREFIX = {Kind.CHAT: "chatcmpl-", Kind.COMPLETION: "cmpl-"}


class GapError(MillstreamError):
    """A part of the reply was lost."""


class Cursor:
    """How much of each choice's text has been passed on, in code points (B6).

    After a Redis that lost its last second, entries come again with an offset already covered.
    """

    __slots__ = ("_passed", "ended")

    def __init__(self) -> None:
        self._passed: dict[int, int] = {}
        #: Choices whose end has been passed on.
        self.ended: set[int] = set()

    def follows(self, entry: OutEntry) -> bool:
        """Whether the entry is the next text of a choice that has begun; then it counts as passed on."""
        choice = entry.choice
        if self._passed.get(choice, -1) != entry.at or choice in self.ended:
            return False
        self._passed[choice] = entry.at + len(entry.text)
        return True

    def begun(self, choice: int) -> bool:
        """Whether anything of the choice was passed on; marks it as begun."""
        if choice in self._passed:
            return True
        self._passed[choice] = 0
        return False

    def advance(self, entry: OutEntry) -> str:
        """What is new of an entry's text. Raises `GapError` rather than leaving something out."""
        passed = self._passed.get(entry.choice, 0)
        if entry.at == passed:
            text = entry.text
        elif entry.at < passed:
            text = entry.text[passed - entry.at :]
        else:
            raise GapError
        if text:
            self._passed[entry.choice] = passed + len(text)
        return "" if entry.choice in self.ended else text


def envelope(request: Request, kind: str) -> dict[str, Any]:
    """The members that every object of one answer shares."""
    shared = {
        "id": _ID_PREFIX[request.kind] + request.uid,
        "object": kind,
        "created": request.reply["created"],
        "model": request.reply["model"],
        "system_fingerprint": request.reply["fingerprint"],
    }
    if "tier" in request.reply:
        shared["service_tier"] = request.reply["tier"]
    return shared


def usage_object(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Token counts as OpenAI writes them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        # Every choice finds the prompt in the cache anew, but the prompt counts once.
        "prompt_tokens_details": {"cached_tokens": min(usage.cached_tokens, usage.prompt_tokens)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def error_of(entry: OutEntry) -> MillstreamError:
    """The error that a terminal entry carries."""
    return errors.from_kind(entry.error, entry.message, entry.param or None)


def stop_reason(entry: OutEntry) -> str | int | None:
    """What stopped a choice: the stop string, the token id, or None for an end id or the length."""
    reason: str | int | None = orjson.loads(entry.stop) if entry.stop else None
    return reason


class _Stream(ABC):
    """What the streams of both endpoints share. Subclasses write the events of one choice.

    An event is put together from bytes made once per stream; only the text is encoded anew.
    """

    kind: str

    def __init__(self, request: Request) -> None:
        self._shared = envelope(request, self.kind)
        self._with_usage: bool = request.reply["usage"]
        self._running_usage: bool = self._with_usage and request.reply["running_usage"]
        self._head = event(self._shared)[:-3] + b',"choices":[{"index":'
        self._tail = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"
        #: What stands before a choice's text in an event.
        self._before: dict[int, bytes] = {}
        self._cursor = Cursor()
        self._prompt_tokens = 0
        self._tokens: dict[int, int] = {}
        self.done = False

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return 0

    def push(self, entry: OutEntry) -> bytes:
        """The events of one entry, framed."""
        if not (entry.finish or entry.end or self._running_usage) and self._cursor.follows(entry):
            return self._text(entry.choice, entry.text) if entry.text else b""  # by far the most common
        events = self._choice(entry) if entry.choice >= 0 else b""
        if entry.end:
            self.done = True
            if entry.end == "error":
                return events + self.failure(error_of(entry))
            if self._with_usage and entry.usage is not None:
                usage = usage_object(entry.usage, self.reasoning_tokens)
                events += event(self._shared | {"choices": [], "usage": usage})
            return events + DONE
        if entry.accepted >= 0:
            self._prompt_tokens = entry.accepted
        return events

    def failure(self, error: MillstreamError) -> bytes:
        """An error event. [DONE] follows it, since clients take its absence for a broken connection."""
        self.done = True
        return event({"error": error_object(error)}) + DONE

    def _choice(self, entry: OutEntry) -> bytes:
        if self._running_usage:
            self._count(entry)
        begun = self._cursor.begun(entry.choice)
        text = self._cursor.advance(entry)
        if not entry.finish or entry.choice in self._cursor.ended:
            events = self._text(entry.choice, text) if text else b""
        else:
            self._cursor.ended.add(entry.choice)
            events = self._finish(entry, text)
        return events if begun else self._first(entry.choice) + events

    def _count(self, entry: OutEntry) -> None:
        self._tokens[entry.choice] = max(entry.n, self._tokens.get(entry.choice, 0))
        tokens = Usage(self._prompt_tokens, sum(self._tokens.values()), 0)
        usage = usage_object(tokens, self.reasoning_tokens)
        self._tail = b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _begin(self, choice: int, member: bytes) -> bytes:
        before = self._before[choice] = b"%b%d,%b" % (self._head, choice, member)
        return before

    @abstractmethod
    def _first(self, choice: int) -> bytes: ...

    @abstractmethod
    def _text(self, choice: int, text: str) -> bytes: ...

    @abstractmethod
    def _finish(self, entry: OutEntry, text: str) -> bytes: ...


class ChatStream(_Stream):
    """Events of a streamed chat completion: a role, texts, a finish per choice."""

    kind = "chat.completion.chunk"

    def _first(self, choice: int) -> bytes:
        return self._delta(choice, b'{"role":"assistant","content":""}')

    def _text(self, choice: int, text: str) -> bytes:
        before = self._before.get(choice) or self._begin(choice, b'"delta":{"content":')
        return b'%b%b},"logprobs":null,"finish_reason":null}%b' % (before, orjson.dumps(text), self._tail)

    def _finish(self, entry: OutEntry, text: str) -> bytes:
        events = self._text(entry.choice, text) if text else b""
        end = {"finish_reason": entry.finish, "stop_reason": stop_reason(entry)}
        return events + b'%b%d,"delta":{},"logprobs":null,%b%b' % (
            self._head,
            entry.choice,
            orjson.dumps(end)[1:],
            self._tail,
        )

    def _delta(self, choice: int, delta: bytes) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":null,"finish_reason":null}%b' % (
            self._head,
            choice,
            delta,
            self._tail,
        )


class CompletionStream(_Stream):
    """Events of a streamed text completion: texts, of which a choice's last carries its finish."""

    kind = "text_completion"

    def _first(self, choice: int) -> bytes:
        del choice  # nothing comes before the text
        return b""

    def _text(self, choice: int, text: str) -> bytes:
        before = self._before.get(choice) or self._begin(choice, b'"text":')
        return b'%b%b,"logprobs":null,"finish_reason":null}%b' % (before, orjson.dumps(text), self._tail)

    def _finish(self, entry: OutEntry, text: str) -> bytes:
        end = {"finish_reason": entry.finish, "stop_reason": stop_reason(entry)}
        return b'%b%d,"text":%b,"logprobs":null,%b%b' % (
            self._head,
            entry.choice,
            orjson.dumps(text),
            orjson.dumps(end)[1:],
            self._tail,
        )


class Answer:
    """The whole answer of a request that is not streamed, collected entry by entry."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._cursor = Cursor()
        self._texts: list[list[str]] = [[] for _ in range(request.choices)]
        self._thoughts = Thoughts(request.reply) if request.reply.get("reasoning") else None
        self._reasoning: list[list[str]] = [[] for _ in range(request.choices)]
        self._ends: dict[int, OutEntry] = {}
        self._usage = Usage(0, 0, 0)
        self.done = False

    def push(self, entry: OutEntry) -> None:
        """Takes one entry. Raises the error of one that carries an error."""
        if entry.choice >= 0:
            text = self._cursor.advance(entry)
            if self._thoughts is not None:
                thought, text = self._thoughts.take(entry, text)
                self._reasoning[entry.choice].append(thought)
            self._texts[entry.choice].append(text)
            if entry.finish:
                self._cursor.ended.add(entry.choice)
                self._ends.setdefault(entry.choice, entry)
        if entry.end == "error":
            raise error_of(entry)
        if entry.end:
            self.done = True
            self._usage = entry.usage or self._usage

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return 0 if self._thoughts is None else self._thoughts.tokens

    def body(self) -> bytes:
        """The response body; only complete once `done`."""
        chat = self._request.kind is Kind.CHAT
        shared = envelope(self._request, "chat.completion" if chat else "text_completion")
        fingerprint = {"system_fingerprint": shared.pop("system_fingerprint")}
        choices = [self._choice(choice, chat=chat) for choice in range(self._request.choices)]
        usage = usage_object(self._usage, self.reasoning_tokens)
        return orjson.dumps(shared | {"choices": choices, "usage": usage} | fingerprint)

    def _choice(self, choice: int, *, chat: bool) -> dict[str, Any]:
        text = "".join(self._texts[choice])
        end = self._ends.get(choice)
        content: Mapping[str, Any] = {"message": self._message(choice, text)} if chat else {"text": text}
        return {
            "index": choice,
            **content,
            "logprobs": None,
            "finish_reason": end.finish if end else None,
            "stop_reason": stop_reason(end) if end else None,
        }

    def _message(self, choice: int, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._thoughts is not None and not self._thoughts.hidden:
            message["reasoning_content"] = "".join(self._reasoning[choice]) or None
        return message
