"""Typed reading of a parsed config: what is missing or of the wrong type becomes a `CheckpointError`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from workers.checkpoint.errors import CheckpointError


class Fields:
    """A mapping with typed getters. A JSON null counts as missing; ``where`` names the source in errors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    @classmethod
    def from_json(cls, path: Path) -> Fields:
        """The fields of a JSON file that holds an object."""
        try:
            values = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds no JSON object")
        return cls(values, str(path))

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float; integers are taken as one."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def ids(self, key: str) -> frozenset[int]:
        """Token ids: absent, one, or a list of them."""
        value = self.values.get(key)
        if value is None:
            return frozenset()
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise self.error(key, "a token id or a list of them")
        return frozenset(items)

    def section(self, key: str) -> Fields | None:
        """A nested object, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def error(self, key: str, wanted: str) -> CheckpointError:
        """What is wrong with the value of ``key``."""
        if self.values.get(key) is None:
            return CheckpointError(f"{self.where} lacks {key}")
        return CheckpointError(f"{self.where}: {key} is {self.values[key]!r:.100}, not {wanted}")
