"""A request that kills every process that computes it: it alone ends, whoever crashed beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.fleet import WORKERS, Fleet, Shape
from tests.helpers.asking import Live, RefusedError, completion, null_text
from tests.helpers.inside import Inside

TOKENS = 250
POISON = 666_000


def shape(poison: Sequence[int], *, server: str, schedulers: int) -> Shape:
    replicas = dict.fromkeys((*WORKERS, "api"), 1) | {"scheduler": schedulers}
    launch = [word for seed in poison for word in ("--poison", str(seed))]
    return Shape(server=server, replicas=replicas, launch={"scheduler": launch})


@pytest.mark.parametrize(
    ("server", "innocents", "poisons", "schedulers"),
    [("redis7", 8, 2, 1), ("valkey", 8, 2, 2)],
    ids=["alone", "with-a-peer"],
)
def test_only_the_poison_ends(server: str, innocents: int, poisons: int, schedulers: int) -> None:
    bad = [POISON + index for index in range(poisons)]
    with Fleet(shape(bad, server=server, schedulers=schedulers)) as fleet, fleet.redis() as client:
        [port] = fleet.ports
        asked = {seed: completion("hello", max_tokens=TOKENS, seed=seed) for seed in range(innocents)}
        half = innocents // 2
        with ThreadPoolExecutor(32) as pool:
            streams = {seed: Live(port, asked[seed]) for seed in range(half)}
            for live in streams.values():
                live.wait_for(20)
            # These and the poison come together, so that most have nothing when it strikes.
            poison = list(pool.map(lambda seed: Live(port, completion("x", max_tokens=9, seed=seed)), bad))
            streams |= dict(pool.map(lambda seed: (seed, Live(port, asked[seed])), range(half, innocents)))
            started = time.monotonic()
            for live in poison:
                with pytest.raises(RefusedError) as refusal:
                    live.result(60)
                assert refusal.value.error["code"] == "worker_crashed"
            seconds = time.monotonic() - started
            for seed, live in streams.items():
                reply = live.result(60)
                assert (reply.text, reply.usage) == (null_text(seed, TOKENS), (1, TOKENS))
        letters = [fields["uid"] for p in (0, 1) for _, fields in client.xrange(fleet.keys.dead(p), "-", "+")]
        assert len(letters) == len(set(letters)) == poisons
        assert fleet.deaths <= 3 * poisons
        print(f"{fleet.deaths} deaths; the poison ended after {seconds:.1f} s")
        Inside(client).wait_free(10)
