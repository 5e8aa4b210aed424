"""One chaos run: a fleet, a load, faults, and the judgement of everything that came out."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.check import judge
from tests.chaos.faults import Fault, Injector, make_schedule
from tests.chaos.fleet import WORKERS, Fleet, Shape
from tests.chaos.load import Load
from tests.chaos.plans import PROMPTS, Manner, Plan, make_plans
from tests.chaos.report import Report
from tests.chaos.state import State
from tests.helpers.asking import request
from tests.helpers.text import BUNDLED
from tests.helpers.waiting import until

#: How long the last traces of a run may take to go away.
_SETTLE_S = 15.0


@dataclass(frozen=True, slots=True)
class Config:
    """What to run."""

    requests: int
    faults: int
    server: str = "valkey"
    seed: int = 1
    streams: int = 24
    #: Roles that meet faults.
    roles: Sequence[str] = WORKERS
    #: A request that takes longer than this hangs.
    bound_s: float = 60.0
    longest: int = 300
    shape: Shape = field(default_factory=Shape)


def run(config: Config) -> Report:
    """The random run: seeded load and seeded faults."""
    coin = random.Random(f"reports {config.seed}")
    shape = Shape(
        server=config.server,
        lease_ms=config.shape.lease_ms,
        step_ms=config.shape.step_ms,
        reports=lambda _: coin.random() < 0.5,
        mutant=config.shape.mutant,
    )
    plans = make_plans(config.requests, config.seed, longest=config.longest)
    schedule = make_schedule(config.faults, config.requests, config.seed, config.roles)

    async def faults(fleet: Fleet, state: State, load: Load) -> list[Fault]:
        injector = Injector(fleet, state, load, config.seed)
        await injector.run(schedule)
        return injector.faults

    return run_scenario(
        shape, plans, faults, streams=config.streams, bound_s=config.bound_s, seed=config.seed,
        cuts_allowed="api" in config.roles, losses_allowed="redis" in config.roles,
    )  # fmt: skip


Faults = Callable[[Fleet, State, Load], Awaitable[list[Fault]]]


def run_scenario(
    shape: Shape,
    plans: Iterable[Plan],
    faults: Faults,
    *,
    streams: int = 24,
    bound_s: float = 60.0,
    seed: int = 0,
    cuts_allowed: bool = False,
    losses_allowed: bool = False,
) -> Report:
    """Any load under any faults."""
    with Fleet(shape) as fleet, fleet.redis() as client:
        state = State(client, fleet.keys, shape.partitions)
        prompt_tokens = count_prompts(fleet.ports[0])
        start = time.monotonic()
        load, happened = asyncio.run(_under_fire(fleet, state, plans, faults, streams, bound_s))
        seconds = time.monotonic() - start
        hung = any(outcome.hung for outcome in load.outcomes)
        leftovers = settle(state, 0.0 if hung else _SETTLE_S)
        verdicts = [
            judge(
                outcome,
                prompt_tokens(outcome.plan),
                cuts_allowed=cuts_allowed,
                losses_allowed=losses_allowed,
            )
            for outcome in load.outcomes
        ]
        logs = fleet.logs()
        return Report(
            shape.server, seed, seconds, verdicts, happened, leftovers, state.immortal(),
            inexact(state, load), fleet.fenced(), logs.count("Traceback"), logs, load.deaf,
        )  # fmt: skip


async def _under_fire(
    fleet: Fleet, state: State, plans: Iterable[Plan], faults: Faults, streams: int, bound_s: float
) -> tuple[Load, list[Fault]]:
    load = Load(fleet.ports, plans, streams=streams, bound_s=bound_s)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(load.run())
        breaking = asyncio.ensure_future(faults(fleet, state, load))
        await running
        happened = await breaking
    return load, happened


def settle(state: State, timeout: float) -> dict[str, object]:
    """What is left when it has had time to go away."""
    try:
        until(lambda: not state.leftovers(), "nothing is left", timeout)
    except AssertionError:
        return state.leftovers()
    return {}


def inexact(state: State, load: Load) -> dict[str, list[str]]:
    """Requests that ended well for their clients, whose traces in Redis are wrong all the same."""
    found = {}
    for outcome in load.outcomes:
        well = outcome.done and outcome.error is None and outcome.plan.manner is Manner.STAYS
        if well and (faults := state.faults_of(outcome.uid, outcome.plan)):
            found[outcome.uid] = faults
    return found


def count_prompts(port: int) -> Callable[[Plan], int]:
    """How many tokens a plan's prompts have, as the undisturbed server counts them."""
    counts = {
        (prompt, is_chat): _count(port, prompt, is_chat) for prompt in PROMPTS for is_chat in (False, True)
    }
    return lambda plan: sum(counts.get((prompt, plan.is_chat), 0) for prompt in plan.prompts)


def _count(port: int, prompt: str, is_chat: bool) -> int:
    asked = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    answer = request(port, "POST", "/tokenize", {"model": BUNDLED, **asked})
    assert answer.status == 200, answer
    return int(answer.json()["count"])
