"""The product with one protection taken out, to show that the harness notices: each must make it fail.

Fencing has two layers, the worker's lease and the row's place in its log, each enough against a zombie: its
mutant takes out both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.bus import peers, scripts, streams

#: Script, what it says, what it is to say instead.
Edit = tuple[str, str, str]

_EMIT_FENCE: Edit = ("emit", "if lease[1] == '1' or not lease[2] then return", "if false then return")
_RENEW_FENCE: Edit = (
    "renew",
    "if lease[1] == '1' or (not lease[2] and ARGV[3] ~= '1') then",
    "if false then",
)
#: A row is accepted only where its writer believes the token log ends: fencing per choice.
_ROW_FENCE: Edit = ("emit", "if size == at + #piece and (at > 0 or", "if true or (at > 0 or")
_SEQUENCE: tuple[Edit, ...] = (
    ("emit", "if seq > stored + 1 then return {'BEHIND', stored} end", ""),
    ("emit", "if seq == stored + 1 then", "if seq > 0 then"),
)
_OFFSET: Edit = ("pub", "if stored ~= ARGV[3] then return {'MOVED', stored} end", "")


def edited(*edits: Edit) -> Callable[[], None]:
    """Patches the text of scripts before anybody has read it."""

    def install() -> None:
        read = scripts._read

        def mutated(name: str) -> str:
            text = read(name)
            for script, old, new in edits:
                if script == name:
                    assert text.count(old) == 1, f"{name}.lua no longer says {old!r}"
                    text = text.replace(old, new)
            return text

        scripts._read = mutated

    return install


def _no_stranded_search() -> None:
    def blind(self: streams.GroupReader, held: Any) -> list[streams.Entry]:
        return []

    streams.GroupReader.stranded = blind


def _one_observation() -> None:
    peers.OBSERVE_S = 0.0


MUTANTS: dict[str, Callable[[], None]] = {
    "no-fence": edited(_EMIT_FENCE, _RENEW_FENCE, _ROW_FENCE),
    "no-sequence": edited(*_SEQUENCE),
    "no-offset-compare": edited(_OFFSET),
    "no-stranded-search": _no_stranded_search,
    "one-observation": _one_observation,
}


def install(name: str) -> None:
    """Takes the protection out of this process."""
    MUTANTS[name]()
