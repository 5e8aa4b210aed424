"""Chaos on the bundled model: every answer, greedy or seeded, must be the one of a run without faults.

In float32 and with short prompts: which requests share a step then makes no difference to what is likeliest.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from common.settings import Command
from tests.chaos.faults import Fault, Injector, make_schedule
from tests.chaos.fleet import WORKERS, Fleet, Shape
from tests.chaos.harness import run_scenario
from tests.chaos.load import Load, Outcome
from tests.chaos.plans import PROMPTS, Expected, Manner, Plan
from tests.chaos.report import Report
from tests.chaos.state import State
from tests.helpers.asking import reply_of, reply_of_answer

_SHORTEST, _LONGEST = 16, 32
_STREAMS = 8
_LEASE_MS = 2000
#: A request may meet several faults, after each of which a model is loaded anew.
_BOUND_S = 300.0
_FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-tokens", "4096")
#: Two schedulers share two cores.
_ENV = {"OMP_NUM_THREADS": "1"}


def run(requests: int, faults: int, *, server: str = "valkey", seed: int = 1) -> Report:
    """Asks everything once without faults, and then again with them."""
    coin = random.Random(f"reports {seed}")
    shape = Shape(
        server=server,
        lease_ms=_LEASE_MS,
        engine="native",
        flags={Command.SCHEDULER: _FLAGS},
        env=_ENV,
        request_timeout_s=2 * _BOUND_S,
        reports=lambda _: coin.random() < 0.5,
    )
    plans = _shown([_plan(number, seed) for number in range(requests)], shape)
    schedule = make_schedule(faults, requests, seed, WORKERS)

    async def strike(fleet: Fleet, state: State, load: Load) -> list[Fault]:
        injector = Injector(fleet, state, load, seed)
        await injector.run(schedule)
        return injector.faults

    return run_scenario(shape, plans, strike, streams=_STREAMS, bound_s=_BOUND_S, seed=seed)


def _plan(number: int, seed: int) -> Plan:
    rng = random.Random(f"bundled {seed} {number}")
    return Plan(
        number,
        Manner.STAYS,
        (rng.choice(PROMPTS),),
        seed=rng.randrange(1, 1 << 40),
        n=rng.choice((1, 1, 1, 2)),
        max_tokens=rng.randint(_SHORTEST, _LONGEST),
        is_chat=rng.random() < 0.5,
        is_stream=rng.random() < 0.75,
        temperature=rng.choice((0.0, 1.0)),
    )


def _shown(plans: list[Plan], shape: Shape) -> list[Plan]:
    """The plans with the answers of a fleet that nobody disturbs, of one scheduler."""
    alone = replace(shape, replicas={**shape.replicas, Command.SCHEDULER: 1})
    with Fleet(alone) as fleet, fleet.redis() as client:
        state = State(client, fleet.keys, shape.partitions)
        load = Load(fleet.ports, plans, streams=_STREAMS, bound_s=_BOUND_S)
        outcomes = asyncio.run(load.run())
        return [replace(one.plan, shown=_answer(one, state)) for one in outcomes]


def _answer(outcome: Outcome, state: State) -> Expected:
    assert outcome.done, f"undisturbed, and yet: {outcome}"
    assert outcome.error is None, outcome.error
    events = outcome.events
    reply = reply_of(events) if outcome.plan.is_stream else reply_of_answer(events[0])
    logs = tuple(state.log(outcome.uid, choice) for choice in range(len(reply.texts)))
    assert sum(map(len, logs)) == reply.usage[1]
    return Expected(reply.texts, reply.finishes, reply.stops, tuple(map(len, logs)), logs)
