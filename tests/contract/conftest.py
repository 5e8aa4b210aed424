"""One Valkey and one Redis 7 for the tests of a file; each test starts from an empty one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.bus.client import Bus
from common.bus.embedded import EmbeddedRedis
from tests.helpers.bus import Desk
from tests.helpers.servers import BOTH, binary_of


@pytest.fixture(scope="module", params=BOTH)
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    """The file's server of one kind."""
    with EmbeddedRedis(binary=binary_of(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def connection(server: EmbeddedRedis) -> Iterator[Bus]:
    bus = Bus(server.url, name="test")
    yield bus
    bus.close()


@pytest.fixture
def bus(connection: Bus) -> Bus:
    """Commands on an empty server."""
    connection.do("FLUSHALL")
    return connection


@pytest.fixture
def desk(bus: Bus) -> Desk:
    """Partition 0 of an empty server."""
    return Desk(bus)
