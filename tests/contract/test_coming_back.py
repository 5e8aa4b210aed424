"""Coming back to a request: whose a key is, what is held against being given up, and what lives on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.bus.client import Bus
from common.bus.holding import Hold
from common.messages import Request
from tests.helpers.bus import TTL_MS, Desk
from tests.helpers.redis_state import contents


def keyed(desk: Desk, **more: object) -> Request:
    return desk.request(idem="digest", digest="body", resume_ms=60_000, **more)


def ttl(desk: Desk, key: str) -> int:
    return int(desk.bus.do("PTTL", key))


def attached_in(desk: Desk, uid: str) -> float:
    """How long the request is still held, in milliseconds of the server's clock."""
    seconds, micros = desk.bus.do("TIME")
    return int(desk.req(uid)["attached_until"]) - int(seconds) * 1000 - int(micros) / 1000


# -- whose a key is ---------------------------------------------------------------------------------------


def test_a_key_belongs_to_the_first(desk: Desk) -> None:
    first, second = keyed(desk), keyed(desk)
    assert desk.admit(first).code == "OK"
    assert desk.bus.do("GET", desk.keys.idem(0, "digest")).decode() == first.uid
    before = contents(desk.bus)
    answer = desk.admit(second)
    assert (answer.code, answer.uid) == ("DUP", first.uid)
    assert contents(desk.bus) == before
    assert desk.admit(desk.request(idem="other")).code == "OK"


def test_a_repeat_is_not_somebody_elses(desk: Desk) -> None:
    """A lost reply: whoever asks again finds its own uid, before and after the request has ended."""
    request = keyed(desk)
    assert desk.admit(request).code == "OK"
    before = contents(desk.bus)
    assert desk.admit(request).uid == request.uid
    assert desk.admit(request, stale=desk.request().uid).uid == request.uid
    assert contents(desk.bus) == before
    desk.cancel(request.uid)
    answer = desk.admit(request)
    assert (answer.code, answer.uid) == ("DUP", request.uid)


def test_what_can_be_read_back(desk: Desk) -> None:
    request = keyed(desk)
    desk.admit(request)
    fields = {name.encode(): value.encode() for name, value in desk.req(request.uid).items()}
    read = Request.from_fields(request.uid, fields)
    assert (read.idem, read.digest, read.resume_ms) == ("digest", "body", 60_000)
    assert 59_000 < attached_in(desk, request.uid) <= 60_000


def test_a_plain_request_has_nothing_of_it(desk: Desk) -> None:
    assert not {"resume", "idem", "digest", "attached_until"} & set(desk.req(desk.queued().uid))


@pytest.mark.parametrize("end", ["none", "cancelled", "answered"])
def test_a_key_never_dies_before_its_request(desk: Desk, end: str) -> None:
    request = keyed(desk)
    desk.admit(request)
    if end == "cancelled":
        desk.cancel(request.uid)
    if end == "answered":
        desk.open_tok()
        desk.take_partition()
        [entry] = desk.read_in()
        desk.tok_done(request, entry)
        desk.open("scheduler-1")
        [work] = desk.read_sched()
        desk.start(work)
        desk.bus.do("XADD", desk.tok, "*", "v", "1", "r", "record")
        desk.pub(finished=[desk.finished(request.uid, n=1, finish="stop")])
        assert desk.req(request.uid)["state"] == "ended"
    assert ttl(desk, desk.keys.req(request.uid)) <= ttl(desk, desk.keys.idem(0, "digest"))


def test_a_key_without_its_request_is_free(desk: Desk) -> None:
    gone, second, third = keyed(desk), keyed(desk), keyed(desk)
    desk.admit(gone)
    desk.bus.do("DEL", desk.keys.req(gone.uid))
    assert desk.admit(second).uid == gone.uid, "who has not looked cannot know"
    assert desk.admit(second, stale=gone.uid).code == "OK"
    assert desk.bus.do("GET", desk.keys.idem(0, "digest")).decode() == second.uid
    answer = desk.admit(third, stale=gone.uid)
    assert (answer.code, answer.uid) == ("DUP", second.uid), "it has another holder by now"


def test_a_key_whose_request_is_there_is_not_free(desk: Desk) -> None:
    """Whoever took the request for gone was wrong: it is admitted again meanwhile."""
    first, second = keyed(desk), keyed(desk)
    desk.admit(first)
    before = contents(desk.bus)
    answer = desk.admit(second, stale=first.uid)
    assert (answer.code, answer.uid) == ("DUP", first.uid)
    assert contents(desk.bus) == before


@pytest.mark.parametrize("lost", ["request", "everything"])
def test_a_request_that_redis_lost_keeps_its_key(desk: Desk, lost: str) -> None:
    request = keyed(desk)
    desk.admit(request)
    desk.bus.do(*(("DEL", desk.keys.req(request.uid)) if lost == "request" else ("FLUSHALL",)))
    assert desk.admit(request).code == "OK"
    assert desk.admit(keyed(desk)).uid == request.uid


def test_a_full_queue_tells_of_the_holder(desk: Desk) -> None:
    request = keyed(desk)
    desk.admit(request)
    assert desk.admit(keyed(desk), max_queued=0).uid == request.uid
    assert desk.admit(desk.request(idem="other"), max_queued=0).code == "FULL"


def test_a_race_has_one_winner(desk: Desk) -> None:
    clients = [Desk(Bus(desk.bus.url, name=f"racer-{n}")) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for round_ in range(50):
            idem = f"digest-{round_}"
            requests = [desk.request(idem=idem) for _ in clients]
            answers = list(pool.map(lambda pair: pair[0].admit(pair[1]), zip(clients, requests, strict=True)))
            assert sorted(answer.code for answer in answers) == ["DUP", "DUP", "DUP", "OK"]
            assert len({answer.uid for answer in answers}) == 1
    for client in clients:
        client.bus.close()


# -- who is held ------------------------------------------------------------------------------------------


def test_a_reader_holds_a_request(desk: Desk) -> None:
    request = desk.request(resume_ms=50)
    desk.admit(request)
    assert desk.cancel(request.uid, abandoned=True) == "HELD"
    time.sleep(0.06)
    assert desk.attach(Hold(request.uid, 1, 60_000)) == 1
    before = contents(desk.bus)
    assert desk.cancel(request.uid, abandoned=True) == "HELD"
    assert contents(desk.bus) == before
    assert desk.attach(Hold(request.uid, 1, 0)) == 1
    assert desk.cancel(request.uid, abandoned=True) == "ENDED"
    assert desk.out(request.uid)[-1].error == "cancelled"
    desk.read_in()


def test_whoever_asks_for_the_end_is_not_stopped_by_readers(desk: Desk) -> None:
    request = desk.request(resume_ms=60_000)
    desk.admit(request)
    assert desk.cancel(request.uid) == "ENDED"


def test_a_plain_request_is_held_by_a_reader_only(desk: Desk) -> None:
    one, other = desk.queued(), desk.queued()
    desk.attach(Hold(one.uid, 1, 10_000))
    assert desk.cancel(one.uid, abandoned=True) == "HELD"
    assert desk.cancel(other.uid, abandoned=True) == "ENDED"


def test_a_running_request_nobody_holds_is_flagged(desk: Desk) -> None:
    request, _ = desk.running()
    assert desk.cancel(request.uid, abandoned=True) == "FLAGGED"
    assert desk.tick().cancel == {request.uid}


# -- what lives on ----------------------------------------------------------------------------------------


def test_what_is_read_lives_on(desk: Desk) -> None:
    request = keyed(desk, n=2)
    desk.admit(request)
    [entry] = desk.read_in()
    desk.tok_done(request, entry)
    uid = request.uid
    keys = [desk.keys.req(uid), desk.keys.out(uid), desk.keys.gen(uid, 0), desk.keys.gen(uid, 1)]
    keys.append(desk.keys.idem(0, "digest"))
    for key in keys:
        desk.bus.do("PEXPIRE", key, 1_000)
    assert desk.attach(Hold(uid, 2, None, "digest"), ttl_ms=9_000) == 1
    assert [8_000 < ttl(desk, key) <= 9_000 for key in keys] == [True] * 5
    desk.attach(Hold(uid, 2, None, "digest"), ttl_ms=50)
    assert [ttl(desk, key) > 8_000 for key in keys] == [True] * 5, "a life never gets shorter"


def test_an_ended_request_is_kept_and_no_longer_held(desk: Desk) -> None:
    request = desk.queued()
    desk.cancel(request.uid)
    assert desk.attach(Hold(request.uid, 1, 5_000), ttl_ms=2 * TTL_MS) == 1
    assert ttl(desk, desk.keys.out(request.uid)) > TTL_MS
    assert "attached_until" not in desk.req(request.uid)
    desk.read_in()


def test_what_is_gone_does_not_come_back_and_what_is_broken_stops_nobody(desk: Desk) -> None:
    gone, broken, whole = desk.request(), desk.request(), desk.queued()
    desk.bus.do("SET", desk.keys.req(broken.uid), "not a hash")
    holds = [Hold(request.uid, 1, 5_000) for request in (gone, broken, whole)]
    assert desk.attach(*holds) == 1
    assert 4_000 < attached_in(desk, whole.uid) <= 5_000
    assert not desk.bus.do("EXISTS", desk.keys.req(gone.uid))
