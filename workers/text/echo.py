"""Prompts as they are given back before what was generated."""

from __future__ import annotations

from collections.abc import Sequence

from common.messages import dumps
from workers.text.codec import TokenCodec
from workers.text.utf8 import decode_known


def write_echo(
    codec: TokenCodec, prompts: Sequence[str | Sequence[int]], ids: Sequence[Sequence[int]]
) -> str:
    """The prompts of a request as JSON: ``[[text, shift], ...]``.

    A text comes back as it was given; token ids are decoded, special tokens too, without an incomplete
    character at their end. ``shift`` is the length of what the text of all its tokens has in front of that: a
    token that the tokenizer has added, or a space. Offsets in rows of logprobs (`workers.text.logprobs`) are
    offsets in the text of all its tokens.
    """
    return dumps([_echo(codec, prompt, each) for prompt, each in zip(prompts, ids, strict=True)])


def _echo(codec: TokenCodec, prompt: str | Sequence[int], ids: Sequence[int]) -> tuple[str, int]:
    text = prompt if isinstance(prompt, str) else codec.decode(ids, skip_special_tokens=False)
    pieces = codec.vocabulary.pieces
    whole = decode_known(b"".join(pieces[token] or b"" for token in ids if token < len(pieces)))[0]
    return text, len(whole) - len(text) if whole.endswith(text) else 0
