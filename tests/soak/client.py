"""Clients of the long runs: plain sockets and little work per event, since the server has the same cores."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field

import orjson

from tests.helpers.asking import Body, path_of

#: Nothing here takes longer.
TIMEOUT_S = 180.0
#: As over the Internet. The loopback's segments are so large that the kernel would buffer megabytes a stream.
_SEGMENT = 1400


@dataclass(slots=True)
class Answer:
    """What one client saw. Times are monotonic."""

    status: int = 0
    sent: float = 0.0
    ended: float = 0.0
    #: When text came.
    texts: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    error: str = ""
    done: bool = False

    @property
    def seconds(self) -> float:
        """From the request to the last byte of its answer."""
        return self.ended - self.sent

    @property
    def ttft(self) -> float:
        return self.texts[0] - self.sent

    @property
    def tpot(self) -> float:
        """Time per token after the first."""
        return (self.texts[-1] - self.texts[0]) / max(1, self.tokens - 1)

    def take(self, data: bytes) -> None:
        """One event, without its `data: `."""
        if data == b"[DONE]":
            self.done = True
            return
        event = orjson.loads(data)
        if "error" in event:
            self.error = str(event["error"])
        elif event["choices"]:
            if text := event["choices"][0].get("text"):
                self.texts.append(time.monotonic())
                self.text += text
        elif event["usage"]:
            self.tokens = event["usage"]["completion_tokens"]


def request_of(body: Body) -> bytes:
    """The request as it goes over the wire."""
    data = orjson.dumps(body)
    head = (
        f"POST {path_of(body)} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def streaming(body: Body) -> Body:
    """The same as a stream, which ends with its usage."""
    return {"stream_options": {"include_usage": True}} | body | {"stream": True}


async def ask(port: int, body: Body) -> Answer:
    """One stream, read as fast as it comes; a refusal is an answer as well."""
    answer = Answer(sent=time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(request_of(streaming(body)))
            head = await reader.readuntil(b"\r\n\r\n")
            answer.status = int(head.split(b" ", 2)[1])
            rest = b""
            while data := await reader.read(1 << 16):
                rest += data
                if answer.status == 200:
                    *events, rest = rest.split(b"\n\n")
                    for event in events:
                        if (start := event.find(b"data: ")) >= 0:  # behind the frame of a chunk
                            answer.take(event[start + 6 :])
        if answer.status != 200:
            answer.error = rest.decode(errors="replace")
    finally:
        writer.close()
    answer.ended = time.monotonic()
    return answer


async def leave(port: int, body: Body, after_s: float) -> None:
    """A client that closes its connection in the middle, without having read anything."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_of(body))
    await asyncio.sleep(after_s)
    writer.close()


async def read_slowly(port: int, body: Body, *, bytes_per_s: int, stop: asyncio.Event) -> int:
    """Reads a stream in sips until told to stop, then closes it. Returns how many bytes it has read."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, request_of(streaming(body)))
        size = 0
        while not stop.is_set():
            async with asyncio.timeout(TIMEOUT_S):
                data = await loop.sock_recv(connection, bytes_per_s)
            if not data:
                break
            size += len(data)
            await asyncio.sleep(len(data) / bytes_per_s)
        return size
