"""Turns the tokens of one generation into text, token by token, at constant cost each.

Knows bytes only: what ends a generation and what is cut from it is `stream`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.text.codec import TokenCodec
from workers.text.utf8 import MAX_CHAR, decode_known, goes_on, incomplete_tail


class DecodingTable:
    """What each token adds to a text, for one setting of ``skip_special_tokens``; shared by all decoders."""

    def __init__(self, codec: TokenCodec, *, skip_special_tokens: bool) -> None:
        #: Bytes of every token, hidden ones too: what a prompt is read with.
        self.prompt_pieces = codec.vocabulary.pieces
        self.pieces = codec.pieces(skip_special_tokens=skip_special_tokens)
        #: The text of tokens that are whole characters, the case that needs no work; None for others.
        self.texts = [_whole_text(piece) for piece in self.pieces]


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _last_bytes(pieces: Sequence[bytes | None], ids: Sequence[int]) -> bytes:
    """The end of a text in bytes, at least a character of it if it is that long."""
    tail = b""
    for token in reversed(ids):
        piece = pieces[token] if 0 <= token < len(pieces) else None
        if piece is None or len(tail) >= MAX_CHAR:
            break
        tail = piece + tail
    return tail


class IncrementalDecoder:
    """Decodes one sequence of tokens.

    A character split over tokens is held until it is complete; bytes known to be invalid come out as U+FFFD
    at once. What is still held when the generation ends is an incomplete character and is dropped: a client
    sees the same text whether it streams or not, and never a U+FFFD for a character that was only cut short.

    ``prompt_ids`` (the last four are enough) may end inside a character. Its incomplete end is held at first,
    so that the character comes out whole when the generation completes it; if it does not, the prompt's
    bytes are forgotten. Either way nothing of the prompt is shown again.
    """

    __slots__ = ("_held", "_pieces", "_primed", "_texts")

    def __init__(self, table: DecodingTable, prompt_ids: Sequence[int] = ()) -> None:
        self._texts = table.texts
        self._pieces = table.pieces
        self._held = incomplete_tail(_last_bytes(table.prompt_pieces, prompt_ids))
        self._primed = bool(self._held)

    def lead(self, token: int) -> int:
        """How many characters would come out before the first byte of ``token``, were it pushed now.

        One, if it turns what is held of a character into a U+FFFD; else none.
        """
        piece = self._pieces[token] if token < len(self._pieces) else b""
        if not piece or not self._held or self._primed:
            return 0
        return int(not goes_on(self._held, piece[0]))

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; ids without a token add nothing."""
        try:
            text = self._texts[token]
        except IndexError:  # the model has more rows than the tokenizer has tokens
            return ""
        if text is not None and not self._held:
            return text
        piece = self._pieces[token]
        if self._primed and piece:
            self._primed = False
            if not goes_on(self._held, piece[0]):
                self._held = b""
        text, self._held = decode_known(self._held + piece)
        return text
