"""Faults of Redis itself, each played on a whole fleet under load.

A fault is a coroutine that breaks the server, mends it again, and notes what only it can know.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import redis

from common.settings import Command
from tests.chaos.disk import HeldSync, Tail, Witness
from tests.chaos.fleet import Fleet
from tests.chaos.load import Load
from tests.chaos.state import State
from tests.helpers.api_process import Answer
from tests.helpers.asking import completion, null_text, post, reply_of_answer, request
from tests.helpers.lossy_proxy import Fault as NetworkFault

_POLL_S = 0.02
_ASK_EVERY_S = 0.2
#: Every wait here has this bound.
_WAIT_S = 60.0
#: What a disk loses with `appendfsync everysec`, at most.
_TAIL_S = 2.0
#: Longer than a registry's poll and its announcements live.
_FULL_S = 6.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A new request, sent while Redis was out of order."""

    at: float
    seconds: float
    answer: Answer


@dataclass(slots=True)
class Scene:
    """What a fault may touch, and what it notes."""

    fleet: Fleet
    state: State
    load: Load
    #: Requests that were sent while Redis was out of order.
    asked: list[Asked] = field(default_factory=list)
    #: Ids of the requests that were sent here, and answered.
    uids: set[str] = field(default_factory=set)
    #: Writes that Redis had acknowledged and lost.
    lost_writes: int = 0
    #: When Redis was in order again.
    mended: float = 0.0
    #: From then until a new request was answered.
    back_s: float = 0.0
    _last_asked: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.fleet.server.url

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=10)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                while not condition():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"not within {_WAIT_S:g} s: {what}") from None

    async def under_way(self) -> None:
        """Waits until streams are in the middle, and as many requests again have ended."""
        seen = len(self.load.outcomes)
        await self.until(lambda: self.load.finished >= seen + 12, "requests end")

    async def answers(self) -> None:
        """Waits until all that was asked so far is answered, and then a new request, rightly."""
        self.mended = time.monotonic()
        if self._last_asked is not None:
            await self._last_asked
        last: Answer | None = None
        while time.monotonic() < self.mended + _WAIT_S:
            last = await self._ask()
            if last.status == 200:
                self.back_s = time.monotonic() - self.mended
                assert reply_of_answer(last.json()).text == null_text(7, 2)
                return
            assert last.status in (429, 503), last
            await asyncio.sleep(_ASK_EVERY_S)
        raise AssertionError(f"no new request was answered: {last}")

    @asynccontextmanager
    async def asking(self, delay_s: float = 0.0) -> AsyncIterator[None]:
        """Sends new requests meanwhile, one after another, from ``delay_s`` on."""
        over = asyncio.Event()
        task = asyncio.create_task(self._keep_asking(delay_s, over))
        try:
            yield
        finally:
            over.set()
        self._last_asked = task  # it may be answered only once Redis is in order again

    async def _keep_asking(self, delay_s: float, over: asyncio.Event) -> None:
        await asyncio.sleep(delay_s)
        while not over.is_set():
            start = time.monotonic()
            answer = await self._ask()
            self.asked.append(Asked(start, time.monotonic() - start, answer))
            await asyncio.sleep(_ASK_EVERY_S)

    async def _ask(self) -> Answer:
        body = completion("hello", max_tokens=2, seed=7)
        answer = await asyncio.to_thread(post, self.fleet.ports[0], body)
        if answer.status == 200:
            self.uids.add(answer.json()["id"].partition("-")[2])
        return answer

    async def ready(self, port: int) -> Answer:
        return await asyncio.to_thread(request, port, "GET", "/ready")

    async def config(self, name: str, value: object) -> None:
        with self.redis() as client:
            await asyncio.to_thread(client.config_set, name, value)

    def used(self) -> int:
        with self.redis() as client:
            return int(client.info("memory")["used_memory"])

    async def kill_server(self) -> None:
        await asyncio.to_thread(self.fleet.server.kill)

    async def start_server(self) -> None:
        await asyncio.to_thread(self.fleet.server.start)


Break = Callable[[Scene], Awaitable[None]]


# -- restarts ---------------------------------------------------------------------------------------------


def goes_away(seconds: float) -> Break:
    """kill -9; connections are refused for a while."""

    async def run(scene: Scene) -> None:
        with Witness(scene.fleet.server) as witness:
            await asyncio.sleep(0.5)
            await scene.kill_server()
            async with scene.asking():
                await asyncio.sleep(seconds)
            await scene.start_server()
            scene.lost_writes = witness.lost()

    return run


async def dies_in_a_sync(scene: Scene) -> None:
    """kill -9 while the disk has not answered for more than a second."""
    with HeldSync(scene.fleet.server), Witness(scene.fleet.server) as witness:
        await asyncio.sleep(1.7)
        await scene.kill_server()
        await scene.start_server()
        scene.lost_writes = witness.lost()
    assert scene.lost_writes, "no acknowledged write was lost: this shows nothing"


async def loses_its_tail(scene: Scene) -> None:
    """As when its host is lost: what was written in the last two seconds is not there afterwards."""
    with Tail(scene.fleet.server) as tail, Witness(scene.fleet.server) as witness:
        await asyncio.sleep(_TAIL_S + 1)
        await scene.kill_server()
        assert tail.cut(_TAIL_S) > 0
        await scene.start_server()
        scene.lost_writes = witness.lost()
    assert scene.lost_writes, "no acknowledged write was lost: this shows nothing"


async def loses_its_tail_and_more(scene: Scene) -> None:
    """The same, and a scheduler and an API process go with it."""
    with Tail(scene.fleet.server) as tail, Witness(scene.fleet.server) as witness:
        await asyncio.sleep(_TAIL_S + 1)
        await scene.kill_server()
        for role in (Command.SCHEDULER, Command.API):
            scene.fleet.send(scene.fleet.pids(role)[0], signal.SIGKILL)
        assert tail.cut(_TAIL_S) > 0
        await scene.start_server()
        scene.lost_writes = witness.lost()
    assert scene.lost_writes, "no acknowledged write was lost: this shows nothing"


async def dies_three_times(scene: Scene) -> None:
    """kill -9 at three moments; with every write synced, at once, none may be missing."""
    for _ in range(3):
        with HeldSync(scene.fleet.server), Witness(scene.fleet.server) as witness:
            await asyncio.sleep(1.3)
            await scene.kill_server()
            await scene.start_server()
            scene.lost_writes += witness.lost()


# -- the data ---------------------------------------------------------------------------------------------


async def is_flushed(scene: Scene) -> None:
    with scene.redis() as client:
        await asyncio.to_thread(client.flushall)


async def is_almost_full(scene: Scene) -> None:
    """More than 80 % of its memory is used: no admission, and what runs goes on."""
    await scene.config("maxmemory", int(scene.used() / 0.88))
    await asyncio.sleep(2.5)  # longer than a look at the server takes
    before = scene.load.finished
    async with scene.asking():
        await asyncio.sleep(2.5)
    assert {each.answer.status for each in scene.asked} == {503}, scene.asked
    assert scene.load.finished > before or not scene.load.live, "what runs goes on"
    await scene.config("maxmemory", 1 << 30)


async def is_out_of_memory(scene: Scene) -> None:
    """Writes are refused, for longer than announcements live."""
    await scene.config("maxmemory", int(scene.used() * 0.9))
    async with scene.asking(2.5):
        await asyncio.sleep(_FULL_S)
    assert {each.answer.status for each in scene.asked} == {503}, scene.asked
    await scene.config("maxmemory", 1 << 30)


async def may_evict(scene: Scene) -> None:
    """Somebody changes the policy under a running system."""
    await scene.config("maxmemory-policy", "allkeys-lru")
    await asyncio.sleep(2.5)
    async with scene.asking():
        await asyncio.sleep(1.0)
        for port in scene.fleet.ports:
            answer = await scene.ready(port)
            assert answer.status == 503, answer
            assert b"noeviction" in answer.body
    assert {each.answer.status for each in scene.asked} == {503}, scene.asked
    assert "noeviction" in scene.fleet.logs()
    await scene.config("maxmemory-policy", "noeviction")


# -- the connections --------------------------------------------------------------------------------------


async def cuts_connections(scene: Scene) -> None:
    """All of them, again and again."""
    with scene.redis() as client:
        for _ in range(10):
            await asyncio.to_thread(
                client.execute_command, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"
            )
            await asyncio.sleep(0.3)


def loses_messages(rates: Mapping[NetworkFault, float], seconds: float) -> Break:
    """Requests, replies and halves of replies are lost between Redis and every process."""

    async def run(scene: Scene) -> None:
        proxy = scene.fleet.proxy
        assert proxy is not None, "this fault needs a fleet behind a proxy"
        proxy.storm(rates)
        await asyncio.sleep(seconds)
        proxy.calm()
        assert all(proxy.faults[fault] for fault in rates), proxy.faults

    return run


def hangs(seconds: float) -> Break:
    """It stands still: connections are open, and nothing is answered."""

    async def run(scene: Scene) -> None:
        scene.fleet.server.signal(signal.SIGSTOP)
        try:
            async with scene.asking():
                await asyncio.sleep(seconds)
        finally:
            scene.fleet.server.signal(signal.SIGCONT)

    return run


def is_read_only(seconds: float) -> Break:
    """It is made a replica, of nobody, and a primary again: what clients see of a failover."""

    async def run(scene: Scene) -> None:
        with scene.redis() as client:
            await asyncio.to_thread(client.replicaof, "127.0.0.1", 1)
            async with scene.asking():
                await asyncio.sleep(seconds)
            await asyncio.to_thread(client.replicaof, "NO", "ONE")

    return run


@dataclass(frozen=True, slots=True)
class RedisFault:
    """One fault, what the fleet must be like for it, and what it may do."""

    breaks: Break
    appendfsync: str = "everysec"
    behind_proxy: bool = False
    request_timeout_s: float = 120.0
    #: Redis loses acknowledged writes: a request may end in an error that says so.
    loses_writes: bool = False
    #: Workers may have to come back under a new id.
    fences: bool = False
    #: API processes die, and with them their connections.
    cuts: bool = False
    #: Requests pass their deadline meanwhile.
    overdue: bool = False
    #: Not possible on a cluster node.
    alone_only: bool = False


_RATES = {
    NetworkFault.REQUEST_LOST: 0.0005,
    NetworkFault.REPLY_LOST: 0.001,
    NetworkFault.REPLY_TORN: 0.0005,
    NetworkFault.REPLY_SILENT: 0.0002,
}

FAULTS: dict[str, RedisFault] = {
    "killed, back after 2 s": RedisFault(goes_away(2.0)),
    "killed, back after 30 s": RedisFault(goes_away(30.0)),
    "killed in a sync": RedisFault(dies_in_a_sync, loses_writes=True),
    "killed, 2 s of writes gone": RedisFault(loses_its_tail, loses_writes=True),
    "the same, with a scheduler and an API": RedisFault(
        loses_its_tail_and_more, loses_writes=True, fences=True, cuts=True
    ),
    "killed in a sync, 3 times, always": RedisFault(dies_three_times, appendfsync="always"),
    "flushed": RedisFault(is_flushed, loses_writes=True, fences=True),
    "over 80 % full": RedisFault(is_almost_full),
    "out of memory": RedisFault(is_out_of_memory),
    "eviction allowed": RedisFault(may_evict),
    "connections killed": RedisFault(cuts_connections),
    "messages lost": RedisFault(loses_messages(_RATES, 8.0), behind_proxy=True),
    "hangs 2 s": RedisFault(hangs(2.0)),
    "hangs 4 s": RedisFault(hangs(4.0)),
    "hangs 30 s": RedisFault(hangs(30.0)),
    "read-only 2 s": RedisFault(is_read_only(2.0), alone_only=True),
    "read-only 10 s": RedisFault(is_read_only(10.0), alone_only=True),
    "hangs past deadlines": RedisFault(hangs(9.0), request_timeout_s=4.0, overdue=True),
}
