"""Kinds of setting values: how each is read from text, written back, and named to a person.

Knows nothing of which settings exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

_UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value. ``parse`` raises ValueError with the end of the sentence "X must be ..."."""

    label: str
    parse: Callable[[str], Any]
    write: Callable[[Any], str] = str
    #: What a flag without a value means; None: it needs one.
    bare: str | None = None
    #: Whether the value is a list, whose flag may be given several times.
    many: bool = False

    def show(self, value: Any) -> str:
        """``value`` as documentation prints it."""
        return f"`{self.write(value)}`"


def text(pattern: str = ".+") -> Kind:
    """Text that matches ``pattern`` as a whole."""

    def parse(raw: str) -> str:
        if re.fullmatch(pattern, raw) is None:
            raise ValueError("must be text" if pattern == ".+" else f"must match {pattern}")
        return raw

    return Kind("text", parse)


def choice(*words: str) -> Kind:
    """One of ``words``."""

    def parse(raw: str) -> str:
        if raw not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return raw

    return Kind(" or ".join(f"`{word}`" for word in words), parse)


def switch() -> Kind:
    """On or off. As a flag it needs no value: to name it is to switch it on."""
    spelled = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}

    def parse(raw: str) -> bool:
        value = spelled.get(raw.lower())
        if value is None:
            raise ValueError("must be true or false")
        return value

    return Kind("`true` or `false`", parse, lambda value: "true" if value else "false", bare="true")


def json_object() -> Kind:
    """A JSON object, kept as its text."""

    def parse(raw: str) -> str:
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return orjson.dumps(value).decode()

    return Kind("JSON object", parse)


def words(pattern: str, what: str, *, least: int = 0) -> Kind:
    """At least so many words, separated by commas, each of which matches ``pattern`` as a whole."""

    def parse(raw: str) -> tuple[str, ...]:
        found = tuple(word.strip() for word in raw.split(",") if word.strip())
        if len(found) < least or not all(re.fullmatch(pattern, word) for word in found):
            raise ValueError(f"must be {what}, separated by commas")
        return found

    return Kind("list", parse, ",".join, many=True)


def count(low: int, high: int = 2**53) -> Kind:
    """A whole number from ``low`` to ``high``."""
    bounds = f"from {low} to {high}" if high < 2**53 else f"of at least {low}"

    def parse(raw: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,16}", raw) is None or not low <= int(raw) <= high:
            raise ValueError(f"must be a whole number {bounds}")
        return int(raw)

    return Kind("whole number", parse)


def seconds(low: float, high: float = 1e7) -> Kind:
    """A length of time: a finite number from ``low`` to ``high``."""

    def parse(raw: str) -> float:
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return value

    def write(value: float) -> str:
        short = f"{value:g}"
        return short if float(short) == value else repr(value)

    return Kind("number", parse, write)


def byte_size(low: int = 0) -> Kind:
    """A number of bytes, with an optional unit: 65536, 64kb, 8mb, 1gb."""

    def parse(raw: str) -> int:
        found = re.fullmatch(r"([0-9]{1,15})(|kb|mb|gb)", raw.strip().lower())
        value = int(found[1]) * _UNITS[found[2]] if found else -1
        if value < low:
            raise ValueError(f"must be at least {write(low)}, written like 65536, 64kb, 8mb or 1gb")
        return value

    def write(value: int) -> str:
        for unit, size in reversed(_UNITS.items()):
            if value % size == 0 and value >= size:
                return f"{value // size}{unit}"
        return str(value)

    return Kind("bytes", parse, write)
