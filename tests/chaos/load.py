"""The clients: a load of planned requests over plain sockets, each recorded as its client saw it.

A client that is refused before its request was accepted asks again, as SDKs do. One whose plan says so comes
back elsewhere when its connection is cut, with what it saw last. Anything else that goes wrong is for the
check to judge.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.plans import Manner, Plan
from tests.helpers.asking import path_of

_REFUSALS = frozenset({429, 503})
_PAUSE_S = 0.25
#: How often the clients' loop looks at the clock, and how late it may be without having been deaf.
_BEAT_S, _LATE_S = 0.02, 0.05
_CUT = (asyncio.IncompleteReadError, ConnectionError)


@dataclass(slots=True)
class Outcome:
    """What became of one plan. Times are monotonic."""

    plan: Plan
    uid: str = ""
    status: int = 0
    #: Events of a stream without [DONE], or the one answer.
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    #: When text arrived: before the first the request may have waited in a queue.
    texts: list[float] = field(default_factory=list)
    #: When the request that was answered was sent, and when its answer had ended.
    sent: float = 0.0
    ended: float = 0.0
    error: dict[str, Any] | None = None
    done: bool = False
    cut: bool = False
    hung: bool = False
    left: bool = False
    refusals: int = 0
    #: Id of the last event, and how often the client came back.
    last: str = ""
    returns: int = 0

    def take(self, event: dict[str, Any]) -> None:
        """One event of the stream, or the whole answer."""
        self.times.append(time.monotonic())
        if "error" in event:
            self.error = event["error"]
            return
        self.uid = self.uid or str(event["id"]).partition("-")[2]
        self.events.append(event)
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event["choices"]):
            self.texts.append(self.times[-1])


class _RefusedError(Exception):
    """Not accepted: nothing has happened, ask again."""


class Load:
    """Asks every plan once, ``streams`` at a time, of the ports in turn."""

    def __init__(self, ports: Sequence[int], plans: Iterable[Plan], *, streams: int, bound_s: float) -> None:
        self._ports = ports
        self._waiting = iter(plans)
        self._streams = streams
        self._bound_s = bound_s
        self.outcomes: list[Outcome] = []
        self.live: set[int] = set()
        self.finished = 0
        self.over = asyncio.Event()
        #: When the clients' own loop stood still, so that nothing could be heard: (start, end).
        self.deaf: list[tuple[float, float]] = []

    async def run(self) -> list[Outcome]:
        """Returns when all have ended."""
        beat = asyncio.create_task(self._beat())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._streams):
                    group.create_task(self._client())
        finally:
            beat.cancel()
            self.over.set()
        return self.outcomes

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(_BEAT_S)
            now = time.monotonic()
            if now - last > _BEAT_S + _LATE_S:
                self.deaf.append((last, now))
            last = now

    async def _client(self) -> None:
        for plan in self._waiting:
            outcome = Outcome(plan)
            self.outcomes.append(outcome)
            try:
                async with asyncio.timeout(self._bound_s):
                    await self._until_accepted(outcome)
            except TimeoutError:
                outcome.hung = True
            outcome.ended = time.monotonic()
            self.finished += 1

    async def _until_accepted(self, outcome: Outcome) -> None:
        while True:
            turn = outcome.plan.number + outcome.refusals + outcome.returns
            try:
                await _ask(self._ports[turn % len(self._ports)], outcome)
            except _RefusedError:
                outcome.refusals += 1
                await asyncio.sleep(_PAUSE_S)
            else:
                if not (outcome.cut and outcome.plan.returns):
                    return
                outcome.cut = False
                outcome.returns += 1


async def _ask(port: int, outcome: Outcome) -> None:
    """One try. Raises `_RefusedError`; whatever else happens is in the outcome."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    except OSError:
        raise _RefusedError from None
    try:
        outcome.sent = time.monotonic()
        writer.write(_request(outcome))
        await _read(reader, outcome)
    except _CUT:
        outcome.cut = True
        if not outcome.status and outcome.plan.manner is not Manner.LEAVES:
            # Nobody has said yes; whether the request runs is unknown, and asking again is harmless here.
            outcome.cut = False
            raise _RefusedError from None
    finally:
        writer.close()


def _request(outcome: Outcome) -> bytes:
    """What the client sends: its request, or that it wants to go on."""
    plan, data = outcome.plan, b""
    if outcome.last:
        lines = [f"GET /v1/streams/{outcome.uid} HTTP/1.1", f"last-event-id: {outcome.last}"]
    else:
        data = json.dumps(plan.body).encode()
        lines = [f"POST {path_of(plan.body)} HTTP/1.1", f"content-length: {len(data)}"]
        lines += [f"idempotency-key: plan {plan.number}"] * plan.returns
    lines += ["host: chaos", "connection: close", "content-type: application/json", "", ""]
    return "\r\n".join(lines).encode() + data


async def _read(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    headers: dict[bytes, bytes] = {}
    while (line := (await reader.readuntil(b"\r\n")).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    if status in _REFUSALS:
        raise _RefusedError
    outcome.status = status
    if b"event-stream" not in headers.get(b"content-type", b""):
        if outcome.plan.manner is Manner.LEAVES and status == 200:
            outcome.left = True
        outcome.take(json.loads(b"".join([part async for part in _parts(reader, headers)])))
        outcome.done = True
        return
    rest = b""
    async for part in _parts(reader, headers):
        *events, rest = (rest + part).split(b"\n\n")
        if _leaves(outcome, events):
            return
    assert not rest or outcome.done, rest


def _leaves(outcome: Outcome, events: list[bytes]) -> bool:
    """Takes the events; whether the client goes away now."""
    plan = outcome.plan
    for block in events:
        if block == b": keep-alive":  # Redis may be away for longer than a stream may be silent
            continue
        name, _, event = block.rpartition(b"\n")
        assert not name or (plan.returns and name.startswith(b"id: ")), name
        assert event.startswith(b"data: "), event
        assert not outcome.done, "something comes after [DONE]"
        outcome.last = name[4:].decode() or outcome.last
        if event == b"data: [DONE]":
            outcome.done = True
        else:
            outcome.take(json.loads(event[6:]))
    if plan.manner is Manner.LEAVES and len(outcome.events) >= plan.leaves_after and not outcome.done:
        outcome.left = True
    return outcome.left


async def _parts(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    """The body as it comes, out of its chunks."""
    if headers.get(b"transfer-encoding") != b"chunked":
        yield await reader.readexactly(int(headers[b"content-length"]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
