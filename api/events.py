"""Entries of a reply into the events of a stream. Pure; `api.answer` collects them into one body instead.

Everything here follows from `Request.reply` and the entries, so that any process can shape any answer, again
if need be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

from api.echo import Echo
from api.errors import error_object
from api.logprobs import Row, Rows, chat_content, chat_logprobs, completion_logprobs
from api.sse import DONE, event
from common import errors
from common.errors import MillstreamError
from common.messages import Kind, OutEntry, Request, Usage

#: What stands for no logprobs.
NULL = b"null"
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

    def passed(self, choice: int) -> int:
        """Code points of the choice's text that have been passed on."""
        return self._passed.get(choice, 0)

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


def is_cut(entry: OutEntry) -> bool:
    """Whether a stop string ended the choice."""
    return isinstance(stop_reason(entry), str)


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
        #: How many of the likeliest tokens each logprob comes with; None for no logprobs.
        self._likeliest: int | None = request.reply.get("logprobs")
        self._rows: dict[int, Rows] = {}
        self._echo = Echo(request) if request.reply.get("echo") else None
        #: Texts are all there is to tell.
        self._plain = not self._running_usage and self._likeliest is None and self._echo is None
        self.done = False

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return 0

    def push(self, entry: OutEntry) -> bytes:
        """The events of one entry, framed."""
        if self._plain and not (entry.finish or entry.end) and self._cursor.follows(entry):
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
            if self._echo is not None:
                self._echo.learn(entry)
        return events

    def failure(self, error: MillstreamError) -> bytes:
        """An error event. [DONE] follows it, since clients take its absence for a broken connection."""
        self.done = True
        return event({"error": error_object(error)}) + DONE

    def _choice(self, entry: OutEntry) -> bytes:
        if self._running_usage:
            self._count(entry)
        choice = entry.choice
        events = b"" if self._cursor.begun(choice) else self._first(choice)
        if self._echo is not None and choice not in self._cursor.ended:
            events += self._echoed(entry, self._echo)
        text = self._cursor.advance(entry)
        logprobs = NULL if self._likeliest is None else self._logprobs(entry, self._likeliest)
        if entry.finish and choice not in self._cursor.ended:
            self._cursor.ended.add(choice)
            return events + self._finish(entry, text, logprobs)
        return events + (self._text(choice, text, logprobs) if text or logprobs != NULL else b"")

    def _logprobs(self, entry: OutEntry, likeliest: int) -> bytes:
        """The logprobs that go with what the entry has added to the text, as JSON."""
        choice = entry.choice
        if choice in self._cursor.ended:
            return NULL
        rows, at = self._rows_of(choice), self._cursor.passed(choice)
        rows.take(entry)
        released = rows.last(at, cut=is_cut(entry)) if entry.finish else rows.release(at)
        return self._shape(choice, released, likeliest) if released else NULL

    def _echoed(self, entry: OutEntry, echo: Echo) -> bytes:
        """Events of the prompt, all of which come before the first of its completion."""
        choice, events = entry.choice, b""
        if entry.prompt_logprobs and self._likeliest is not None:
            rows, end = self._rows_of(choice).prompt(entry.prompt_logprobs)
            if rows:
                shown = completion_logprobs(rows, self._likeliest, echo.offsets(choice, rows))
                events = self._text(choice, echo.pass_on(choice, end), orjson.dumps(shown))
        if entry.text or entry.logprobs or entry.finish:
            rest = echo.pass_on(choice)
            events += self._text(choice, rest) if rest else b""
        return events

    def _rows_of(self, choice: int) -> Rows:
        return self._rows.setdefault(choice, Rows())

    def _count(self, entry: OutEntry) -> None:
        self._tokens[entry.choice] = max(entry.n, self._tokens.get(entry.choice, 0))
        self._tell_usage()

    def _tell_usage(self) -> None:
        """From now on events have the usage as it is now, where each is to have one."""
        if not self._running_usage:
            return
        tokens = Usage(self._prompt_tokens, sum(self._tokens.values()), 0)
        usage = usage_object(tokens, self.reasoning_tokens)
        self._tail = b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _begin(self, choice: int, member: bytes) -> bytes:
        before = self._before[choice] = b"%b%d,%b" % (self._head, choice, member)
        return before

    @abstractmethod
    def _first(self, choice: int) -> bytes: ...

    @abstractmethod
    def _text(self, choice: int, text: str, logprobs: bytes = NULL) -> bytes: ...

    @abstractmethod
    def _finish(self, entry: OutEntry, text: str, logprobs: bytes) -> bytes: ...

    @abstractmethod
    def _shape(self, choice: int, rows: list[Row], likeliest: int) -> bytes: ...


class ChatStream(_Stream):
    """Events of a streamed chat completion: a role, texts, a finish per choice."""

    kind = "chat.completion.chunk"

    def _first(self, choice: int) -> bytes:
        return self._delta(choice, b'{"role":"assistant","content":""}')

    def _text(self, choice: int, text: str, logprobs: bytes = NULL) -> bytes:
        before = self._before.get(choice) or self._begin(choice, b'"delta":{"content":')
        return b'%b%b},"logprobs":%b,"finish_reason":null}%b' % (
            before,
            orjson.dumps(text),
            logprobs,
            self._tail,
        )

    def _finish(self, entry: OutEntry, text: str, logprobs: bytes) -> bytes:
        events = self._text(entry.choice, text, logprobs) if text or logprobs != NULL else b""
        end = {"finish_reason": entry.finish, "stop_reason": stop_reason(entry)}
        return events + b'%b%d,"delta":{},"logprobs":null,%b%b' % (
            self._head,
            entry.choice,
            orjson.dumps(end)[1:],
            self._tail,
        )

    def _shape(self, choice: int, rows: list[Row], likeliest: int) -> bytes:
        del choice
        content = chat_content(rows, likeliest)
        return orjson.dumps(chat_logprobs(content)) if content else NULL

    def _delta(self, choice: int, delta: bytes, logprobs: bytes = NULL) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":null}%b' % (
            self._head,
            choice,
            delta,
            logprobs,
            self._tail,
        )


class CompletionStream(_Stream):
    """Events of a streamed text completion: texts, of which a choice's last carries its finish."""

    kind = "text_completion"

    def _first(self, choice: int) -> bytes:
        del choice  # nothing comes before the text
        return b""

    def _text(self, choice: int, text: str, logprobs: bytes = NULL) -> bytes:
        before = self._before.get(choice) or self._begin(choice, b'"text":')
        return b'%b%b,"logprobs":%b,"finish_reason":null}%b' % (
            before,
            orjson.dumps(text),
            logprobs,
            self._tail,
        )

    def _finish(self, entry: OutEntry, text: str, logprobs: bytes) -> bytes:
        end = {"finish_reason": entry.finish, "stop_reason": stop_reason(entry)}
        return b'%b%d,"text":%b,"logprobs":%b,%b%b' % (
            self._head,
            entry.choice,
            orjson.dumps(text),
            logprobs,
            orjson.dumps(end)[1:],
            self._tail,
        )

    def _shape(self, choice: int, rows: list[Row], likeliest: int) -> bytes:
        before = len(self._echo.text(choice)) if self._echo is not None else 0
        return orjson.dumps(completion_logprobs(rows, likeliest, [before + row["at"] for row in rows]))
