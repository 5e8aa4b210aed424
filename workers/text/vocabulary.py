"""What each token id stands for in bytes, derived from a tokenizer's own decoder.

Byte-level and SentencePiece-style vocabularies become the same thing here: a table of true bytes, so that
nothing past this file knows how a vocabulary spells its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from workers.checkpoint.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's alphabet), inverted.

    Printable Latin-1 bytes stand for themselves; the other 68 take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched whole in text before the model's own vocabulary is applied."""

    id: int
    text: str
    #: Control tokens, hidden when special tokens are skipped.
    special: bool
    #: Whether it swallows the white space before and after it.
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every token of a tokenizer. ``pieces[id]`` is a token's true bytes, None where an id has no token."""

    pieces: tuple[bytes | None, ...]
    added: tuple[AddedToken, ...]
    #: Whether the encoder puts a space before the first word (SentencePiece); a decoded text is without it.
    dummy_prefix: bool


def read_vocabulary(tokenizer: Tokenizer, control: Iterable[str] = ()) -> Vocabulary:
    """The vocabulary of ``tokenizer``; ``control`` names added tokens that are special besides its own."""
    steps = _decoder_steps(tokenizer)
    control = frozenset(control)
    added = tuple(
        AddedToken(
            token_id, token.content, token.special or token.content in control, token.lstrip, token.rstrip
        )
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    )
    spellings = tokenizer.get_vocab(with_added_tokens=False)
    size = 1 + max([*spellings.values(), *(token.id for token in added)], default=-1)
    pieces: list[bytes | None] = [None] * size
    to_bytes = _speller(steps)
    for spelling, token_id in spellings.items():
        pieces[token_id] = to_bytes(spelling)
    for token in added:  # their text is plain text, whatever the alphabet of the others
        pieces[token.id] = token.text.encode()
    return Vocabulary(tuple(pieces), added, _strips_first_space(steps))


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder, flattened; unsupported ones are refused here."""
    if tokenizer.decoder is None:
        return []
    # The pickled state of a component is its part of tokenizer.json: asking for it avoids
    # serializing and parsing the whole tokenizer, vocabulary and merges included.
    spec = orjson.loads(tokenizer.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    for step in steps:
        if step["type"] not in {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
            raise CheckpointError(f"the tokenizer's decoder {step['type']} is not supported")
        if step["type"] == "Replace" and "String" not in step["pattern"]:
            raise CheckpointError("the tokenizer's decoder replaces by a pattern, which is not supported")
    return steps


def _strips_first_space(steps: list[dict[str, Any]]) -> bool:
    for step in steps:
        if step["type"] == "Strip" and step["content"] == " " and step["start"] > 0:
            return True
        if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            return True
    return False


def _speller(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """The function from how the vocabulary spells a token to the token's bytes."""
    names = {step["type"] for step in steps}
    replacements = [
        (step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"
    ]
    replacements += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    # str.translate maps the alphabet to the code points of the same numbers, which Latin-1 turns into bytes.
    alphabet = {ord(char): byte for char, byte in byte_alphabet().items()}
    outside = re.compile(f"[^{re.escape(''.join(map(chr, alphabet)))}]")

    def to_bytes(spelling: str) -> bytes:
        if "ByteLevel" in names and not outside.search(spelling):
            return spelling.translate(alphabet).encode("latin-1")
        if "ByteFallback" in names and (byte := _BYTE_TOKEN.fullmatch(spelling)):
            return bytes([int(byte[1], 16)])
        for pattern, content in replacements:
            spelling = spelling.replace(pattern, content)
        return spelling.encode()

    return to_bytes
