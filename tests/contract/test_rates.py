"""CHARGE and SETTLE: limits per key, each request once, and what it really used in the end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from common.bus import rates
from common.bus.client import Bus
from common.bus.keys import Keys, moved, new_uid
from common.bus.rates import Standing
from tests.helpers.redis_state import contents
from tests.helpers.waiting import until

KEYS = Keys()
TTL_MS = 60_000
RATE = KEYS.rate("key-1")


def charge(
    bus: Bus, uid: str = "", *, requests: int = 0, tokens: int = 0, cost: int = 0, **more: Any
) -> Standing:
    call = rates.charge(
        KEYS,
        more.pop("key", "key-1"),
        uid or new_uid(0),
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        tokens=cost,
        ttl_ms=more.pop("ttl_ms", TTL_MS),
    )
    return bus.run(call)


def settle(bus: Bus, uid: str, *, tokens: int, requests: int = 1) -> bool:
    return bus.run(rates.settle(KEYS, "key-1", uid, tokens=tokens, requests=requests))


def used(bus: Bus, name: str) -> float:
    return float(bus.do("HGET", RATE, name))


def age(bus: Bus, millis: int) -> None:
    """As if so much time had passed since the last change."""
    bus.do("HINCRBY", RATE, "at", -millis)


def test_as_many_requests_as_allowed_and_then_one_after_the_other(bus: Bus) -> None:
    for left in (2, 1, 0):
        standing = charge(bus, requests=3)
        assert (standing.short, standing.requests.left) == ("", left)
    refused = charge(bus, requests=3)
    assert refused.short == "requests"
    assert 19_000 < refused.wait_ms <= 20_000
    assert 59_000 < refused.requests.reset_ms <= 60_000
    age(bus, refused.wait_ms - 1_000)
    assert charge(bus, requests=3).short == "requests"
    age(bus, 1_000)
    assert charge(bus, requests=3).short == ""
    assert charge(bus, requests=3).short == "requests"


def test_a_minute_later_all_is_back(bus: Bus) -> None:
    charge(bus, requests=3, tokens=100, cost=100)
    age(bus, 60_000)
    standing = charge(bus, requests=3, tokens=100, cost=1)
    assert (standing.requests.left, standing.tokens.left) == (2, 99)


def test_over_time_not_more_than_the_limit(bus: Bus) -> None:
    """A burst of a whole minute's, then a minute's in every minute, however often it is tried."""
    passed = 0
    charge(bus, requests=60)
    for _ in range(2 * 60 * 2):
        passed += charge(bus, requests=60).short == ""
        passed += charge(bus, requests=60).short == ""
        age(bus, 500)
    assert 59 + 119 <= passed <= 59 + 121


def test_refusals_cost_nothing(bus: Bus) -> None:
    charge(bus, requests=1, tokens=1000, cost=5)
    before = contents(bus)
    for _ in range(5):
        assert charge(bus, requests=1, tokens=1000, cost=5).short == "requests"
    assert contents(bus) == before


def test_both_limits_must_leave_room(bus: Bus) -> None:
    charge(bus, requests=2, tokens=100, cost=90)
    refused = charge(bus, requests=2, tokens=100, cost=40)
    assert refused.short == "tokens"
    assert 17_000 < refused.wait_ms <= 18_000
    assert (refused.requests.left, refused.tokens.left) == (1, 10)
    charge(bus, requests=2, tokens=100, cost=5)
    both = charge(bus, requests=2, tokens=100, cost=10)
    assert both.short == "requests", "the one that takes longer is named"


def test_what_costs_no_tokens_needs_none(bus: Bus) -> None:
    uid = new_uid(0)
    charge(bus, uid, requests=9, tokens=10, cost=10)
    settle(bus, uid, tokens=50)
    assert charge(bus, requests=9, tokens=10, cost=1).short == "tokens"
    assert charge(bus, requests=9, tokens=10, cost=0).short == ""


def test_a_request_larger_than_the_limit_waits_for_a_full_minute(bus: Bus) -> None:
    assert charge(bus, tokens=100, cost=1).short == ""
    assert charge(bus, tokens=100, cost=250).short == "tokens"
    age(bus, 60_000)
    big = charge(bus, tokens=100, cost=250)
    assert (big.short, big.tokens.left) == ("", 0)
    refused = charge(bus, tokens=100, cost=1)
    assert 90_000 < refused.wait_ms <= 91_000


def test_a_charge_counts_once_on_whatever_partition_it_is_tried(bus: Bus) -> None:
    uid = new_uid(0)
    first = charge(bus, uid, requests=3, tokens=100, cost=10)
    before = contents(bus)
    for partition in (0, 1, 5):
        again = charge(bus, moved(uid, partition), requests=3, tokens=100, cost=10)
        assert (again.short, again.requests.left, again.tokens.left) == ("", 2, 90)
    assert contents(bus) == before
    assert first.requests.left == 2


def test_a_repeated_charge_goes_through_even_when_nothing_is_left(bus: Bus) -> None:
    uid = new_uid(0)
    charge(bus, uid, requests=1)
    assert charge(bus, requests=1).short == "requests"
    assert charge(bus, uid, requests=1).short == ""


def test_keys_have_limits_of_their_own(bus: Bus) -> None:
    charge(bus, requests=1)
    assert charge(bus, requests=1, key="key-2").short == ""


@pytest.mark.parametrize(("real", "left"), [(10, 90), (60, 40), (100, 0), (300, 0), (0, 100)])
def test_the_end_says_what_it_cost(bus: Bus, real: int, left: int) -> None:
    uid = new_uid(0)
    charge(bus, uid, requests=3, tokens=100, cost=60)
    assert settle(bus, uid, tokens=real)
    assert used(bus, "tokens") == pytest.approx(real, abs=1)
    assert used(bus, "requests") == pytest.approx(1, abs=0.1)
    assert charge(bus, uid, requests=3, tokens=100, cost=60).tokens.left == pytest.approx(left, abs=1)


def test_an_end_counts_once(bus: Bus) -> None:
    uid = new_uid(0)
    charge(bus, uid, requests=3, tokens=100, cost=60)
    assert settle(bus, uid, tokens=10)
    before = contents(bus)
    assert not settle(bus, uid, tokens=10)
    assert not settle(bus, uid, tokens=0, requests=0)
    assert contents(bus) == before


def test_one_that_never_came_to_be_costs_nothing(bus: Bus) -> None:
    uid = new_uid(0)
    charge(bus, requests=3, tokens=100, cost=20)
    charge(bus, uid, requests=3, tokens=100, cost=60)
    assert settle(bus, uid, tokens=0, requests=0)
    assert used(bus, "tokens") == pytest.approx(20, abs=1)
    assert used(bus, "requests") == pytest.approx(1, abs=0.1)


def test_debt_is_waited_off(bus: Bus) -> None:
    uid = new_uid(0)
    charge(bus, uid, tokens=100, cost=10)
    settle(bus, uid, tokens=400)
    refused = charge(bus, tokens=100, cost=10)
    assert 185_000 < refused.wait_ms <= 186_000
    assert bus.do("PTTL", RATE) > 240_000, "it is not forgotten before"
    age(bus, 186_000)
    assert charge(bus, tokens=100, cost=10).short == ""


def test_what_is_forgotten_is_not_settled(bus: Bus) -> None:
    uid = new_uid(0)
    assert not settle(bus, uid, tokens=10)
    charge(bus, uid, tokens=100, cost=10)
    bus.do("DEL", RATE)
    assert not settle(bus, uid, tokens=10)
    assert contents(bus).keys() == {KEYS.charge("key-1", uid).encode()}


def test_everything_goes_away_by_itself(bus: Bus) -> None:
    uid = new_uid(0)
    charge(bus, uid, requests=1000, tokens=1000, cost=1, ttl_ms=300)
    assert bus.do("PTTL", KEYS.charge("key-1", uid)) <= 300
    assert 60_000 < bus.do("PTTL", RATE) <= 61_000
    settle(bus, uid, tokens=2)
    assert 0 < bus.do("PTTL", KEYS.charge("key-1", uid)) <= 300
    until(lambda: not bus.do("EXISTS", KEYS.charge("key-1", uid)), "the charge is gone")


def test_what_is_settled_is_soon_forgotten(bus: Bus) -> None:
    """One key may make thousands of small requests a second."""
    uid = new_uid(0)
    charge(bus, uid, tokens=1000, cost=1, ttl_ms=960_000)
    before = bus.do("PTTL", RATE)
    settle(bus, uid, tokens=2)
    assert 0 < bus.do("PTTL", KEYS.charge("key-1", uid)) <= 60_000
    assert bus.do("PTTL", RATE) > before - 60_000, "what was used is not"


def test_new_limits_hold_at_once(bus: Bus) -> None:
    for _ in range(4):
        charge(bus, requests=10)
    assert charge(bus, requests=4).short == "requests"
    assert charge(bus, requests=20).requests.left == 15
    assert charge(bus, requests=0).short == ""


def test_a_clock_that_jumps_back_gives_nothing_away(bus: Bus) -> None:
    charge(bus, requests=2)
    charge(bus, requests=2)
    age(bus, -3_600_000)
    refused = charge(bus, requests=2)
    assert refused.short == "requests"
    assert 29_000 < refused.wait_ms <= 30_000


def test_it_can_be_read(bus: Bus) -> None:
    uid = new_uid(0)
    charge(bus, uid, requests=3, tokens=100, cost=60)
    flat = bus.do("HGETALL", RATE)
    fields = {k.decode(): v.decode() for k, v in zip(flat[::2], flat[1::2], strict=True)}
    assert abs(int(fields.pop("at")) - time.time() * 1000) < 60_000
    assert fields == {
        "requests": "1.000",
        "requests_per_minute": "3",
        "tokens": "60.000",
        "tokens_per_minute": "100",
    }
    assert bus.do("GET", KEYS.charge("key-1", uid)) == b"60"
