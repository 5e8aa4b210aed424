"""Start-up checks of the Redis server: what must hold there for the bus to keep its promises (B11)."""

from __future__ import annotations

import time

from common.bus.client import Bus
from common.bus.keys import Keys
from common.bus.registry import eviction, parse_info
from common.errors import MillstreamError, UnavailableError

#: Partitions of a Redis that is new, unless somebody says another number.
PARTITIONS = 2
_OLDEST = (7, 0)
_RETRY_S = 0.1


class UnfitServerError(MillstreamError):
    """The Redis server cannot carry the bus."""


def wait_for_server(url: str, keys: Keys, partitions: int, *, timeout_s: float) -> int:
    """`check_server`, once Redis takes writes; raises `UnavailableError` when it does not within the time.

    An answer to PING would not do: a restarted server that is part of a cluster refuses keys for seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return check_server(url, keys, partitions)
        except UnavailableError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def check_server(url: str, keys: Keys, partitions: int, *, new: int = PARTITIONS) -> int:
    """The number of partitions that all processes on this server have.

    ``partitions`` is what this process was told; 0: whatever the others have, and ``new`` on a new server.
    Raises `UnfitServerError`, saying what to change, when it is unfit: too old, may evict keys, or
    already serves processes with another number of partitions.
    """
    bus = Bus(url, name="check")
    try:
        server = parse_info(bus.do("INFO", "server"))
        version = server.get("redis_version", "0.0")
        if tuple(map(int, version.split(".")[:2])) < _OLDEST:
            raise UnfitServerError(f"Redis {version} is too old: 7.0 or newer is needed, or any Valkey")
        if unfit := eviction(parse_info(bus.do("INFO", "memory"))):
            raise UnfitServerError(unfit)
        bus.do("HSETNX", keys.meta(), "partitions", partitions or new)
        agreed = int(bus.do("HGET", keys.meta(), "partitions"))
        if partitions and agreed != partitions:
            raise UnfitServerError(
                f"this Redis was set up with {agreed} partitions and this process has --partitions "
                f"{partitions}: use the same everywhere, or another --key-prefix"
            )
        return agreed
    finally:
        bus.close()
