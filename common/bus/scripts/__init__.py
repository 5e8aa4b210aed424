"""The Lua scripts beside this file: loading, and the shape of a call to one.

A script file opens with its KEYS, ARGV and reply. ``--@include name`` is replaced by ``lib_name.lua``, once.
The typed faces are in `common.bus.handoffs` and `common.bus.leases`; a `Call` is pure data, so the same face
serves the synchronous and the asynchronous client.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_INCLUDE = re.compile(r"^--@include (\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One script call: its name, keys and arguments, and how to read the reply."""

    script: str
    keys: Sequence[str]
    args: Sequence[str | int | bytes]
    parse: Callable[[Any], T]


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(f"{name}.lua").read_text("utf-8")


@cache
def source_of(name: str) -> str:
    """The script's full text, includes resolved."""
    return _INCLUDE.sub(lambda match: _read(f"lib_{match[1]}"), _read(name))


@cache
def sha_of(name: str) -> str:
    """The digest by which Redis knows the script."""
    return hashlib.sha1(source_of(name).encode(), usedforsecurity=False).hexdigest()
