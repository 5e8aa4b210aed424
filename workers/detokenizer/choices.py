"""The decoders of one partition: each record becomes a delta, an end, or nothing.

A choice that is met in the middle (after a takeover, or a Redis that rolled back) is rebuilt from its token
log; what its decoder would have released by then is already published.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from common.bus import handoffs
from common.bus.client import Bus, FencedError, NoGroupError
from common.bus.handoffs import Finished, Text
from common.bus.keys import INTERACTIVE, Keys
from common.bus.scripts import Call
from common.errors import DeadlineError, UnavailableError
from common.logging import Log
from common.messages import OutEntry, TokRecord, dumps, parse_ids, parse_out
from common.sampling import SamplingParams
from workers.text.logprobs import PromptRows, RowWriter
from workers.text.stream import ChoiceDecoder, Delta, TextStreams

log = Log(__name__)

_BROKEN = "The answer could not be decoded."
#: Records of choices that are not wanted any more are remembered as such, up to this many choices.
_UNWANTED_LIMIT = 10_000
#: Entries of a reply stream looked at per call when searching a choice's last text.
_PAGE = 200
#: Tokens of the prompt that the decoder may look at (it may end inside a character).
_TAIL = 8
_LATE_MS = 60_000
#: What is read of a request, behind its end and the choice's.
_WANTED = ("params", "model", "class", "choices", "deadline")


class _State:
    """One choice being decoded."""

    __slots__ = ("choices", "cls", "deadline", "decoder", "floor", "model", "prompt_rows", "rows")

    def __init__(self, decoder: ChoiceDecoder, model: str, cls: str, choices: int, deadline: int) -> None:
        self.decoder = decoder
        self.model = model
        self.cls = cls
        self.choices = choices
        self.deadline = deadline
        #: Code points that are published for certain; less than the decoder released only after an upgrade.
        self.floor = 0
        #: What writes the rows of logprobs, if those were asked for.
        self.rows: RowWriter | None = None
        self.prompt_rows: PromptRows | None = None

    def end(self, record: TokRecord) -> Delta:
        """What a record without a token adds to the text; nothing if it is there for the prompt's rows."""
        decoder = self.decoder
        return decoder.end(record.end) if record.end else Delta("", decoder.at, decoder.n)

    def row_of(self, record: TokRecord, rows: RowWriter) -> str:
        """The row of the record's token, before the token is taken; "" for none.

        It goes out in the same commit as the token's record is done with, even if the text is held back. So a
        new owner, who has the tokens from their log but not their logprobs, never needs one that came before
        his first record.
        """
        if not record.logprobs or record.token is None or self.decoder.finished:
            return ""
        place = self.decoder.place(record.token, record.end or None)
        return dumps(rows.row(record.token, record.logprobs, place))

    def prompt_rows_of(self, record: TokRecord, rows: PromptRows) -> str:
        """The stretch of the prompt's rows that the record adds; "" for none."""
        return rows.take(record.prompt) if record.prompt or not rows.done else ""


class Choices:
    """Decoder states of the choices of one partition. For one thread."""

    def __init__(self, bus: Bus, keys: Keys, streams: TextStreams) -> None:
        self._bus = bus
        self._keys = keys
        self._streams = streams
        self._states: dict[tuple[str, int], _State] = {}
        self._unwanted: set[tuple[str, int]] = set()
        #: What was read of requests that begin, until it is asked for.
        self._rows: dict[tuple[str, int], Any] = {}
        #: Rows of prompts that are published, by request and choice; as found when one of it was begun.
        self._prompts: dict[str, dict[int, int]] = {}

    def clear(self) -> None:
        """Forget everything; it is rebuilt from Redis as records come."""
        self._states.clear()
        self._unwanted.clear()
        self._prompts.clear()

    def prune(self, now_ms: int) -> None:
        """Forget choices whose deadline is well past: their scheduler will not send an end any more.

        ``now_ms`` may be this machine's clock; a choice forgotten too early is rebuilt at its next record.
        """
        for key in [key for key, state in self._states.items() if state.deadline + _LATE_MS < now_ms]:
            del self._states[key]
        self._prompts.clear()
        if len(self._unwanted) > _UNWANTED_LIMIT:
            self._unwanted.clear()

    def prepare(self, records: Iterable[TokRecord]) -> None:
        """Reads what choices that begin in ``records`` need, in one exchange; what fails is read alone."""
        begin = dict.fromkeys(
            key
            for record in records
            if record.index == 0 and (key := (record.uid, record.choice)) not in self._states
        )
        rows = self._bus.run_many([self._look(*key) for key in begin]) if begin else []
        self._rows = dict(zip(begin, rows, strict=True))

    def push(self, record: TokRecord) -> Text | Finished | None:
        """What one record adds to its reply stream.

        A fault of one choice (its log or its hash is not what it should be) ends that request and holds up
        no other. Raises only what says nothing about the choice: Redis is away, or the partition is lost.
        """
        try:
            return self._push(record)
        except (UnavailableError, FencedError, NoGroupError):
            raise
        except Exception:
            log.exception("a choice cannot be decoded", uid=record.uid, choice=record.choice)
            return self._broken(record)

    def _broken(self, record: TokRecord) -> Finished | None:
        """The end of a request that cannot go on; one whose hash cannot be read is left to its deadline."""
        key = (record.uid, record.choice)
        state = self._states.pop(key, None)
        if not record.end:
            self._unwanted.add(key)
        if state is None:
            return None
        failure = TokRecord(record.uid, record.choice, record.index, None, "error", "internal", _BROKEN)
        return self._failed(failure, state)

    def _push(self, record: TokRecord) -> Text | Finished | None:
        key = (record.uid, record.choice)
        state = self._states.get(key)
        if state is None or state.decoder.n != record.index:
            if key in self._unwanted:
                if record.end:
                    self._unwanted.discard(key)
                return None
            state = self._load(record)
            if state is None:
                if not record.end:
                    self._unwanted.add(key)
                return None
            self._states[key] = state
        if record.error:
            del self._states[key]
            return self._failed(record, state)
        row = "" if state.rows is None else state.row_of(record, state.rows)
        prompt = "" if state.prompt_rows is None else state.prompt_rows_of(record, state.prompt_rows)
        if record.token is None:
            delta = state.end(record)
        else:
            delta = state.decoder.push(record.index, record.token, record.end or None)
        text, at = delta.text, delta.at
        if at < state.floor:  # an older decoder had released more: what is out stays, and is not repeated
            text, at = text[state.floor - at :], min(state.floor, at + len(text))
        if not delta.finish_reason:
            if not (text or row or prompt):
                return None
            return Text(record.uid, record.choice, delta.n, at, text, row, prompt)
        del self._states[key]
        if not record.end:  # a stop string: the engine goes on until it is told
            self._unwanted.add(key)
        stop = "" if delta.stop_reason is None else orjson.dumps(delta.stop_reason).decode()
        return Finished(
            record.uid,
            record.choice,
            state.choices,
            state.model,
            state.cls,
            n=delta.n,
            at=at,
            text=text,
            finish=delta.finish_reason,
            stop=stop,
            logprobs=row,
            prompt_logprobs=prompt,
            halt=not record.end,
        )

    def _failed(self, record: TokRecord, state: _State) -> Finished:
        kind, message = record.error, record.message
        if kind == "cancelled" and self._bus.do("HEXISTS", self._keys.req(record.uid), "expired"):
            kind, message = "deadline", DeadlineError().message
        return Finished(
            record.uid,
            record.choice,
            state.choices,
            state.model,
            state.cls,
            error=kind,
            message=message,
        )

    def _load(self, record: TokRecord) -> _State | None:
        """The state before ``record``; None when its reply has ended, or is gone."""
        row = self._rows.pop((record.uid, record.choice), None)
        if not isinstance(row, list):
            row = self._bus.run(self._look(record.uid, record.choice))
        prompt, terminal, finish, params, model, cls, choices, deadline = row
        if params is None or choices is None or terminal is not None or finish is not None:
            return None
        tail = parse_ids(b",".join(prompt.rsplit(b",", _TAIL)[-_TAIL:]))
        asked = SamplingParams.from_json(params)
        decoder = ChoiceDecoder(self._streams.open(asked), tail)
        named = (cls or INTERACTIVE.encode()).decode()
        state = _State(decoder, model.decode(), named, int(choices), int(deadline))
        if asked.logprobs is not None:
            state.rows = self._streams.rows
        if asked.prompt_logprobs is not None:
            done = self._prompt_published(record)
            state.prompt_rows = self._streams.rows.prompt(parse_ids(prompt), done)
        if record.index:
            tokens = parse_ids(self._bus.do("GET", self._keys.gen(record.uid, record.choice)) or b"")
            decoder.replay(tokens[: record.index])
            state.floor = self._published(record.uid, record.choice)
        return state

    def _look(self, uid: str, choice: int) -> Call[list[Any]]:
        return handoffs.look(self._keys, uid, choice, ("terminal", f"finish:{choice}", *_WANTED))

    def _published(self, uid: str, choice: int) -> int:
        """Code points of the choice's text that are in the reply stream."""
        newest = next((entry for entry in self._entries(uid) if entry.choice == choice), None)
        return 0 if newest is None else newest.at + len(newest.text)

    def _prompt_published(self, record: TokRecord) -> int:
        """Rows of the choice's prompt that are in the reply stream: all, once it has a token.

        A request may have a thousand choices, so they are counted together. Who begins a choice anew finds
        the count of before, and may publish some rows twice; whoever reads them cuts what he has.
        """
        if record.index:
            return sys.maxsize
        if record.uid not in self._prompts:
            counts: dict[int, int] = {}
            for entry in self._entries(record.uid):
                if entry.prompt_logprobs and entry.choice not in counts:
                    stretch = orjson.loads(entry.prompt_logprobs)
                    counts[entry.choice] = stretch["from"] + len(stretch["rows"])
            self._prompts[record.uid] = counts
        return self._prompts[record.uid].get(record.choice, 0)

    def _entries(self, uid: str) -> Iterator[OutEntry]:
        """The entries of a reply stream, newest first."""
        newest: Any = "+"
        while True:
            page = self._bus.do("XREVRANGE", self._keys.out(uid), newest, "-", "COUNT", _PAGE)
            yield from (parse_out(entry_id, fields) for entry_id, fields in page)
            if len(page) < _PAGE:
                return
            newest = b"(" + page[-1][0]
