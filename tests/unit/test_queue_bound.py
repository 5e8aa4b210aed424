"""How many requests may wait, by how many run at once."""

from __future__ import annotations

import pytest

from api.pressure import LONGEST_QUEUE, queue_bound


@pytest.mark.parametrize(("rows", "bound"), [(0, LONGEST_QUEUE), (1, 16), (32, 16), (64, 32), (256, 128)])
def test_what_must_not_be_late_queues_behind_half_of_what_runs(rows: int, bound: int) -> None:
    assert queue_bound(rows, may_be_late=False) == bound


def test_batch_may_queue_for_long() -> None:
    assert queue_bound(32, may_be_late=True) == LONGEST_QUEUE
