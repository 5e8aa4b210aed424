"""Schedulers that stop, and schedulers that hang: a peer goes on at once, and nobody is blamed for it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.chaos.fleet import WORKERS, Fleet, Shape
from tests.helpers.asking import Live, completion, null_text
from tests.helpers.inside import Inside
from tests.helpers.waiting import until

#: A peer looks for what was handed over every half second. Promised is less than one; asserted, five times.
MOST_GAP_S = 5.0


def shape(schedulers: int, **more: object) -> Shape:
    return Shape(replicas=dict.fromkeys((*WORKERS, "api"), 1) | {"scheduler": schedulers}, **more)


def streams(fleet: Fleet, seeds: Sequence[int], tokens: int) -> dict[int, Live]:
    """Streams in the middle."""
    [port] = fleet.ports
    made = {seed: Live(port, completion("hello", max_tokens=tokens, seed=seed)) for seed in seeds}
    for live in made.values():
        live.wait_for(30)
    return made


def check(made: dict[int, Live], tokens: int) -> float:
    """All are exact; returns the longest gap."""
    for seed, live in made.items():
        reply = live.result(60)
        assert (reply.text, reply.usage) == (null_text(seed, tokens), (1, tokens))
    return max(live.stall for live in made.values())


def attempts(fleet: Fleet, made: dict[int, Live]) -> set[str]:
    with fleet.redis() as client:
        return {client.hget(fleet.keys.req(live.id), "attempts:0") for live in made.values()}


def test_a_scheduler_that_stops_hands_over_to_its_peer_at_once() -> None:
    tokens = 500
    # Nobody reports its end, and its lease would last: only what it says itself can be so quick.
    with Fleet(shape(2, step_ms=10.0, lease_ms=20_000, reports=lambda _: False)) as fleet:
        made = streams(fleet, range(16), tokens)
        old = fleet.pids("scheduler")[0]
        fleet.send(old, signal.SIGTERM)
        until(lambda: not psutil.pid_exists(old), "it is gone", MOST_GAP_S, every=0.01)
        assert all(live.seen() < tokens for live in made.values()), "it does not wait for them to finish"
        gap = check(made, tokens)
        print(f"longest gap: {gap:.2f} s")
        assert "handing over" in fleet.logs()
        assert gap < MOST_GAP_S
        assert attempts(fleet, made) == {"0"}
        with fleet.redis() as client:
            Inside(client).wait_free(10)


def test_the_only_scheduler_finishes_what_it_has() -> None:
    tokens = 300
    with Fleet(shape(1, step_ms=10.0, reports=lambda _: False)) as fleet:
        made = streams(fleet, range(8), tokens)
        [old] = fleet.pids("scheduler")
        fleet.send(old, signal.SIGTERM)
        check(made, tokens)
        until(lambda: not psutil.pid_exists(old), "it is gone", 10)
        assert "handing over" not in fleet.logs()
        assert attempts(fleet, made) == {"0"}
        with fleet.redis() as client:
            owners = {client.hget(fleet.keys.req(live.id), "owner:0") for live in made.values()}
        assert len(owners) == 1


def test_a_hanging_step_loses_its_requests_to_a_peer(tmp_path: Path) -> None:
    """It may hang for ever, so nobody waits for it; it wakes, and is told that it is nobody any more."""
    tokens, marker = 300, tmp_path / "hung"
    launch = {"scheduler": ["--hang", "3:10:60", "--marker", str(marker)]}
    with Fleet(shape(2, launch=launch)) as fleet:
        made = streams(fleet, range(8), tokens)
        gap = check(made, tokens)
        print(f"longest gap: {gap:.2f} s")
        assert gap > 1.0, "it did not hang"
        assert psutil.pid_exists(int(marker.read_text())), "it still sleeps"
        until(lambda: fleet.fenced() == 1, "the sleeper is fenced", 30)
        with fleet.redis() as client:
            Inside(client).wait_free(10)


def test_a_process_that_hangs_for_long_ends_by_itself(tmp_path: Path) -> None:
    """For the requests alone a peer would do, but its memory and its place are wanted as well."""
    marker = tmp_path / "hung"
    launch = {"scheduler": ["--hang", "3:1000:2", "--marker", str(marker)]}
    with Fleet(shape(1, launch=launch)) as fleet:
        started = time.monotonic()
        made = streams(fleet, [3], 100)
        until(lambda: marker.exists() and not psutil.pid_exists(int(marker.read_text())), "it has ended", 30)
        print(f"ended after {time.monotonic() - started:.1f} s")
        assert "no progress for long" in fleet.logs()
        check(made, 100)
