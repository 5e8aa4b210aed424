"""Codecs to test with: the bundled model's, and small ones made of whatever tokens a test needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.checkpoint import locate
from workers.text.codec import TokenCodec
from workers.text.source import TextSource, load_source
from workers.text.vocabulary import byte_alphabet

BUNDLED = "smollm2-135m-instruct"


@functools.cache
def bundled_source() -> TextSource:
    return load_source(locate(BUNDLED))


@functools.cache
def bundled_codec() -> TokenCodec:
    return TokenCodec(bundled_source())


def byte_codec(
    pieces: Sequence[bytes],
    special: Sequence[str | AddedToken] = (),
) -> TokenCodec:
    """A byte-level codec whose token i is ``pieces[i]``; special tokens follow. Pieces must differ."""
    chars = {byte: char for char, byte in byte_alphabet().items()}
    vocab = {"".join(chars[byte] for byte in piece): token for token, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(each, normalized=False) if isinstance(each, str) else each for each in special]
    )
    return TokenCodec(TextSource(tokenizer, {}, {}))
