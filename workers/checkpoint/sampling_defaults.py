"""What requests that leave out a sampling parameter get: as the model, a file or the operator says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import orjson

from workers.checkpoint.errors import CheckpointError
from workers.checkpoint.fields import Fields

FILE = "generation_config.json"
#: Names in generation_config.json, and the least and the most that each may be set to. `max_new_tokens` is
#: also the most that a request can have.
LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**53),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 2**31 - 1),
}


def of(config: Fields) -> dict[str, float]:
    """Those in a generation_config.json; it also has much that is not ours."""
    return {name: config.number(name) for name in LIMITS if config.values.get(name) is not None}


def choose(own: Mapping[str, float], source: str, override: str) -> dict[str, float]:
    """The defaults to serve with. Raises `CheckpointError`.

    ``own`` are the model's. ``source`` is auto (these), vllm (none), or a file or its folder to take them
    from instead. ``override`` is JSON; what it has wins.
    """
    if source == "auto":
        chosen = dict(own)
    elif source == "vllm":
        chosen = {}
    else:
        path = Path(source).expanduser()
        path = path / FILE if path.is_dir() else path
        chosen = of(Fields.from_json(path))
        _check(chosen, str(path))
    wanted = Fields(orjson.loads(override), "--override-generation-config")
    if unknown := sorted(wanted.values.keys() - LIMITS.keys()):
        raise CheckpointError(f"{wanted.where} has {', '.join(unknown)}; it may have {', '.join(LIMITS)}")
    _check(of(wanted), wanted.where)
    return chosen | of(wanted)


def _check(values: Mapping[str, float], where: str) -> None:
    for name, value in values.items():
        low, high = LIMITS[name]
        if not (math.isfinite(value) and low <= value <= high):
            raise CheckpointError(f"{where}: {name} is {value:g}, and must be from {low:g} to {high:g}")
