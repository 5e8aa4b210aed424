"""Incremental UTF-8: what is known of a byte string's text when more bytes may follow.

The only place that decides what is an incomplete character and what is known to be invalid.
"""

from __future__ import annotations

import codecs

#: Longest character in bytes; less than that many bytes are ever held.
MAX_CHAR = 4


def decode_known(data: bytes) -> tuple[str, bytes]:
    """The text of ``data`` and the bytes at its end that more bytes could complete to one character.

    Bytes that no continuation can make valid are U+FFFD at once, one for each maximal invalid part, so that
    ``decode_known(a)`` then ``decode_known(held + b)`` gives the text of ``decode_known(a + b)``.
    """
    text, known = codecs.utf_8_decode(data, "replace", False)
    held = data[known:]
    if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
        # CPython waits for the third byte of a surrogate half, though nothing can make it valid.
        return f"{text}\ufffd\ufffd", b""
    return text, held


def goes_on(held: bytes, byte: int) -> bool:
    """Whether ``byte`` may follow in the character that ``held`` begins and does not end."""
    whole = held + bytes([byte])
    try:
        return len(whole.decode()) == 1
    except UnicodeDecodeError:
        return decode_known(whole)[1] == whole


def incomplete_tail(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that begin a character and do not end it; it may start anywhere."""
    for count in range(1, min(MAX_CHAR, len(data) + 1)):
        if data[-count] >= 0xC0:  # a lead byte: characters start here whatever came before
            return decode_known(data[-count:])[1]
    return b""
