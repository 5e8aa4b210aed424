"""A reader that does not keep up: when its generation is paused, resumed, and given up."""

from __future__ import annotations

import asyncio

import pytest

from api import pace
from api.pace import Pace, SlowReaderError


class Slow:
    """A reply that only notes what is done to it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def hold(self) -> None:
        self.said.append("hold")

    def release(self) -> None:
        self.said.append("release")

    def pause(self, *, on: bool) -> None:
        self.said.append("pause" if on else "resume")

    def fail(self, error: Exception) -> None:
        assert isinstance(error, SlowReaderError)
        self.said.append("fail")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_PATIENCE_S", 0.02)
    monkeypatch.setattr(pace, "_TRUST_S", 0.02)


def _run(*moves: str | float) -> list[str]:
    """What is done to the reply by moves (``behind``, ``caught_up``, ``close``) and pauses in seconds."""
    slow = Slow()

    async def main() -> None:
        watched = Pace(slow, limit_s=0.3, cut=lambda: slow.said.append("cut"))
        for move in moves:
            if isinstance(move, float):
                await asyncio.sleep(move)
            else:
                getattr(watched, move)()
        watched.close()

    asyncio.run(main())
    return slow.said


def test_a_short_wait_is_no_reason_to_pause() -> None:
    assert _run("behind", "caught_up", 0.1, "behind", "caught_up", 0.1) == ["hold", "release"] * 2


def test_who_stays_behind_is_paused_and_goes_on_later() -> None:
    assert _run("behind", 0.1, "caught_up", 0.1) == ["hold", "pause", "release", "resume"]


def test_a_burst_that_fills_it_again_does_not_resume() -> None:
    said = _run("behind", 0.1, "caught_up", "behind", 0.1, "caught_up", 0.1)
    assert said == ["hold", "pause", "release", "hold", "pause", "release", "resume"]


def test_who_stays_behind_for_long_is_given_up() -> None:
    assert _run("behind", 0.6) == ["hold", "pause", "cut", "fail"]


def test_nothing_happens_after_the_end() -> None:
    assert _run("behind", "close", 0.1) == ["hold"]
    assert _run("behind", 0.1, "close", 0.5) == ["hold", "pause"]
