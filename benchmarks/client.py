"""A load client for OpenAI-style streams, cheap enough to share two cores with the server it measures.

It speaks HTTP over plain sockets and works the same against any server with `/v1/completions`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Stream:
    """What one streamed reply looked like from outside. Times in seconds since the request was sent."""

    status: int = 0
    #: When it was sent, on `time.perf_counter`; and the request's id on the bus.
    started: float = 0.0
    uid: str = ""
    #: When each event with text arrived.
    events: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first event with text."""
        return self.events[0]

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.events[-1] - self.events[0]) / max(1, self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """A finished run."""

    streams: Sequence[Stream]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(stream.completion_tokens for stream in self.streams)

    @property
    def events(self) -> int:
        return sum(len(stream.events) for stream in self.streams)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def median(self, what: str) -> float:
        """Median of `ttft` or `tpot` over the streams, in milliseconds."""
        return 1000 * statistics.median(getattr(stream, what) for stream in self.streams)


async def stream_once(port: int, path: str, body: dict[str, object]) -> Stream:
    """Sends one streaming request and reads it to its end."""
    result = Stream()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    result.started = start = time.perf_counter()
    try:
        writer.write(head.encode() + payload)
        async with asyncio.timeout(_TIMEOUT_S):
            result.status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
            await _read_events(reader, result, start)
    finally:
        writer.close()
    return result


async def _read_events(reader: asyncio.StreamReader, result: Stream, start: float) -> None:
    if result.status != 200:
        result.error = (await reader.read()).decode(errors="replace")
        return
    rest = b""
    while data := await reader.read(1 << 16):
        now = time.perf_counter() - start
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            start_of_json = event.find(b"data: {")  # behind the frame of a chunk, which is sent whole
            if start_of_json >= 0:
                _take(event[start_of_json + 6 :], result, now)


def _take(event: bytes, result: Stream, now: float) -> None:
    if b'"text":"' in event or b'"text": "' in event or b'"content":' in event:
        if b'"text":""' not in event and b'"text": ""' not in event:
            if not result.events:
                result.uid = str(json.loads(event)["id"]).partition("-")[2]
            result.events.append(now)
        return
    parsed = json.loads(event)
    if parsed.get("error"):
        result.error = json.dumps(parsed["error"])
    elif parsed.get("usage"):
        result.completion_tokens = parsed["usage"]["completion_tokens"]


async def run_load(port: int, path: str, bodies: Sequence[dict[str, object]], concurrency: int) -> Load:
    """Keeps ``concurrency`` requests going until all bodies are done. Raises on any that failed."""
    waiting = iter(bodies)
    streams: list[Stream] = []

    async def worker() -> None:
        streams.extend([await stream_once(port, path, body) for body in waiting])

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    seconds = time.perf_counter() - start
    failed = [stream for stream in streams if stream.error or not stream.events]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(streams)} requests failed: {failed[0].status} {failed[0].error[:300]}"
        )
    return Load(streams, seconds)
