"""One choice of a reply, from its tokens to the text a client sees: decoding, stop strings, the end.

Pure: the state after token i is a function of tokens 0..i, so that another process can rebuild it with
`ChoiceDecoder.replay`. Knows no Redis and no usage; logprobs are `workers.text.logprobs`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.errors import MillstreamError
from common.sampling import SamplingParams
from workers.text.codec import TokenCodec
from workers.text.decoder import DecodingTable, IncrementalDecoder
from workers.text.logprobs import RowWriter
from workers.text.place import Place
from workers.text.stops import StopMatcher, StopSet


class Delta(NamedTuple):
    """What one token brought. A named tuple: one is made per token, and frozen dataclasses cost thrice."""

    #: Text that became certain. Deltas joined are the text of the choice.
    text: str
    #: Offset of ``text`` in the text of the choice, in code points.
    at: int
    #: Tokens of the choice covered so far, up to the one that completed a stop string.
    n: int
    #: "stop" or "length", once, in the last delta.
    finish_reason: str | None = None
    #: The stop string or the stop token id (of the request, not the model's own end id) that ended it.
    stop_reason: str | int | None = None


class RequestDecoding:
    """What the choices of a request share: decoding table, stop automaton, stop token ids."""

    def __init__(self, codec: TokenCodec, params: SamplingParams, table: DecodingTable) -> None:
        self.table = table
        self.params = params
        self.stops = StopSet(params.stop) if params.stop else None
        self.stop_ids = frozenset(params.stop_token_ids)
        #: Control tokens whose text is a stop string: hidden from the text, they are matched by id.
        self.special_stops: dict[int, str] = {}
        if params.skip_special_tokens:
            spelled = {codec.special[stop].id: stop for stop in params.stop if stop in codec.special}
            self.special_stops = spelled


class TextStreams:
    """Makes the decoders of requests; keeps the two decoding tables of a model, which are large."""

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self._tables = {skip: DecodingTable(codec, skip_special_tokens=skip) for skip in (True, False)}
        self.rows = RowWriter(self._tables[False])

    def open(self, params: SamplingParams) -> RequestDecoding:
        """What the choices of one request share."""
        return RequestDecoding(self._codec, params, self._tables[params.skip_special_tokens])


class ChoiceDecoder:
    """The text of one choice. Tokens come in order; those after the end are ignored."""

    __slots__ = ("_decode", "_decoder", "_hides_end", "_last", "_matcher", "_shared", "at", "finished", "n")

    def __init__(self, shared: RequestDecoding, prompt_ids: Sequence[int] = ()) -> None:
        self._shared = shared
        self._decoder = IncrementalDecoder(shared.table, prompt_ids)
        self._decode = self._decoder.push
        #: The text of end ids and stop token ids is left out.
        self._hides_end = not shared.params.include_stop_str_in_output
        self._matcher: StopMatcher | None = None
        if shared.stops is not None:
            self._matcher = StopMatcher(shared.stops, include_stop=not self._hides_end)
        #: The last delta, when it is still to be given out after a replay that reached the end.
        self._last: Delta | None = None
        #: Code points released so far.
        self.at = 0
        #: Tokens covered so far.
        self.n = 0
        self.finished = False

    def place(self, token: int, finish: str | None = None) -> Place:
        """Where ``token`` will stand, which is about to be pushed with ``finish``.

        A special token that is a stop string is cut from the text or shown as one, but not hidden.
        """
        held = len(self._matcher.held) if self._matcher else 0
        at = self.at + held + self._decoder.lead(token)
        if finish == "stop" and self._hides_end:
            return Place(at, hidden=True)
        pieces, shared = self._shared.table.pieces, self._shared
        if token in shared.special_stops and self.n + 1 > shared.params.min_tokens:
            return Place(at, hidden=False)
        return Place(at, hidden=token >= len(pieces) or not pieces[token])

    def push(self, index: int, token: int, finish: str | None = None) -> Delta:
        """Take token number ``index``, with the engine's reason if it is the last one ("stop", "length").

        A token that was already taken changes nothing; a gap is an error.
        """
        if self.finished:
            return self._after_end()
        if index != self.n:
            if index > self.n:
                raise MillstreamError(f"token {index} of a choice came where {self.n} was due")
            return Delta("", self.at, self.n)
        self.n = index + 1
        if finish is None and self._matcher is None:  # the plain case, by far the most common
            text, at = self._decode(token), self.at
            self.at = at + len(text)
            return Delta(text, at, index + 1)
        text, stop = self._take(token, hidden=finish == "stop" and self._hides_end)
        reason: str | int | None = stop
        if stop is None and finish is not None:
            text += self._matcher.flush() if self._matcher else ""
            reason = token if finish == "stop" and token in self._shared.stop_ids else None
        self.finished = stop is not None or finish is not None
        at, self.at = self.at, self.at + len(text)
        return Delta(text, at, self.n, "stop" if stop is not None else finish, reason)

    def end(self, finish: str) -> Delta:
        """The choice ends without another token (its log was complete when it was taken over)."""
        if self.finished:
            return self._after_end()
        text = self._matcher.flush() if self._matcher else ""
        self.finished = True
        at, self.at = self.at, self.at + len(text)
        return Delta(text, at, self.n, finish)

    def replay(self, tokens: Iterable[int]) -> int:
        """Take tokens that were taken before, elsewhere; returns the code points they released.

        If one of them completes a stop string, the next token or `end` brings the last delta.
        """
        for token in tokens:
            self.n += 1
            text, stop = self._take(token, hidden=False)
            self.at += len(text)
            if stop is not None:
                self.finished = True
                self._last = Delta("", self.at, self.n, "stop", stop)
                break
        return self.at

    def _after_end(self) -> Delta:
        last, self._last = self._last, None
        return last or Delta("", self.at, self.n)

    def _take(self, token: int, *, hidden: bool) -> tuple[str, str | None]:
        """The text that one token releases, and the stop string it completes."""
        text = "" if hidden else self._decode(token)
        if self._matcher is None:
            return text, None
        shared = self._shared
        # As with end ids, min_tokens come before the token that completes a stop string.
        armed = self.n > shared.params.min_tokens
        released, stop = self._matcher.push(text, armed=armed)
        if stop is None and armed and not hidden and token in shared.special_stops:
            stop = shared.special_stops[token]
            released += self._matcher.flush()
            if shared.params.include_stop_str_in_output:
                released += stop
        return released, stop
