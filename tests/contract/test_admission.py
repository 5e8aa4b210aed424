"""ADMIT: what it writes, its bounds, its repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.bus.keys import SCHEDULERS
from common.messages import Request
from common.sampling import MAX_PROMPT_LOGPROBS
from tests.helpers.bus import TTL_MS, Desk
from tests.helpers.redis_state import contents


def _payload_size(request: Request) -> int:
    return len(str(request.to_fields()["payload"]).encode())


def test_an_admitted_request_is_whole(desk: Desk) -> None:
    request = desk.request(n=3)
    answer = desk.admit(request, queue_timeout_ms=4_000)
    assert (answer.code, answer.uid, answer.waiting) == ("OK", request.uid, 0)

    req = desk.req(request.uid)
    created = int(req["created"])
    assert req["state"] == "queued"
    assert int(req["deadline"]) == created + 30_000
    assert int(req["queue_deadline"]) == created + 4_000
    read_back = Request.from_fields(request.uid, {k.encode(): v.encode() for k, v in req.items()})
    assert read_back.payload == request.payload
    assert (read_back.model, read_back.n, read_back.params) == (request.model, 3, request.params)

    assert TTL_MS - 5_000 < desk.bus.do("PTTL", desk.keys.req(request.uid)) <= TTL_MS
    assert desk.bus.do("ZSCORE", desk.inflight, request.uid) == str(created + 4_000).encode()
    size = _payload_size(request)
    assert desk.bus.do("HMGET", desk.bytes, request.uid, "total") == [str(size).encode()] * 2
    [entry] = desk.read_in()
    assert (entry.uid, entry.choice) == (request.uid, 0)


def test_numbers_are_written_in_full(desk: Desk) -> None:
    request = desk.queued()
    req = desk.req(request.uid)
    assert all(req[name].isdigit() and len(req[name]) == 13 for name in ("created", "deadline"))


def test_the_queue_deadline_is_never_after_the_deadline(desk: Desk) -> None:
    request = desk.request()
    desk.admit(request, timeout_ms=1_000, queue_timeout_ms=9_000)
    req = desk.req(request.uid)
    assert req["queue_deadline"] == req["deadline"]


def test_a_repeat_changes_nothing_at_any_later_time(desk: Desk) -> None:
    request, [job] = desk.running()
    before = contents(desk.bus)
    assert desk.admit(request).code == "DUP"
    assert contents(desk.bus) == before
    desk.open_tok()
    desk.take_partition()
    desk.generate(job, 1, "stop")
    desk.pub(finished=[desk.finished(request.uid, n=1, finish="stop")])
    before = contents(desk.bus)
    assert desk.admit(request).code == "DUP"
    assert contents(desk.bus) == before


def test_the_queue_is_bounded(desk: Desk) -> None:
    for _ in range(3):
        assert desk.admit(desk.request(), max_queued=3).code == "OK"
    before = contents(desk.bus)
    answer = desk.admit(desk.request(), max_queued=3)
    assert (answer.code, answer.waiting) == ("FULL", 3)
    assert contents(desk.bus) == before


def test_only_what_no_scheduler_has_counts_as_queued(desk: Desk) -> None:
    desk.waiting(n=2)
    assert desk.admit(desk.request(), max_queued=2).waiting == 2
    desk.read_sched(count=1)
    assert desk.admit(desk.request(), max_queued=1).waiting == 1
    desk.read_sched(count=1)
    assert desk.admit(desk.request(), max_queued=1).code == "OK"


def test_what_finds_a_free_row_is_not_queued(desk: Desk) -> None:
    """A burst into idle schedulers is not refused for the moment in which nobody has taken it yet."""
    for _ in range(2 + 3):
        assert desk.admit(desk.request(), max_queued=2, rows=3).code == "OK"
    assert desk.admit(desk.request(), max_queued=2, rows=3).code == "FULL"


def test_rows_that_are_taken_are_no_room(desk: Desk) -> None:
    desk.waiting(n=3)
    desk.read_sched(count=3)
    assert [desk.admit(desk.request(), max_queued=1, rows=3).code for _ in range(2)] == ["OK", "FULL"]


def test_no_room_at_all(desk: Desk) -> None:
    assert desk.admit(desk.request(), max_queued=0).code == "FULL"
    assert contents(desk.bus) == {}


def test_bytes_are_bounded_by_their_total(desk: Desk) -> None:
    request = desk.request(payload="x" * 1_000)
    size = _payload_size(request)
    assert desk.admit(request, max_bytes=size * 2).code == "OK"
    assert desk.admit(desk.request(payload="x" * 1_000), max_bytes=size * 2).code == "OK"
    before = contents(desk.bus)
    assert desk.admit(desk.request(payload=""), max_bytes=size * 2).code == "FULL"
    assert contents(desk.bus) == before


def test_logprobs_of_a_prompt_count_as_bytes(desk: Desk) -> None:
    def size(n: int, top: int | None, prompt: str) -> int:
        params = replace(desk.params, prompt_logprobs=top)
        request = replace(desk.request(n=n, payload=prompt), params=params)
        assert desk.admit(request, max_bytes=1 << 30).code == "OK"
        return int(desk.bus.do("HGET", desk.bytes, request.uid)) - _payload_size(request)

    text = "some words " * 1000
    tokens = len(text) / 4
    assert size(1, None, text) == 0
    assert size(1, 0, text) == pytest.approx(tokens * 32, rel=0.1)
    assert size(2, 20, text) == pytest.approx(tokens * 2 * 21 * 32, rel=0.1)
    assert size(128, 20, text * 10) == MAX_PROMPT_LOGPROBS * 32


def test_a_request_larger_than_the_bound_passes_alone(desk: Desk) -> None:
    assert desk.admit(desk.request(payload="x" * 5_000), max_bytes=1_000).code == "OK"
    assert desk.admit(desk.request(payload=""), max_bytes=1_000).code == "FULL"


def test_models_and_classes_have_queues_of_their_own(desk: Desk) -> None:
    desk.admit(desk.request(), max_queued=1)
    others = [Desk(desk.bus, model="org"), Desk(desk.bus, model="org/Größe"), Desk(desk.bus, cls="batch")]
    for other in others:
        assert other.admit(other.request(), max_queued=1).code == "OK"
        assert len(other.read_in()) == 1
    assert len(desk.read_in()) == 1


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_request_that_redis_lost_is_admitted_again(desk: Desk, state: str) -> None:
    request = desk.queued() if state == "queued" else desk.running()[0]
    desk.bus.do("DEL", desk.keys.req(request.uid))
    assert desk.admit(request).code == "OK"
    size = str(_payload_size(request)).encode()
    assert desk.bus.do("HMGET", desk.bytes, request.uid, "total") == [size, size]


def test_waiting_needs_no_scheduler_group(desk: Desk) -> None:
    desk.waiting(n=2)
    assert desk.admit(desk.request()).waiting == 2
    desk.bus.do("XGROUP", "CREATE", desk.sched, SCHEDULERS, "0")
    assert desk.admit(desk.request()).waiting == 3
