"""START counts crashes (B8): whose they are, which count, and what they make of a choice."""

from __future__ import annotations

import pytest

from common.bus import leases
from common.bus.keys import SCHEDULERS
from common.bus.peers import claim_dead
from common.bus.streams import Entry
from tests.helpers.bus import Desk
from tests.helpers.redis_state import contents


def _gone(desk: Desk, worker: str, how: str) -> None:
    """A worker's end: it crashed, drained, crashed and was forgotten; or it lives on."""
    if how != "alive":
        desk.bus.run(leases.retire(desk.keys, 0, worker, drained=how == "drained"))
    if how == "forgotten":
        desk.bus.do("DEL", desk.keys.lease(0, worker))


def _claim(desk: Desk, me: str, dead: str, *, lost: bool) -> list[Entry]:
    """CLAIM_DEAD; when its reply was ``lost``, what the search for stranded entries finds."""
    desk.open(me)
    call = claim_dead(desk.keys, 0, desk.sched, SCHEDULERS, me=me, dead=dead, expired_ok=False)
    entries, _ = desk.bus.run(call)
    return desk.reader(desk.sched, SCHEDULERS, me).stranded(()) if lost else entries


def test_crashes_count_only_without_progress(desk: Desk) -> None:
    _, [job] = desk.running(worker="w0")
    attempts = []
    for index in range(1, 8):
        _gone(desk, f"w{index - 1}", "drained" if index in (3, 6) else "crashed")
        desk.open(f"w{index}")
        attempts.append(desk.start(job.entry, f"w{index}").attempts)
        desk.start(job.entry, f"w{index}", alone=True)
        if index == 4:
            desk.generate(job, 1, worker="w4")
    #       crash, crash, drain, crash (then a token), crash with progress, drain, crash
    assert attempts == [1, 2, 2, 3, 0, 0, 1]


@pytest.mark.parametrize(
    ("how", "attempts"), [("crashed", 1), ("forgotten", 1), ("drained", 0), ("alive", 0)]
)
@pytest.mark.parametrize("lost", [False, True], ids=["claimed", "reply-lost"])
def test_the_last_owner_decides_however_the_entry_was_found(
    desk: Desk, how: str, attempts: int, lost: bool
) -> None:
    _, [job] = desk.running()
    if how == "alive":  # Redis forgot the delivery, say
        desk.open("scheduler-2")
        found = [job.entry]
    else:
        desk.bus.run(leases.retire(desk.keys, 0, "scheduler-1", drained=how == "drained"))
        found = _claim(desk, "scheduler-2", "scheduler-1", lost=lost)
        _gone(desk, "scheduler-1", how)
    [entry] = found
    assert entry.claimed != lost or how == "alive"
    assert desk.start(entry, "scheduler-2").attempts == attempts


def test_whoever_does_not_know_the_last_owner_is_told_and_changes_nothing(desk: Desk) -> None:
    _, [job] = desk.running()
    desk.open("scheduler-2")
    before = contents(desk.bus)
    for guess in ("", "scheduler-0"):
        started = desk.bus.run(desk.start_call(job.entry, "scheduler-2", owner=guess))
        assert (started.code, started.owner) == ("OWNER", "scheduler-1")
    assert contents(desk.bus) == before


def test_who_is_held_back_is_not_charged(desk: Desk) -> None:
    """Its owner crashed on another one before its turn came, however often."""
    _, [job] = desk.running(worker="w0")
    for index in range(1, 6):
        _gone(desk, f"w{index - 1}", "crashed")
        desk.open(f"w{index}")
        assert desk.start(job.entry, f"w{index}").attempts == 1
    desk.start(job.entry, "w5", alone=True)
    _gone(desk, "w5", "crashed")
    desk.open("w6")
    assert desk.start(job.entry, "w6").attempts == 2


def test_it_stays_a_suspect_through_a_drain_until_it_has_committed(desk: Desk) -> None:
    _, [job] = desk.running(worker="w0")
    for index, (how, attempts) in enumerate([("crashed", 1), ("drained", 1), ("drained", 0)], 1):
        _gone(desk, f"w{index - 1}", how)
        desk.open(f"w{index}")
        assert desk.start(job.entry, f"w{index}").attempts == attempts
        if index == 2:
            desk.start(job.entry, "w2", alone=True)
            desk.generate(job, 1, worker="w2")


def test_to_begin_alone_is_said_once(desk: Desk) -> None:
    _, [job] = desk.running()
    _gone(desk, "scheduler-1", "crashed")
    desk.open("scheduler-2")
    desk.start(job.entry, "scheduler-2")
    started = desk.start(job.entry, "scheduler-2", alone=True)
    assert (started.code, started.attempts, started.prompt_ids) == ("OK", 1, (5, 6, 7))
    before = contents(desk.bus)
    for alone in (True, False):
        assert desk.start(job.entry, "scheduler-2", alone=alone) == started
    assert contents(desk.bus) == before
