"""A reply whose request Redis has lost: when it is put back, when tried again, and when given up."""

from __future__ import annotations

import asyncio

import pytest

from api.client import ClientGoneError
from api.replies import LostRequestError, Reply
from common.errors import DeadlineError, MillstreamError, QueueFullError, UnavailableError
from common.messages import Kind, OutEntry, Request
from common.sampling import SamplingParams

ACCEPTED = OutEntry("1-0", accepted=3)
TEXT = OutEntry("2-0", choice=0, n=1, text="a")


class Silence:
    """A subscription: what comes, one thing at a time; [] is a silence long enough to look the request up."""

    def __init__(self, *comes: list[OutEntry]) -> None:
        self._comes = list(comes)
        self.last: OutEntry | None = None

    async def next(self, timeout_s: float) -> list[OutEntry]:
        entries = self._comes.pop(0)
        self.last = entries[-1] if entries else self.last
        return entries

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Home:
    """A process whose Redis has lost the request until it was put back."""

    def __init__(self, *refusals: MillstreamError) -> None:
        self._refusals = list(refusals)
        self.lost = True
        self.tries = 0

    async def is_lost(self, request: Request) -> bool:
        return self.lost

    async def readmit(self, request: Request, deadline: float) -> None:
        self.tries += 1
        if self._refusals:
            raise self._refusals.pop(0)

    def closed(self, reply: Reply, *, ended: bool) -> None:
        pass


class Client:
    def on_gone(self, call: object) -> None:
        assert not isinstance(call, ClientGoneError)

    def close(self) -> None:
        pass


def entries(
    home: Home, *comes: list[OutEntry], count: int = 2, stream: bool = True
) -> tuple[list[list[OutEntry]], int]:
    """What so many calls of `next` return, and how often the reply began anew."""
    request = Request(
        uid="0-1", kind=Kind.COMPLETION, model="m", params=SamplingParams(seed=1), payload={},
        reply={"stream": stream}, n=1, cls="interactive", tenant="", api="api-1",
    )  # fmt: skip

    async def read() -> tuple[list[list[OutEntry]], int]:
        deadline = asyncio.get_running_loop().time() + 60
        reply = Reply(home, request, Silence(*comes), Client(), deadline)
        try:
            return [await reply.next() for _ in range(count)], reply.restarts
        finally:
            reply.close()

    return asyncio.run(read())


@pytest.mark.parametrize("refusal", [UnavailableError(), QueueFullError()])
def test_a_redis_that_takes_nothing_yet_is_asked_again(refusal: MillstreamError) -> None:
    """It has just lost its data, and is read-only, full or away: the client waits until its deadline."""
    home = Home(refusal, refusal)
    assert entries(home, [ACCEPTED], [], [], [], [TEXT])[0] == [[ACCEPTED], [TEXT]]
    assert home.tries == 3


def test_every_try_starts_the_text_anew() -> None:
    """An ADMIT without an answer may have happened."""
    assert entries(Home(UnavailableError()), [TEXT], [], [TEXT], stream=False)[1] == 1


def test_a_reply_ends_at_its_deadline() -> None:
    async def wait() -> None:
        loop = asyncio.get_running_loop()
        request = Request("0-1", Kind.COMPLETION, "m", SamplingParams(seed=1), {}, {"stream": True})
        reply = Reply(Home(), request, Silence([], []), Client(), loop.time() + 0.01)
        await asyncio.sleep(0.02)
        await reply.next()

    with pytest.raises(DeadlineError):
        asyncio.run(wait())


def test_a_request_is_put_back_once() -> None:
    with pytest.raises(LostRequestError):
        entries(Home(), [ACCEPTED], [], [])


def test_what_has_sent_text_is_not_put_back() -> None:
    home = Home()
    with pytest.raises(LostRequestError):
        entries(home, [TEXT], [])
    assert home.tries == 0
