"""The three kinds of connection: what their errors are called, and what survives a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time

import pytest

from common.bus import client
from common.bus.admission import admit
from common.bus.client import (
    AsyncBus,
    BlockingBus,
    Bus,
    BusDownError,
    BusFullError,
    FencedError,
    NoGroupError,
)
from common.bus.embedded import EmbeddedRedis
from common.bus.keys import Keys
from common.bus.leases import renew
from common.bus.server import wait_for_server
from common.errors import MillstreamError
from tests.helpers.bus import Desk

ERRORS = [
    ("FENCED lease is dead or gone", FencedError),
    ("NOGROUP No such key 'x' or consumer group 'g'", NoGroupError),
    ("ERR The XGROUP subcommand requires the key to exist.", NoGroupError),
    ("ERR no such key", NoGroupError),
    ("OOM command not allowed when used memory > 'maxmemory'.", BusFullError),
    ("READONLY You can't write against a read only replica.", BusDownError),
    ("LOADING Redis is loading the dataset in memory", BusDownError),
    ("MASTERDOWN Link with MASTER is down", BusDownError),
    ("CLUSTERDOWN The cluster is down", BusDownError),
    ("TRYAGAIN Multiple keys request during rehashing of slot", BusDownError),
    ("BUSY Redis is busy running a script.", BusDownError),
    ("UNKILLABLE Sorry the script already executed write commands", BusDownError),
    ("MISCONF Errors writing to the AOF file: No space left on device", BusDownError),
    ("NOREPLICAS Not enough good replicas to write.", BusDownError),
    ("NOAUTH Authentication required.", BusDownError),
    ("WRONGTYPE Operation against a key holding the wrong kind of value", MillstreamError),
    ("ERR the word NOGROUP inside a sentence", MillstreamError),
    ("BUSYGROUP Consumer Group name already exists", MillstreamError),
]


@pytest.mark.parametrize(("text", "expected"), ERRORS, ids=[text.split(" ")[0] for text, _ in ERRORS])
def test_errors_are_ours(server: EmbeddedRedis, bus: Bus, text: str, expected: type[MillstreamError]) -> None:
    """The server says it, through a script; all clients understand the same."""
    say = ("EVAL", "return redis.error_reply(ARGV[1])", 0, text)
    quick = Bus(server.url, name="quick", retries=0)
    blocking = BlockingBus(server.url, name="blocking")

    async def ask() -> None:
        asynchronous = AsyncBus(server.url, name="async")
        try:
            await asynchronous.do(*say)
        finally:
            await asynchronous.close()

    for call in (lambda: quick.do(*say), lambda: blocking.do(*say), lambda: asyncio.run(ask())):
        with pytest.raises(MillstreamError) as caught:
            call()
        assert type(caught.value) is expected
    assert quick.do("PING") == blocking.do("PING") == b"PONG"
    quick.close()
    blocking.close()


def test_a_full_redis_says_so(server: EmbeddedRedis, bus: Bus, desk: Desk) -> None:
    bus.do("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(BusFullError):
            bus.do("SET", "k", "v")
        with pytest.raises(BusFullError):
            desk.admit(desk.request())
    finally:
        bus.do("CONFIG", "SET", "maxmemory", 0)


def test_nobody_listens(port: int) -> None:
    url = f"redis://127.0.0.1:{port}"
    began = time.monotonic()
    bus = Bus(url, name="test", retries=1)
    with pytest.raises(BusDownError):
        bus.do("PING")
    with pytest.raises(BusDownError):
        wait_for_server(url, Keys(), 2, timeout_s=0.3)
    bus.close()

    async def ask() -> None:
        asynchronous = AsyncBus(url, name="test")
        try:
            await asynchronous.do("PING")
        finally:
            await asynchronous.close()

    with pytest.raises(BusDownError):
        asyncio.run(ask())
    assert time.monotonic() - began < 8


def test_a_server_that_does_not_answer_is_down(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        bus = Bus(f"redis://127.0.0.1:{port}", name="test", timeout_s=0.2, retries=1)
        began = time.monotonic()
        with pytest.raises(BusDownError):
            bus.do("PING")
        assert time.monotonic() - began < 4
        bus.close()


def test_commands_survive_lost_connections(server: EmbeddedRedis, bus: Bus) -> None:
    other = Bus(server.url, name="other")
    for n in range(5):
        other.do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert bus.do("INCR", "n") == n + 1
        assert bus.run(renew(Desk(bus).keys, 0, "w", 1_000, opening=True)) > 0
    other.close()


def test_a_blocking_read_is_not_sent_twice(server: EmbeddedRedis, bus: Bus) -> None:
    """A retry of its own would strand what the first one was given."""
    reader = BlockingBus(server.url, name="reader")
    reader.do("PING")
    bus.do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with pytest.raises(BusDownError):
        reader.do("INCR", "n")
    assert reader.do("INCR", "n") == 1
    reader.close()


def test_a_blocking_read_may_last_its_whole_time(server: EmbeddedRedis, bus: Bus) -> None:
    reader = BlockingBus(server.url, name="reader")
    assert reader.do("XREAD", "BLOCK", client.BLOCK_MS, "STREAMS", "s", "$") is None
    reader.close()


def test_threads_do_not_mix_replies(server: EmbeddedRedis, bus: Bus) -> None:
    wrong: list[object] = []

    def echo(word: bytes) -> None:
        wrong.extend(got for _ in range(300) if (got := bus.do("ECHO", word)) != word)

    threads = [threading.Thread(target=echo, args=(b"%d" % n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong


def test_a_connection_that_uvloop_finds_closed(
    server: EmbeddedRedis, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis closed it between two writes: uvloop calls that a RuntimeError, and redis-py does not know it."""
    connect, made, reported = client.blocking_connection, [], []

    async def closed(*command: object, **options: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    def unlucky(url: str, *, name: str) -> object:
        made.append(connect(url, name=name))
        if len(made) == 1:
            made[0].send_packed_command = closed
        return made[-1]

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        monkeypatch.setattr(client, "blocking_connection", unlucky)
        asynchronous = AsyncBus(server.url, name="api")
        assert await asynchronous.do("ECHO", "x") == b"x"
        await asynchronous.close()

    asyncio.run(main())
    gc.collect()
    assert (len(made), reported) == (2, [])


def test_a_cancelled_caller_does_not_cut_its_command_short(
    server: EmbeddedRedis, bus: Bus, desk: Desk
) -> None:
    async def main() -> None:
        asynchronous = AsyncBus(server.url, name="api")
        requests = [desk.request() for _ in range(30)]
        for n, request in enumerate(requests):
            call = admit(desk.keys, request, desk.limits())
            task = asyncio.create_task(asynchronous.run(call))
            for _ in range(n % 10):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # it may have ended by now
                await task
        # A task cancelled before its first step has sent nothing; all others are finished.
        async with asyncio.timeout(10):
            while await asynchronous.do("XLEN", desk.work_in) < 27:
                await asyncio.sleep(0.01)
        whole = [await asynchronous.do("EXISTS", desk.keys.req(request.uid)) for request in requests]
        assert sum(whole) == await asynchronous.do("XLEN", desk.work_in) == 27
        await asynchronous.close()

    asyncio.run(main())


def test_asynchronous_commands_survive_lost_connections(server: EmbeddedRedis, bus: Bus) -> None:
    async def main() -> None:
        asynchronous = AsyncBus(server.url, name="api")
        for n in range(5):
            kill = asyncio.to_thread(bus.do, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            words = asyncio.gather(*(asynchronous.do("ECHO", f"{n}-{m}") for m in range(200)))
            _, got = await asyncio.gather(kill, words)
            assert got == [f"{n}-{m}".encode() for m in range(200)]
        await asynchronous.close()

    asyncio.run(main())


def test_an_answer_that_does_not_come_is_not_waited_for(port: int) -> None:
    async def main() -> None:
        asynchronous = AsyncBus(f"redis://127.0.0.1:{port}", name="api", timeout_s=0.3)
        with pytest.raises(BusDownError):
            async with asyncio.timeout(10):
                await asynchronous.do("PING")
        await asynchronous.close()

    with socket.create_server(("127.0.0.1", port)):
        asyncio.run(main())


def test_a_refusal_is_its_own_commands_alone(server: EmbeddedRedis, bus: Bus) -> None:
    async def main() -> None:
        asynchronous = AsyncBus(server.url, name="api")
        commands = [("SET", "s", "x"), ("INCR", "s"), ("ECHO", "y"), ("NONSENSE",), ("ECHO", "z")]
        got = await asyncio.gather(*(asynchronous.do(*each) for each in commands), return_exceptions=True)
        assert [got[0], got[2], got[4]] == [b"OK", b"y", b"z"]
        assert all(isinstance(got[n], MillstreamError) for n in (1, 3))
        await asynchronous.close()

    asyncio.run(main())


def test_many_at_once_share_one_connection(server: EmbeddedRedis, bus: Bus) -> None:
    async def main() -> None:
        asynchronous = AsyncBus(server.url, name="crowd")
        numbers = await asyncio.gather(*(asynchronous.do("INCR", "n") for _ in range(300)))
        assert sorted(numbers) == list(range(1, 301))
        clients = await asynchronous.do("CLIENT", "LIST")
        assert clients.count(b"name=crowd") == 1
        await asynchronous.close()

    asyncio.run(main())
