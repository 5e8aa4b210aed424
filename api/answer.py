"""The whole answer of a request that is not streamed, collected from the entries of its reply. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from api.echo import Echo
from api.events import Cursor, envelope, error_of, is_cut, stop_reason, usage_object
from api.logprobs import Row, Rows, chat_content, chat_logprobs, completion_logprobs, prompt_logprobs
from api.reasoning import Thoughts
from common.messages import Kind, OutEntry, Request, Usage

#: Characters of rows of logprobs that make an answer a large one: some 10 ms of work.
_MUCH = 1 << 16


class _Choice:
    """What has come of one choice."""

    __slots__ = ("end", "prompt", "rows", "texts", "thoughts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        #: Its reasoning, if that is told apart.
        self.thoughts: list[str] = []
        self.end: OutEntry | None = None
        self.rows = Rows()
        #: Stretches of the prompt's rows, as they came: parsed they take five times as much.
        self.prompt: list[str] = []

    def kept(self, length: int) -> list[Row]:
        """The rows of the text, which has ``length`` code points."""
        return self.rows.last(length, cut=self.end is not None and is_cut(self.end))

    def prompt_rows(self) -> list[Row]:
        """The rows of the prompt."""
        once = Rows()
        return [row for stretch in self.prompt for row in once.prompt(stretch)[0]]


class Answer:
    """Takes the entries of a reply until it is `done`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._cursor = Cursor()
        self._choices = [_Choice() for _ in range(request.choices)]
        self._likeliest: int | None = request.reply.get("logprobs")
        self._likeliest_in_prompt: int | None = request.reply.get("prompt_logprobs")
        self._echo = Echo(request) if request.reply.get("echo") else None
        self._thoughts = Thoughts(request.reply) if request.reply.get("reasoning") else None
        self._usage = Usage(0, 0, 0)
        self._rows_size = 0
        self.done = False

    @property
    def large(self) -> bool:
        """Whether `body` takes so long that it should hold up nobody: not for the thread of an event loop."""
        return self._rows_size > _MUCH

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return 0 if self._thoughts is None else self._thoughts.tokens

    def push(self, entry: OutEntry) -> None:
        """Takes one entry. Raises the error of one that carries an error."""
        if entry.choice >= 0:
            self._take(self._choices[entry.choice], entry)
        elif self._echo is not None:
            self._echo.learn(entry)
        if entry.end == "error":
            raise error_of(entry)
        if entry.end:
            self.done = True
            self._usage = entry.usage or self._usage

    def body(self) -> bytes:
        """The response body; only complete once `done`."""
        chat = self._request.kind is Kind.CHAT
        shared = envelope(self._request, "chat.completion" if chat else "text_completion")
        fingerprint = {"system_fingerprint": shared.pop("system_fingerprint")}
        make = self._chat if chat else self._completion
        choices = [make(index, choice) for index, choice in enumerate(self._choices)]
        usage = usage_object(self._usage, self.reasoning_tokens)
        body = shared | {"choices": choices, "usage": usage} | fingerprint
        if chat:
            body |= self._prompt_logprobs(self._choices[0])
        return orjson.dumps(body)

    def _take(self, choice: _Choice, entry: OutEntry) -> None:
        if entry.choice not in self._cursor.ended:
            self._rows_size += len(entry.logprobs) + len(entry.prompt_logprobs)
            choice.rows.take(entry)
            if entry.prompt_logprobs:
                choice.prompt.append(entry.prompt_logprobs)
        text = self._cursor.advance(entry)
        if self._thoughts is not None:
            thought, text = self._thoughts.take(entry, text)
            choice.thoughts.append(thought)
        choice.texts.append(text)
        if entry.finish:
            self._cursor.ended.add(entry.choice)
            choice.end = choice.end or entry

    def _chat(self, index: int, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        if self._thoughts is not None and not self._thoughts.hidden:
            message["reasoning_content"] = "".join(choice.thoughts) or None
        logprobs = None
        if self._likeliest is not None:
            rows = choice.kept(self._cursor.passed(index))
            logprobs = chat_logprobs(chat_content(rows, self._likeliest))
        return {"index": index, "message": message, "logprobs": logprobs} | _end(choice)

    def _completion(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, prompt = "".join(choice.texts), self._echo.text(index) if self._echo is not None else ""
        logprobs = None
        if self._likeliest is not None:
            rows = choice.kept(len(text))
            offsets = [len(prompt) + row["at"] for row in rows]
            if self._echo is not None:
                before = choice.prompt_rows()
                rows, offsets = before + rows, self._echo.offsets(index, before) + offsets
            logprobs = completion_logprobs(rows, self._likeliest, offsets)
        shown = {"index": index, "text": prompt + text, "logprobs": logprobs}
        return shown | _end(choice) | self._prompt_logprobs(choice)

    def _prompt_logprobs(self, choice: _Choice) -> dict[str, Any]:
        """The member of that name, where it was asked for."""
        count = self._likeliest_in_prompt
        return {} if count is None else {"prompt_logprobs": prompt_logprobs(choice.prompt_rows(), count)}


def _end(choice: _Choice) -> dict[str, Any]:
    return {
        "finish_reason": choice.end.finish if choice.end else None,
        "stop_reason": stop_reason(choice.end) if choice.end else None,
    }
