"""Following reply streams: latency, slow readers, restarts, several readers of one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from common.bus import replies
from common.bus.client import AsyncBus, Bus
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys, new_uid
from common.bus.replies import Replies, Subscription
from common.messages import OutEntry
from tests.helpers.bus import Desk
from tests.helpers.servers import BOTH, binary_of

KEYS = Keys()
TIMEOUT_S = 10.0


@asynccontextmanager
async def _following(url: str, partitions: int = 2) -> AsyncIterator[Replies]:
    bus = AsyncBus(url, name="api")
    following = Replies(bus, KEYS, partitions, name="api")
    following.start()
    try:
        yield following
    finally:
        await following.stop()
        await bus.close()


def _write(desk: Desk, uid: str, first: int, count: int = 1) -> None:
    for n in range(first, first + count):
        fields = ("at", f"0 {n} 0", "text", f"<{n}>")
        desk.bus.do("XADD", KEYS.out(uid), "*", *fields)


async def _take(sub: Subscription, count: int) -> list[OutEntry]:
    """At least ``count`` entries, or the test fails."""
    got: list[OutEntry] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(got) < count:
            got += await sub.next(TIMEOUT_S)
    return got


async def _nothing_more(sub: Subscription) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await sub.next(TIMEOUT_S)


def _numbers(entries: list[OutEntry]) -> list[int]:
    return [entry.n for entry in entries]


def test_entries_come_in_order_and_once(server: EmbeddedRedis, desk: Desk) -> None:
    async def main() -> None:
        uids = [new_uid(p) for p in (0, 1, 0, 1)]
        _write(desk, uids[0], 0, 3)  # before anybody follows
        async with _following(server.url) as following:
            subs = [following.subscribe(uid) for uid in uids]
            for round_ in range(20):
                for uid in uids:
                    await asyncio.to_thread(_write, desk, uid, 3 + round_)
            for sub, uid in zip(subs, uids, strict=True):
                first = 0 if uid == uids[0] else 3
                got = await _take(sub, 23 - first)
                assert _numbers(got) == list(range(first, 23))
                assert {entry.text for entry in got} == {f"<{n}>" for n in range(first, 23)}

    asyncio.run(main())


def test_a_subscription_does_not_wait_for_the_running_read(server: EmbeddedRedis, desk: Desk) -> None:
    async def main() -> float:
        async with _following(server.url) as following:
            idle = following.subscribe(new_uid(0))
            slowest = 0.0
            for _ in range(20):
                await asyncio.sleep(0.01)  # the read of the others blocks by now
                uid = new_uid(0)
                _write(desk, uid, 1)
                began = time.perf_counter()
                sub = following.subscribe(uid)
                await _take(sub, 1)
                slowest = max(slowest, time.perf_counter() - began)
                sub.close()
            idle.close()
            return slowest

    assert asyncio.run(main()) < 1.0, "a blocked read lasts 2 s"


def test_the_first_entry_after_idling_comes_at_once(server: EmbeddedRedis, desk: Desk) -> None:
    async def main() -> float:
        async with _following(server.url) as following:
            await asyncio.sleep(0.05)
            uid = new_uid(1)
            sub = following.subscribe(uid)
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            await asyncio.to_thread(_write, desk, uid, 1)
            await _take(sub, 1)
            return time.perf_counter() - began

    assert asyncio.run(main()) < 1.0


def test_a_slow_reader_is_left_out_and_loses_nothing(
    server: EmbeddedRedis, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "BUFFER", 16)
    monkeypatch.setattr(replies, "_COUNT", 8)

    async def main() -> None:
        slow_uid, fast_uid = new_uid(0), new_uid(0)
        async with _following(server.url) as following:
            slow, fast = following.subscribe(slow_uid), following.subscribe(fast_uid)
            await asyncio.to_thread(_write, desk, slow_uid, 0, 100)
            await asyncio.to_thread(_write, desk, fast_uid, 0, 50)
            assert _numbers(await _take(fast, 50)) == list(range(50))
            first = await slow.next(TIMEOUT_S)
            assert 16 <= len(first) < 16 + 8, "bounded by the buffer and one read"
            rest = await _take(slow, 100 - len(first))
            assert _numbers(first + rest) == list(range(100))

    asyncio.run(main())


def test_two_readers_of_one_request(server: EmbeddedRedis, desk: Desk) -> None:
    async def main() -> None:
        uid = new_uid(0)
        _write(desk, uid, 0, 5)
        async with _following(server.url) as following:
            early = following.subscribe(uid)
            got = await _take(early, 5)
            late = following.subscribe(uid)
            middle = following.subscribe(uid, got[2].id)
            assert following.following() == 3
            assert _numbers(await _take(late, 5)) == [0, 1, 2, 3, 4]
            assert _numbers(await _take(middle, 2)) == [3, 4]
            await _nothing_more(early)
            await asyncio.to_thread(_write, desk, uid, 5, 2)
            for sub in (early, late, middle):
                assert _numbers(await _take(sub, 2)) == [5, 6]
            early.close()
            early.close()
            await asyncio.to_thread(_write, desk, uid, 7)
            assert _numbers(await _take(late, 1)) == _numbers(await _take(middle, 1)) == [7]
            late.close()
            middle.close()
            assert following.following() == 0

    asyncio.run(main())


def test_more_behind_than_one_read_brings(
    server: EmbeddedRedis, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "_COUNT", 7)

    async def main() -> None:
        uid = new_uid(0)
        _write(desk, uid, 0, 100)
        async with _following(server.url) as following:
            first = following.subscribe(uid)
            head = await _take(first, 60)
            second = following.subscribe(uid)
            assert _numbers(head + await _take(first, 100 - len(head))) == list(range(100))
            assert _numbers(await _take(second, 100)) == list(range(100))

    asyncio.run(main())


def test_foreign_words_are_refused_where_they_come_in(server: EmbeddedRedis, desk: Desk) -> None:
    async def main() -> None:
        uid = new_uid(1)
        async with _following(server.url) as following:
            for strange in ("", "x", "1", new_uid(2), "01" + uid[1:], uid.upper() + "!", uid + "\n"):
                with pytest.raises(ValueError, match="not a request id"):
                    following.subscribe(strange)
            for cursor in ("", "x", "-1", "1-x", str(2**64), f"1-{2**64}"):
                with pytest.raises(ValueError, match=r"entry id|invalid literal"):
                    following.subscribe(uid, cursor)
            assert following.following() == 0

    asyncio.run(main())


def test_an_entry_written_by_hand_keeps_nobody_from_a_reply(server: EmbeddedRedis, desk: Desk) -> None:
    async def main() -> None:
        broken, whole = new_uid(0), new_uid(0)
        async with _following(server.url) as following:
            subs = [following.subscribe(broken), following.subscribe(whole)]
            for fields in (("at", "x"), ("usage", "1"), ("text", b"\xff"), ("at", "1 1 0")):
                await asyncio.to_thread(desk.bus.do, "XADD", KEYS.out(broken), "*", *fields)
            await asyncio.to_thread(_write, desk, broken, 9)
            await asyncio.to_thread(_write, desk, whole, 1)
            assert _numbers(await _take(subs[1], 1)) == [1]
            assert _numbers(await _take(subs[0], 5))[-1] == 9

    asyncio.run(main())


def test_waking_and_closing(server: EmbeddedRedis, desk: Desk) -> None:
    async def main() -> None:
        async with _following(server.url) as following:
            sub = following.subscribe(new_uid(0))
            asyncio.get_running_loop().call_later(0.02, sub.wake)
            async with asyncio.timeout(TIMEOUT_S):
                assert await sub.next(TIMEOUT_S) == []
            short = following.subscribe(new_uid(0))
            async with asyncio.timeout(TIMEOUT_S):
                assert await short.next(0.05) == []
            sub.close()
            short.close()

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_entries_come_in_the_turn_in_which_a_silence_ends(
    server: EmbeddedRedis, desk: Desk, fails: bool
) -> None:
    """What took them has all it wanted: nobody may wait for more."""

    def take(entries: list[OutEntry]) -> bool:
        if fails:
            raise ValueError("unreadable")
        return True

    async def main() -> None:
        async with _following(server.url) as running:
            sub = running.subscribe(new_uid(0))
            pouring = asyncio.create_task(sub.pour(take, 30.0))
            await asyncio.sleep(0.05)
            sub.wake()
            sub.feed([OutEntry("1-0", end="done")], b"1-0")
            async with asyncio.timeout(5):
                if fails:
                    with pytest.raises(ValueError, match="unreadable"):
                        await pouring
                else:
                    assert await pouring
            sub.close()

    asyncio.run(main())


@pytest.fixture(params=BOTH)
def restartable(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=binary_of(request.param), appendfsync="always") as running:
        yield running


def test_a_restart_of_redis_loses_and_repeats_nothing(restartable: EmbeddedRedis) -> None:
    async def main() -> None:
        bus = Bus(restartable.url, name="test")
        desk = Desk(bus)
        uid = new_uid(0)
        async with _following(restartable.url) as following:
            sub, idle = following.subscribe(uid), following.subscribe(new_uid(1))
            _write(desk, uid, 0, 3)
            got = await _take(sub, 3)
            await asyncio.to_thread(restartable.kill)
            await asyncio.sleep(0.3)
            late = following.subscribe(uid)  # while Redis is away
            await asyncio.to_thread(restartable.start)
            await asyncio.to_thread(_write, desk, uid, 3, 2)
            got += await _take(sub, 2)
            assert _numbers(got) == [0, 1, 2, 3, 4]
            assert _numbers(await _take(late, 5)) == [0, 1, 2, 3, 4]
            idle.close()
        bus.close()

    asyncio.run(main())
