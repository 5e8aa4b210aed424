"""Stop strings one by one: what is released when, and which of several wins."""

from __future__ import annotations

import time

import pytest

from workers.text.stops import StopMatcher, StopSet


def push_all(stops: list[str], parts: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopSet(stops), include_stop=include)
    released = []
    for part in parts:
        text, stop = matcher.push(part)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, matcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "parts", "released", "stop"),
    [
        (["b"], ["abc"], ["a"], "b"),
        (["日本"], ["x日", "本y"], ["x", ""], "日本"),
        (["abc", "bc"], ["abc"], [""], "abc"),
        (["bc", "abc"], ["abc"], ["a"], "bc"),
        (["abcd", "bc"], ["abcd"], ["a"], "bc"),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["\n\n"], ["x\n", "y\n", "\n"], ["x", "\ny", ""], "\n\n"),
        (["abcabd"], ["abcab", "cabd"], ["", "abc"], "abcabd"),
        (["xyz"], ["ax", "ay", "b"], ["a", "xay", "b", ""], None),
        (["abcx", "bcy"], ["ab", "cy"], ["", "a"], "bcy"),
        (["end"], ["the e", "n"], ["the ", "", "en"], None),
        ([], ["text"], ["text", ""], None),
    ],
)
def test_release_and_match(stops: list[str], parts: list[str], released: list[str], stop: str | None) -> None:
    assert push_all(stops, parts) == (released, stop)


def test_an_included_stop_is_kept_and_what_follows_is_not() -> None:
    assert push_all(["END"], ["a EN", "D of it"], include=True) == (["a ", "END"], "END")


@pytest.mark.parametrize("stop", ["a" * 2000 + "b", "ab" * 1000 + "c"])
def test_long_near_misses_cost_the_same_per_character(stop: str) -> None:
    """Text that is always about to become the stop string: naive matching is quadratic in its length."""
    length = 128_000
    matcher = StopMatcher(StopSet([stop]), include_stop=False)
    text = (stop[:-1] * (length // len(stop) + 1))[:length]
    start = time.thread_time()
    assert sum(len(matcher.push(text[at : at + 4])[0]) for at in range(0, length, 4)) > 0
    assert time.thread_time() - start < 1.0  # linear takes 0.05
