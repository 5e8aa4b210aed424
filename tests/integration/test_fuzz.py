"""What nobody would send leaves a real server as it was; `python -m tests.compat fuzz` sends 10,000 of it."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.bombarding import FLAGS, Bombardment
from tests.helpers.stack import Stack


def test_nothing_that_is_sent_harms_the_server_or_a_neighbour(start_stack: Callable[..., Stack]) -> None:
    bombardment = Bombardment(start_stack(*FLAGS))
    bombardment.run(200)
    assert bombardment.statuses.total() > 300
    assert {200, 400, 405} <= bombardment.statuses.keys(), "right and wrong ones were among them"
