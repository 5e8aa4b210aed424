"""Text to token ids and back, for one model.

Encoding is the `tokenizers` library's. Decoding is ours, on the true bytes of each token, because a token
may end inside a character and streams must never show that. Not for use by several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.errors import InvalidRequestError
from workers.checkpoint import Checkpoint
from workers.text.source import TextSource, load_source
from workers.text.utf8 import decode_known
from workers.text.vocabulary import AddedToken, read_vocabulary


class TokenCodec:
    """The tokenizer of one model."""

    def __init__(self, source: TextSource) -> None:
        self._tokenizer = source.tokenizer
        self.vocabulary = read_vocabulary(source.tokenizer, source.special_tokens.values())
        #: Control tokens by their text.
        self.special: dict[str, AddedToken] = {
            token.text: token for token in self.vocabulary.added if token.special
        }
        self._special_ids = frozenset(token.id for token in self.special.values())
        self.bos_id = self._role_id(source, "bos_token")
        self.eos_id = self._role_id(source, "eos_token")

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> TokenCodec:
        """The codec of a model on disk."""
        return cls(load_source(checkpoint))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token; a model may have room for more ids than that."""
        return len(self.vocabulary.pieces)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; text that spells a control token becomes that token."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        for text in texts:
            if not text.isascii():
                _refuse_surrogates(text)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of ``text`` as plain text: what spells a control token stays text."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = False

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of ``ids`` as a whole: what the incremental decoder gives for them, joined.

        The space that some encoders put before the first word is taken off. An incomplete character at the
        end is left out, so that the text of a prompt and the text generated after it join without a seam.
        Ids without a token add nothing.
        """
        pieces, hidden = self.vocabulary.pieces, self._special_ids if skip_special_tokens else frozenset()
        shown = (pieces[token] for token in ids if 0 <= token < len(pieces) and token not in hidden)
        text = decode_known(b"".join(piece for piece in shown if piece is not None))[0]
        return text.removeprefix(" ") if self.vocabulary.dummy_prefix else text

    def token_bytes(self, token: int) -> bytes:
        """The true bytes of a token; they need not be valid UTF-8."""
        piece = self.vocabulary.pieces[token] if 0 <= token < self.vocab_size else None
        if piece is None:
            raise InvalidRequestError(f"there is no token with the id {token}")
        return piece

    def token_spelling(self, token: int) -> str:
        """How the vocabulary spells a token (``Ġworld``)."""
        spelling = self._tokenizer.id_to_token(token) if 0 <= token < self.vocab_size else None
        if spelling is None:
            raise InvalidRequestError(f"there is no token with the id {token}")
        return str(spelling)

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token, which `skip_special_tokens` hides."""
        return token in self._special_ids

    def pieces(self, *, skip_special_tokens: bool) -> list[bytes]:
        """What each id adds to a text, in bytes; ids without a token add nothing."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        return [
            b"" if piece is None or token in hidden else piece
            for token, piece in enumerate(self.vocabulary.pieces)
        ]

    def _role_id(self, source: TextSource, role: str) -> int | None:
        text = source.special_tokens.get(role)
        token = self._tokenizer.token_to_id(text) if text is not None else None
        return int(token) if token is not None else None


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the text holds half of a surrogate pair, which is no character") from error
