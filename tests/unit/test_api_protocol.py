"""The time a connection may take over its request's head, on uvicorn itself and real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable

import pytest
import uvicorn

from api import protocol

HEAD_S = 0.3
WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def says_hello(scope: dict, receive: object, send: Callable[[dict], Awaitable[None]]) -> None:
    if scope["path"] == "/slowly":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hel", "more_body": True})
    if scope["path"] != "/":
        await asyncio.sleep(4 * HEAD_S)
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", HEAD_S)


def talk(client: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    """One connection to a server with our protocol."""

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            says_hello, http=protocol.Protocol, ws="none", lifespan="off", log_config=None, access_log=False
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            async with asyncio.timeout(20):
                await client(reader, writer)
        finally:
            writer.close()
            server.should_exit = True
            await serving
            listener.close()

    asyncio.run(main())


async def hello(reader: asyncio.StreamReader) -> None:
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert await reader.readexactly(5) == b"hello"


async def refused(reader: asyncio.StreamReader) -> None:
    """408 in OpenAI's shape, and nothing after it."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), head
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    assert b"x-request-id: req_" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("sent", [b"", WHOLE[:20]], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come(sent: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start = time.monotonic()
        writer.write(sent)
        await refused(reader)
        assert time.monotonic() - start >= HEAD_S * 0.9

    talk(client)


def test_a_head_that_comes_byte_by_byte() -> None:
    """Signs of life do not count: it is the whole head that has its time."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = asyncio.create_task(refused(reader))
        for byte in WHOLE[:-1]:
            writer.write(bytes([byte]))
            await asyncio.sleep(HEAD_S / 10)
            if answer.done():
                break
        # A byte that meets the closed connection takes the answer away with it, but not the fact.
        with contextlib.suppress(ConnectionResetError):
            await answer

    talk(client)


def test_the_second_head_on_a_connection() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)
        await hello(reader)
        writer.write(WHOLE[:20])
        await refused(reader)

    talk(client)


def test_an_idle_connection_is_no_slow_head() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(WHOLE)
            await hello(reader)
            await asyncio.sleep(2 * HEAD_S)

    talk(client)


@pytest.mark.parametrize("further", [b"no request\r\n\r\n", b"GET / HTTP/1.1\r\n"])
@pytest.mark.parametrize("path", [b"/slowly", b"/late"])
def test_a_refusal_is_never_put_into_the_answer_to_another(path: bytes, further: bytes) -> None:
    """Of a client that sends ahead; a stream would end in what is none of it."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
        if path == b"/slowly":
            assert (await reader.readuntil(b"hel\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(further)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    talk(client)


@pytest.mark.parametrize(("size", "pause_s"), [(1 << 16, 0.0), (1, 0.02)], ids=["much", "for long"])
def test_a_body_that_goes_on_after_the_answer(
    monkeypatch: pytest.MonkeyPatch, size: int, pause_s: float
) -> None:
    """It is read for a while, so that the client sees its answer, and then cut off."""
    monkeypatch.setattr(protocol, "DISCARD_BYTES", 1 << 20)
    monkeypatch.setattr(protocol, "DISCARD_S", 0.3)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        await hello(reader)
        with pytest.raises(ConnectionError):
            await send_for_ever(writer)

    async def send_for_ever(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * size)
            await writer.drain()
            await asyncio.sleep(pause_s)

    talk(client)
