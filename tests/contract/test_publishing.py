"""PUB: text, ends and the offset move together, once, in the hands of one epoch."""

from __future__ import annotations

import pytest

from common.bus import leases
from common.bus.client import FencedError, NoGroupError
from common.bus.handoffs import Text
from common.bus.keys import DETOKENIZERS
from common.messages import Usage
from tests.helpers.bus import LEASE_MS, TTL_MS, Desk
from tests.helpers.redis_state import contents


@pytest.fixture(autouse=True)
def _partition(desk: Desk) -> None:
    desk.open_tok()
    desk.take_partition()


def _group(desk: Desk) -> dict[bytes, object]:
    [info] = desk.bus.do("XINFO", "GROUPS", desk.tok)
    return dict(zip(info[::2], info[1::2], strict=True))


def test_text_and_offset_move_together(desk: Desk) -> None:
    request, (first, second) = desk.running(n=2)
    desk.generate(first, 2)
    desk.generate(second, 1)
    reply = desk.pub([Text(request.uid, 0, 2, 0, "Grüße 世"), Text(request.uid, 1, 1, 0, "b\n")])
    assert (reply.code, reply.offset) == ("OK", desk.stored())
    texts = [(e.choice, e.n, e.at, e.text) for e in desk.out(request.uid)[1:]]
    assert texts == [(0, 2, 0, "Grüße 世"), (1, 1, 0, "b\n")]
    assert desk.bus.do("XLEN", desk.tok) == 0


def test_the_lag_can_be_read_from_redis(desk: Desk) -> None:
    _, [job] = desk.running()
    desk.generate(job, 5)
    third = desk.bus.do("XRANGE", desk.tok, "-", "+")[2][0].decode()
    call = desk.pub_call(offset=third)
    call.args[4] = 3  # entries read
    desk.bus.run(call)
    info = _group(desk)
    assert (info[b"lag"], info[b"entries-read"]) == (2, 3)
    assert desk.bus.do("XLEN", desk.tok) == 2
    call = desk.pub_call()
    call.args[4] = 2
    desk.bus.run(call)
    assert _group(desk)[b"lag"] == 0


@pytest.mark.parametrize("last", [False, True])
def test_a_repeat_changes_nothing(desk: Desk, last: bool) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1, "stop")
    ends = [desk.finished(request.uid, n=1, text="x", finish="stop")]
    call = desk.pub_call([] if last else [Text(request.uid, 0, 1, 0, "x")], ends if last else [])
    assert desk.bus.run(call).code == "OK"
    before = contents(desk.bus)
    for _ in range(2):
        reply = desk.bus.run(call)
        assert (reply.code, reply.offset) == ("MOVED", desk.stored())
    assert contents(desk.bus) == before


def test_an_unexpected_offset_is_answered_with_the_stored_one(desk: Desk) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1)
    before = contents(desk.bus)
    reply = desk.pub([Text(request.uid, 0, 1, 0, "x")], expected="5-0")
    assert (reply.code, reply.offset) == ("MOVED", "0-0")
    assert contents(desk.bus) == before


def test_an_older_epoch_is_fenced(desk: Desk) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1)
    call = desk.pub_call([Text(request.uid, 0, 1, 0, "x")])
    desk.bus.do("HSET", desk.keys.detok_lease(0), "expiry", 0)
    assert desk.take_partition("detokenizer-2") == 2
    before = contents(desk.bus)
    with pytest.raises(FencedError):
        desk.bus.run(call)
    assert contents(desk.bus) == before
    assert desk.pub([Text(request.uid, 0, 1, 0, "x")]).code == "OK"


def test_expiry_alone_fences_no_owner(desk: Desk) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1)
    desk.bus.do("HSET", desk.keys.detok_lease(0), "expiry", 0)
    assert desk.pub([Text(request.uid, 0, 1, 0, "x")]).code == "OK"


def test_after_a_flush(desk: Desk) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1)
    call = desk.pub_call([Text(request.uid, 0, 1, 0, "x")])
    desk.bus.do("FLUSHALL")
    with pytest.raises(FencedError):
        desk.bus.run(call)
    desk.take_partition()
    with pytest.raises(NoGroupError):
        desk.bus.run(call)
    desk.bus.do("XADD", desk.tok, "1-0", "r", "x")
    with pytest.raises(NoGroupError):
        desk.bus.run(call)
    desk.bus.do("XGROUP", "CREATE", desk.tok, DETOKENIZERS, "0")
    assert desk.bus.run(call).code == "OK"
    assert not desk.bus.do("EXISTS", desk.keys.out(request.uid)), "a reply without a request is not made"


def test_the_last_choice_ends_the_reply(desk: Desk) -> None:
    request, (first, second) = desk.running(n=2)
    desk.generate(first, 2, "stop")
    desk.generate(second, 1, "length")
    desk.pub(finished=[desk.finished(request.uid, 0, 2, n=2, text="ab", finish="stop", stop='"b"')])
    assert "terminal" not in desk.req(request.uid)
    assert [entry.end for entry in desk.out(request.uid)] == ["", ""]
    desk.bus.do("XADD", desk.tok, "*", "v", "1", "r", "next")
    for key in (desk.keys.req(request.uid), desk.keys.out(request.uid), desk.keys.gen(request.uid, 1)):
        desk.bus.do("PEXPIRE", key, 10 * TTL_MS)
    desk.pub(finished=[desk.finished(request.uid, 1, 2, n=1, at=3, text="z", finish="length")])
    _, one, two = desk.out(request.uid)
    assert (one.choice, one.finish, one.stop, one.n, one.text) == (0, "stop", '"b"', 2, "ab")
    assert (two.choice, two.finish, two.stop, two.at, two.text) == (1, "length", "", 3, "z")
    assert (two.end, two.usage) == ("done", Usage(3, 3, 0))
    assert desk.req(request.uid)["terminal"] == "done"
    for key in (desk.keys.req(request.uid), desk.keys.out(request.uid), desk.keys.gen(request.uid, 1)):
        assert 0 < desk.bus.do("PTTL", key) <= TTL_MS
    desk.assert_empty()


def test_a_choice_finishes_once(desk: Desk) -> None:
    """A stop string and the engine's own end of the same choice: the first counts."""
    request, (first, _) = desk.running(n=2)
    desk.generate(first, 1)
    stop = desk.finished(request.uid, 0, 2, n=1, finish="stop", halt=True)
    length = desk.finished(request.uid, 0, 2, n=4, finish="length")
    desk.pub(finished=[stop, length])
    desk.generate(first, 1, "length")
    desk.pub(finished=[length])
    assert [entry.finish for entry in desk.out(request.uid)] == ["", "stop"]
    assert desk.req(request.uid)["completion_tokens"] == "1"


def test_an_error_of_a_choice_that_has_finished_is_nothing(desk: Desk) -> None:
    """A choice halted at its stop string comes back from the engine as cancelled; its siblings go on."""
    request, (first, _) = desk.running(n=2)
    desk.generate(first, 1)
    desk.pub(finished=[desk.finished(request.uid, 0, 2, n=1, finish="stop", halt=True)])
    desk.generate(first, 0, error="cancelled")
    desk.pub(finished=[desk.finished(request.uid, 0, 2, error="cancelled", message="Halted.")])
    assert "terminal" not in desk.req(request.uid)
    assert [entry.error for entry in desk.out(request.uid)] == ["", ""]


def test_an_error_ends_the_whole_request(desk: Desk) -> None:
    request, (first, second) = desk.running(n=2)
    desk.generate(second, 1)
    desk.pub([Text(request.uid, 1, 1, 0, "y")])
    desk.generate(first, 0, error="internal")
    desk.pub(finished=[desk.finished(request.uid, 0, 2, error="internal", message="Oh 世界.", param="p")])
    last = desk.out(request.uid)[-1]
    assert (last.end, last.error, last.message, last.param) == ("error", "internal", "Oh 世界.", "p")
    assert desk.members(desk.keys.cancel(0)) == {request.uid}, "the other choice is to stop"
    before = desk.out(request.uid)
    desk.generate(second, 0, error="cancelled")
    desk.pub(finished=[desk.finished(request.uid, 1, 2, error="cancelled", message="Stopped.")])
    assert desk.out(request.uid) == before
    desk.assert_empty()


@pytest.mark.parametrize("work_first", [False, True])
def test_a_stop_string_halts_the_engine(desk: Desk, work_first: bool) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1, "length" if work_first else "")
    desk.pub(finished=[desk.finished(request.uid, n=1, finish="stop", halt=True)])
    if not work_first:
        assert desk.tick().cancel == {f"{request.uid}/0"}
        assert desk.bus.do("ZCARD", desk.inflight) == 1
        desk.generate(job, 0, error="cancelled")
        desk.pub()
    assert [entry.end for entry in desk.out(request.uid)] == ["", "done"]
    desk.assert_empty()


def test_what_is_gone_or_ended_gets_nothing(desk: Desk) -> None:
    request, [job] = desk.running()
    desk.generate(job, 1)
    unknown = desk.request().uid
    end = {"n": 1, "text": "x", "finish": "stop"}
    desk.pub([Text(unknown, 0, 1, 0, "x")], [desk.finished(unknown, **end)])
    assert not desk.bus.do("EXISTS", desk.keys.out(unknown), desk.keys.req(unknown))
    desk.generate(job, 1)
    desk.bus.do("DEL", desk.keys.out(request.uid))
    desk.pub([Text(request.uid, 0, 1, 0, "x")], [desk.finished(request.uid, **end)])
    assert not desk.bus.do("EXISTS", desk.keys.out(request.uid))
    assert "terminal" not in desk.req(request.uid)


def test_a_broken_reply_takes_no_other_down(desk: Desk) -> None:
    broken, [first] = desk.running()
    whole, [second] = desk.running()
    desk.generate(first, 1)
    desk.generate(second, 1)
    desk.bus.do("SET", desk.keys.out(broken.uid), "x")
    assert desk.pub([Text(broken.uid, 0, 1, 0, "a"), Text(whole.uid, 0, 1, 0, "b")]).code == "OK"
    assert desk.out(whole.uid)[-1].text == "b"


def test_many_requests_in_one_commit(desk: Desk) -> None:
    runs = [desk.running() for _ in range(50)]
    for _, [job] in runs:
        desk.generate(job, 1, "stop")
    texts = [Text(request.uid, 0, 1, 0, "x") for request, _ in runs[:25]]
    ends = [desk.finished(request.uid, n=1, text="y", finish="stop") for request, _ in runs]
    desk.pub(texts, ends)
    assert [[e.text for e in desk.out(request.uid)[1:]] for request, _ in runs] == (
        [["x", "y"]] * 25 + [["y"]] * 25
    )
    desk.assert_empty()


def test_giving_a_partition_up_ends_no_commit(desk: Desk) -> None:
    """Between the release and the next owner, what the old owner still has in hand is right."""
    request, [job] = desk.running()
    desk.generate(job, 1)
    desk.bus.run(leases.release_partition(desk.keys, 0, "detokenizer-1"))
    assert desk.pub([Text(request.uid, 0, 1, 0, "x")]).code == "OK"
    desk.open("detokenizer-2")
    taken = desk.bus.run(leases.own_partition(desk.keys, 0, "detokenizer-2", LEASE_MS, take=True))
    assert (taken.epoch, taken.taken) == (2, True)
    with pytest.raises(FencedError):
        desk.pub()
