"""The order among those of one priority: by rank; nobody is overtaken for ever, nor gives way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.engines import ask, build, drain
from workers.engine.null import NullEngine
from workers.engine.types import RANK_PLACES, Engine


def native() -> Engine:
    return build(max_num_seqs=1)[0]


def null() -> Engine:
    return NullEngine(step_ms=0, max_num_seqs=1, max_model_len=200, vocab_size=1000)


both = pytest.mark.parametrize("make", [native, null])


def order_of(engine: Engine, *ranks: int, **fields: Any) -> list[int]:
    """Ranks in the order in which requests that came in this order were served, one row at a time."""
    engine.add(ask("running", [1], max_tokens=3, rank=99))
    engine.step()
    for number, rank in enumerate(ranks):
        engine.add(ask(f"{number}", [number + 2], max_tokens=1, rank=rank, **fields))
    served = list(drain(engine))
    assert served.pop(0) == "running", "whoever has begun gives way to nobody for a rank"
    return [ranks[int(key)] for key in served]


@both
def test_lower_ranks_are_begun_first(make: Callable[[], Engine]) -> None:
    assert order_of(make(), 0, 5, -3, 0, 100, -100) == [-100, -3, 0, 0, 5, 100]


@both
def test_a_rank_never_outdoes_a_priority(make: Callable[[], Engine]) -> None:
    engine = make()
    engine.add(ask("batch", [1], max_tokens=1, priority=1, rank=-100))
    engine.add(ask("live", [2], max_tokens=1, rank=100))
    assert list(drain(engine)) == ["live", "batch"]


@both
def test_only_so_many_overtake(make: Callable[[], Engine]) -> None:
    """While better ones come all the time, one step each."""
    engine, begun = make(), []
    engine.add(ask("patient", [1], max_tokens=1, rank=1))
    for number in range(RANK_PLACES + 50):
        engine.add(ask(f"{number}", [2], max_tokens=1))
        begun += [output.key for output in engine.step()]
    assert begun.index("patient") == RANK_PLACES - 1
