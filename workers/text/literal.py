"""Keeps text that comes from clients from turning into control tokens of a chat.

A message may spell ``<|im_end|>``; encoded with the rest of the chat it would end the message. What spells a
control token is marked before a template renders it and encoded as plain text after. Knows no template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workers.text.codec import TokenCodec

#: Unicode noncharacters, which no text may contain and every string can.
_START, _END = "\ufdd0", "\ufdd1"


class LiteralText:
    """Marks and encodes for one codec. Text without marks is encoded exactly as `TokenCodec.encode` does."""

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        longest_first = sorted(codec.special, key=len, reverse=True)
        control = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control = re.compile(control)
        self._marked = re.compile(f"{_START}({control}){_END}|({control})|[{_START}{_END}]")

    def mark(self, value: Any) -> Any:
        """``value`` with every control token spelled in its strings marked; keys stay as they are."""
        if isinstance(value, str):
            text = value.replace(_START, "").replace(_END, "")  # nobody forges a mark
            return self._control.sub(f"{_START}\\g<0>{_END}", text)
        if isinstance(value, Mapping):
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a rendered text: control tokens the template wrote, and marked ones as the text they are."""
        if _START not in text and _END not in text:
            return self._codec.encode(text, add_special_tokens=add_special_tokens)
        ids = self._codec.encode("", add_special_tokens=add_special_tokens)
        plain = ""
        at = 0
        for match in self._marked.finditer(text):
            plain += text[at : match.start()] + (match[1] or "")
            at = match.end()
            if match[2]:
                token = self._codec.special[match[2]]
                ids += self._codec.encode_literally(plain.rstrip() if token.lstrip else plain)
                ids.append(token.id)
                plain = ""
                at += len(text[at:]) - len(text[at:].lstrip()) if token.rstrip else 0
        return ids + self._codec.encode_literally(plain + text[at:])
