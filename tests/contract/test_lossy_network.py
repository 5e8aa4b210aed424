"""A network that loses requests and replies: the retries of the bus and the search for stranded entries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from common.bus.client import Bus, BusDownError
from common.bus.embedded import EmbeddedRedis
from tests.helpers.bus import Desk
from tests.helpers.bus_actors import Detokenizer, Plan, Scheduler, Tokenizer, World, check_ended
from tests.helpers.lossy_proxy import Fault, LossyProxy
from tests.helpers.waiting import until

REQUESTS = 300
RATES = {
    Fault.REQUEST_LOST: 0.01,
    Fault.REPLY_LOST: 0.02,
    Fault.REPLY_TORN: 0.01,
    Fault.REPLY_SILENT: 0.002,
}


@pytest.fixture
def proxy(server: EmbeddedRedis, bus: Bus) -> Iterator[LossyProxy]:
    with LossyProxy(server.port, seed=7, rates=RATES) as running:
        yield running


def test_the_proxy_is_as_bad_as_it_says(proxy: LossyProxy, bus: Bus) -> None:
    """What is not idempotent happens twice, behind it; and no reply is taken for another's."""
    lossy = Bus(proxy.url, name="lossy", timeout_s=0.2)
    for n in range(500):
        word = f"word-{n}".encode()
        assert lossy.do("ECHO", word) == word
        lossy.do("INCR", "n")
    lossy.close()
    assert all(proxy.faults[fault] > 0 for fault in RATES), proxy.faults
    assert int(bus.do("GET", "n")) > 500


class Crowd:
    """Workers in threads of their own, each behind the proxy, until the work is done."""

    def __init__(self, proxy: LossyProxy, world: World) -> None:
        self._proxy = proxy
        self._world = world
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._buses: list[Bus] = []
        self.failures: list[BaseException] = []

    def world(self, name: str) -> World:
        """The world as seen through a connection of one's own."""
        bus = Bus(self._proxy.url, name=name, timeout_s=0.25)
        self._buses.append(bus)
        return World(Desk(bus, epoch=self._world.desk.epoch), self._world.plans, self._world.requests)

    def run(self, turn: Callable[[], None]) -> None:
        def loop() -> None:
            try:
                while not self._stop.is_set():
                    turn()
                    time.sleep(0.001)
            except BaseException as error:
                self.failures.append(error)

        self._threads.append(threading.Thread(target=loop, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
        for bus in self._buses:
            bus.close()
        assert self.failures == []


def _patiently(action: Callable[[], object]) -> None:
    """Until it is answered: every hand-off may be repeated."""
    while True:
        try:
            action()
        except BusDownError:
            continue
        return


def _tokenize(worker: Tokenizer, found: list[str]) -> None:
    try:
        worker.read(4)
        before = set(worker.held)
        worker.find_stranded()
        found.extend(set(worker.held) - before)
        for entry in list(worker.held.values()):
            worker.finish(entry)
    except BusDownError:
        return


def _schedule(worker: Scheduler, found: list[str]) -> None:
    try:
        worker.read(8)
        before = set(worker.held)
        worker.find_stranded()
        found.extend(set(worker.held) - before)
    except BusDownError:
        for entry_id in set(worker.held) - set(worker.jobs):
            worker.held.pop(entry_id)  # its START was not answered; it is found again
    if worker.jobs:
        step = worker.prepare(list(worker.jobs))
        _patiently(lambda: worker.send(step))


def _detokenize(worker: Detokenizer) -> None:
    try:
        if call := worker.prepare(20):
            worker.commit(call)
    except BusDownError:
        worker.forget()


def _plans(count: int) -> list[Plan]:
    draw = random.Random(3)
    plans = []
    for number in range(count):
        choices = draw.choice([1, 1, 1, 2, 3])
        lengths = tuple(draw.randint(1, 6) for _ in range(choices))
        stops = tuple(draw.choice([None, None, 2, 4]) for _ in range(choices))
        plans.append(Plan(number, lengths, stops, bad=draw.random() < 0.05))
    return plans


def test_nothing_is_lost_and_nothing_is_doubled(proxy: LossyProxy, bus: Bus) -> None:
    desk = Desk(bus)
    desk.open_tok()
    world = World(desk)
    for plan in _plans(REQUESTS):
        request = desk.request(n=len(plan.lengths))
        world.plans[request.uid], world.requests[request.uid] = plan, request
    may_fail = {uid: {"context"} for uid, plan in world.plans.items() if plan.bad}
    crowd, found = Crowd(proxy, world), list[str]()
    repeated = _start_crowd(crowd, found)
    client = crowd.world("client").desk
    for number, request in enumerate(world.requests.values()):
        _patiently(lambda request=request: repeated.append(client.admit(request, max_queued=1_000).code))
        if number % 10 == 9:
            may_fail.setdefault(request.uid, set()).add("cancelled")
            _patiently(lambda uid=request.uid: client.cancel(uid))

    def done() -> bool:
        assert crowd.failures == []
        return (
            all("terminal" in desk.req(uid) for uid in world.plans)
            and desk.bus.do("ZCARD", desk.inflight) == 0
        )

    until(done, "every request has ended", timeout=60)
    proxy.calm()
    until(lambda: desk.bus.do("XLEN", desk.tok) == 0, "all is committed", timeout=20)
    crowd.stop()
    check_ended(world, may_fail)
    assert sum(proxy.faults.values()) > 50, proxy.faults
    assert found, "replies with work in them were lost, and the work was found"
    assert "DUP" in repeated, "requests were admitted whose first reply was lost"


def _start_crowd(crowd: Crowd, found: list[str]) -> list[str]:
    """Two tokenizers, two schedulers, one detokenizer; returns where admissions are noted."""
    for number in range(2):
        for make, turn in ((Tokenizer, _tokenize), (Scheduler, _schedule)):
            made: list[Tokenizer | Scheduler] = []
            world, name = crowd.world(f"{make.__name__}-{number}"), f"{make.__name__.lower()}-{number}"
            _patiently(lambda make=make, made=made, world=world, name=name: made.append(make(world, name)))
            crowd.run(lambda turn=turn, worker=made[0]: turn(worker, found))
    detokenizers: list[Detokenizer] = []
    world = crowd.world("detokenizer")
    _patiently(lambda: detokenizers.append(Detokenizer(world, "detokenizer-1")))
    _patiently(detokenizers[0].take)
    crowd.run(lambda: _detokenize(detokenizers[0]))
    return []
