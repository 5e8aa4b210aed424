"""A slice of each long run. Times are bounded at five times what the long ones allow."""

from __future__ import annotations

from collections.abc import Sequence

from tests.soak import overload, rolling, short_requests, slow_readers
from tests.soak.measure import Row, bad, table

SLACK = 5.0


def _judge(name: str, rows: Sequence[Row]) -> None:
    print(table(name, rows))
    assert not bad(rows), table(name, bad(rows))


def test_overload() -> None:
    _judge("overload", overload.run(4, slack=SLACK))


def test_slow_readers() -> None:
    _judge("slow readers", slow_readers.run(6, 60, slack=SLACK))


def test_short_requests() -> None:
    _judge("short requests", short_requests.run(600))


def test_other_versions_side_by_side() -> None:
    _judge("versions", rolling.versions(at_once=True))
