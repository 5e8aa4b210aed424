"""The product as its next version might be, and as its previous one might have been, to run beside it (B10).

The next one writes fields that nobody knows yet, wherever it writes; the previous one leaves out every field
that has a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import orjson

from common import messages
from common.bus import handoffs, registry
from common.sampling import SamplingParams
from tests.chaos.mutants import Edit, edited

_MORE = "'later', 'x'"

_NEXT: tuple[Edit, ...] = (
    ("admit", "'*', 'uid', ARGV[1])", f"'*', 'uid', ARGV[1], {_MORE})"),
    ("tok_done", "'choice', choice)", f"'choice', choice, {_MORE})"),
    ("tok_done", "'accepted', ARGV[5])", f"'accepted', ARGV[5], {_MORE})"),
    ("start", "'state', 'running', ", f"'state', 'running', {_MORE}, "),
    ("emit", "'v', '1', 'r', records)", f"'v', '2', 'r', records, {_MORE})"),
    ("pub", "'text', ARGV[a + 2],", f"'text', ARGV[a + 2], {_MORE},"),
    ("lib_end", "unpack(fields))", f"{_MORE}, unpack(fields))"),
    ("renew", "'expiry', now + ARGV[2])", f"'expiry', now + ARGV[2], {_MORE})"),
    ("own_partition", "'owner', ARGV[1], ", f"'owner', ARGV[1], {_MORE}, "),
)  # fmt: skip
_PREVIOUS: tuple[Edit, ...] = (
    ("emit", "'v', '1', 'r', records)", "'r', records)"),
    ("lib_end", " .. ' ' .. (counts[3] or '0')", ""),
)
#: Fields of a request that have defaults, and those defaults.
_DEFAULTS = {"v": 1, "n": 1, "class": "interactive", "tenant": "", "api": "", "reply": "{}"}


def _install_next() -> None:
    edited(*_NEXT)()
    _change(messages.Request, "to_fields", lambda fields: fields | {"v": 2, "later": "x"})
    _change(SamplingParams, "to_json", _with_more)
    _change(registry.ModelInfo, "to_json", _with_more)
    _change(registry, "announcement", _announce_more)
    _change_steps(lambda row: dataclasses.replace(row, record=f"{row.record} later=x"))


def _install_previous() -> None:
    edited(*_PREVIOUS)()
    _change(messages.Request, "to_fields", _without_defaults)
    _change(registry.ModelInfo, "to_json", lambda text: _without(text, "aliases", "generation_defaults"))
    _change(registry, "announcement", _announce_less)
    _change_steps(lambda row: row, cached=())


def _change(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """What ``owner.name`` returns is changed on its way."""
    real = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(real(*args, **kwargs))

    setattr(owner, name, changed)


def _change_steps(change: Callable[[handoffs.EmitRow], handoffs.EmitRow], **fields: Any) -> None:
    """The rows that a scheduler sends."""
    real = handoffs.emit

    def emit(keys: Any, partition: int, worker: str, seq: int, step: handoffs.Step) -> Any:
        rows = tuple(map(change, step.rows))
        return real(keys, partition, worker, seq, dataclasses.replace(step, rows=rows, **fields))

    handoffs.emit = emit


def _with_more(text: str) -> str:
    return orjson.dumps(orjson.loads(text) | {"later": {"x": 1}}).decode()


def _without(text: str | bytes, *names: str) -> str:
    return orjson.dumps({k: v for k, v in orjson.loads(text).items() if k not in names}).decode()


def _without_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if _DEFAULTS.get(name, ...) != value}


def _announce_more(commands: Any) -> Any:
    (name, key, text, *rest), *others = commands
    return ((name, key, _with_more(text), *rest), *others)


def _announce_less(commands: Any) -> Any:
    (name, key, text, *rest), *others = commands
    return ((name, key, _without(text, "stats"), *rest), *others)


VERSIONS: dict[str, Callable[[], None]] = {"next": _install_next, "previous": _install_previous}


def install(name: str) -> None:
    """Makes this process one of another version."""
    VERSIONS[name]()
