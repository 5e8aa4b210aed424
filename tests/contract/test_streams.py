"""Reading work streams: lost replies, lost groups, entries that vanished, and the bell."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from common.bus import streams
from common.bus.client import Bus
from common.bus.embedded import EmbeddedRedis
from common.bus.streams import Bell, GroupReader, Place
from tests.helpers.waiting import until

STREAM = "{0}work"


def _reader(bus: Bus, consumer: str = "me") -> GroupReader:
    reader = GroupReader(bus, STREAM, "g", consumer)
    reader.ensure()
    return reader


def _add(bus: Bus, count: int = 1, first: int = 0) -> list[str]:
    return [
        bus.do("XADD", STREAM, "*", "uid", f"u{n}", "choice", n).decode() for n in range(first, first + count)
    ]


def places(ids: list[str]) -> set[Place]:
    return {(STREAM, entry_id) for entry_id in ids}


def test_fresh_entries_in_order(bus: Bus) -> None:
    reader = _reader(bus)
    assert reader.read(10) == []
    ids = _add(bus, 5)
    got = reader.read(3) + reader.read(3)
    assert [entry.id for entry in got] == ids
    assert [(entry.uid, entry.choice, entry.stream) for entry in got[:2]] == [
        ("u0", 0, STREAM), ("u1", 1, STREAM),
    ]  # fmt: skip
    assert reader.read(3) == []


def test_a_group_begins_with_what_waits(bus: Bus) -> None:
    ids = _add(bus, 2)
    reader = _reader(bus)
    reader.ensure()
    assert [entry.id for entry in reader.read(10)] == ids


def test_two_consumers_share(bus: Bus) -> None:
    mine, other = _reader(bus), _reader(bus, "other")
    ids = _add(bus, 4)
    assert [entry.id for entry in mine.read(2) + other.read(2)] == ids


def test_fields_of_a_newer_version_are_ignored(bus: Bus) -> None:
    reader = _reader(bus)
    bus.do("XADD", STREAM, "*", "v", 2, "uid", "u", "priority", 9)
    [entry] = reader.read(1)
    assert (entry.uid, entry.choice) == ("u", 0)


@pytest.mark.parametrize("fields", [["what", "is this"], ["uid", "u", "choice", "one"], ["uid", b"\xff"]])
def test_entries_of_nobody_end_no_worker(bus: Bus, fields: list[str | bytes]) -> None:
    reader = _reader(bus)
    bus.do("XADD", STREAM, "*", *fields)
    [good] = _add(bus)
    assert [entry.id for entry in reader.read(10)] == [good]
    bus.do("XADD", STREAM, "*", *fields)
    bus.do("XREADGROUP", "GROUP", "g", "me", "STREAMS", STREAM, ">")  # its reply never arrives
    assert [entry.id for entry in reader.stranded(())] == [good]
    assert (bus.do("XLEN", STREAM), bus.do("XPENDING", STREAM, "g")[0]) == (1, 1)


@pytest.mark.parametrize("lost", ["everything", "the group"])
def test_a_lost_group_is_made_again(bus: Bus, lost: str) -> None:
    reader = _reader(bus)
    _add(bus, 2)
    reader.read(1)
    if lost == "everything":
        bus.do("FLUSHALL")
    else:
        bus.do("XGROUP", "DESTROY", STREAM, "g")
    waiting = _add(bus, 1, first=7)
    assert reader.stranded(()) == []
    assert reader.read(10) == []
    reads = until(lambda: reader.read(10), "the group is there again", timeout=5)
    assert reads[-1].id == waiting[0]
    assert len(reads) == (1 if lost == "everything" else 3)


def test_a_lost_group_is_no_hot_loop(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = _reader(bus)
    bus.do("FLUSHALL")
    bus.do("SET", STREAM, "not a stream")
    with pytest.raises(Exception, match="WRONGTYPE"):
        reader.read(1)
    bus.do("DEL", STREAM)
    asked = []
    send = bus.do
    monkeypatch.setattr(bus, "do", lambda *command: (asked.append(command[0]), send(*command))[1])
    for _ in range(1_000):
        reader.read(1)
    assert len(asked) < 20


def test_lost_replies_are_found(bus: Bus) -> None:
    reader = _reader(bus)
    ids = _add(bus, 6)
    held = reader.read(2)
    reader.read(3)  # its reply never arrives
    _reader(bus, "other").read(1)
    before = bus.do("XPENDING", STREAM, "g", "-", "+", 10)
    found = reader.stranded({entry.place for entry in held})
    assert [(entry.id, entry.uid, entry.choice) for entry in found] == [
        (ids[n], f"u{n}", n) for n in (2, 3, 4)
    ]
    assert {(entry.claimed, entry.drained) for entry in found} == {(False, False)}
    assert reader.stranded(places(ids)) == []
    after = bus.do("XPENDING", STREAM, "g", "-", "+", 10)
    assert [(row[0], row[3]) for row in after] == [(row[0], row[3]) for row in before], (
        "nothing was delivered"
    )


def test_lost_replies_are_found_behind_many_that_are_held(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PENDING_PAGE", 10)
    reader = _reader(bus)
    ids = _add(bus, 40)
    reader.read(40)
    assert [entry.id for entry in reader.stranded(places(ids[:35]))] == ids[35:]
    assert [entry.id for entry in reader.stranded(places(ids[10:20]))] == ids[:10] + ids[20:]
    assert reader.stranded(places(ids)) == []


def test_a_pending_entry_that_was_deleted_is_let_go(bus: Bus) -> None:
    reader = _reader(bus)
    ids = _add(bus, 3)
    reader.read(3)
    bus.do("XDEL", STREAM, ids[1])
    assert [entry.id for entry in reader.stranded(places(ids[:1]))] == ids[2:]
    assert bus.do("XPENDING", STREAM, "g")[0] == 2


# -- the bell ---------------------------------------------------------------------------------------------


@pytest.fixture
def bell(server: EmbeddedRedis, bus: Bus) -> Iterator[tuple[Bell, threading.Event]]:
    rung = threading.Event()
    ringing = Bell(server.url, [STREAM, "{0}other"], lambda _: rung.set(), name="bell")
    ringing.start()
    assert rung.wait(5), "it rings once at the start: something may be waiting"
    rung.clear()
    yield ringing, rung
    ringing.stop()
    bus.do("XADD", STREAM, "*", "uid", "last")  # ends its read
    ringing._thread.join(5)
    assert not ringing._thread.is_alive()


def test_the_bell_rings_for_every_stream(bell: tuple[Bell, threading.Event], bus: Bus) -> None:
    _, rung = bell
    rung.wait(0.2)
    rung.clear()
    assert not rung.wait(0.1), "nothing is new"
    for stream in (STREAM, "{0}other", STREAM):
        bus.do("XADD", stream, "*", "uid", "u")
        assert rung.wait(5), stream
        rung.clear()


def test_the_bell_survives_a_flush_and_a_lost_connection(
    bell: tuple[Bell, threading.Event], bus: Bus
) -> None:
    _, rung = bell
    rung.wait(0.2)
    for harm in (("FLUSHALL",), ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")):
        bus.do(*harm)
        rung.wait(0.5)
        rung.clear()
        bus.do("XADD", STREAM, "*", "uid", "u")
        assert rung.wait(5), harm
        rung.clear()


def test_the_bell_consumes_nothing(bell: tuple[Bell, threading.Event], bus: Bus) -> None:
    _, rung = bell
    reader = _reader(bus)
    ids = _add(bus, 3)
    assert rung.wait(5)
    assert [entry.id for entry in reader.read(10)] == ids
