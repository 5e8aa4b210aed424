"""Rate limits of API keys: CHARGE before a request is admitted, SETTLE after its end.

Two levels per key, requests and tokens, each of which a minute empties when it is full: a key can use a
minute's at once, and over time not more than its limit per minute. What a request was charged and did not use
comes back at its end, even if it has drained meanwhile: after long requests more can be used at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.bus.keys import Keys
from common.bus.scripts import Call


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of a key: per minute, what is left of it, and the milliseconds until all is back."""

    per_minute: int
    left: int
    reset_ms: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Answer of CHARGE. ``short`` names the limit that left no room (requests, tokens), for ``wait_ms``."""

    short: str
    wait_ms: int
    requests: Limit
    tokens: Limit


def charge(
    keys: Keys,
    key: str,
    uid: str,
    *,
    requests_per_minute: int,
    tokens_per_minute: int,
    tokens: int,
    ttl_ms: int,
) -> Call[Standing]:
    """CHARGE: the request ``uid`` counts against the limits of the API key ``key``. 0 is no limit.

    It is charged once, however often and on however many partitions it is tried.
    """

    def parse(reply: Any) -> Standing:
        _, short, wait_ms, *numbers = reply
        return Standing(
            short.decode(),
            int(wait_ms),
            Limit(requests_per_minute, int(numbers[0]), int(numbers[1])),
            Limit(tokens_per_minute, int(numbers[2]), int(numbers[3])),
        )

    args = (requests_per_minute, tokens_per_minute, tokens, ttl_ms)
    return Call("charge", (keys.rate(key), keys.charge(key, uid)), args, parse)


def settle(keys: Keys, key: str, uid: str, *, tokens: int, requests: int = 1) -> Call[bool]:
    """SETTLE: the request used ``tokens``; with ``requests`` 0 it was none at all. False: nothing to do."""
    return Call("settle", (keys.rate(key), keys.charge(key, uid)), (requests, tokens), bool)
