"""Two classes of work: batch fills what is idle, and makes way within a step or two."""

from __future__ import annotations

import time

from tests.chaos.fleet import WORKERS, Fleet, Shape
from tests.helpers.asking import Body, Live, completion, null_text, post
from tests.helpers.inside import Inside

STEP_S, ROWS, TOKENS = 0.02, 4, 300


def ask(seed: int, tokens: int, **fields: object) -> Body:
    return completion("hello", max_tokens=tokens, seed=seed, **fields)


def first_token(port: int, body: Body) -> float:
    """Seconds until the first token of a stream."""
    started = time.monotonic()
    live = Live(port, body)
    live.wait_for(1)
    seconds = time.monotonic() - started
    live.result()
    return seconds


def test_interactive_requests_do_not_wait_for_batch() -> None:
    shape = Shape(
        replicas=dict.fromkeys((*WORKERS, "api"), 1),
        step_ms=STEP_S * 1000,
        # Batch rows that give way are out of the queue for good: they wait longer than this, here.
        flags={"scheduler": ["--max-num-seqs", str(ROWS)], "api": ["--queue-timeout", "2"]},
    )
    with Fleet(shape) as fleet, fleet.redis() as client:
        [port] = fleet.ports
        alone = min(first_token(port, ask(99, 2)) for _ in range(5))
        batch = {seed: Live(port, ask(seed, TOKENS, service_tier="flex")) for seed in range(ROWS)}
        for live in batch.values():
            live.wait_for(30)
        assert {client.hget(fleet.keys.req(live.id), "class") for live in batch.values()} == {"batch"}
        beside = [first_token(port, ask(99, 2, service_tier="default")) for _ in range(5)]
        print(
            f"first token alone after {alone * 1000:.0f} ms, beside batch {[round(s * 1000) for s in beside]}"
        )
        assert sorted(beside)[2] < 5 * (2 * STEP_S + alone)
        # As many as there are rows, for longer than a request may wait in the queue.
        urgent = {seed: Live(port, ask(seed, 150)) for seed in range(100, 100 + ROWS)}
        for seed, live in urgent.items():
            assert live.result().text == null_text(seed, 150)
        for seed, live in batch.items():
            reply = live.result()
            assert (reply.text, reply.usage) == (null_text(seed, TOKENS), (1, TOKENS))
        assert min(live.stall for live in batch.values()) > 2.0, "all of them gave way for a while"
        assert max(live.stall for live in urgent.values()) < 1.0
        assert Inside(client).scheduler()["preemptions"] >= ROWS
        Inside(client).wait_free()


def test_an_unknown_tier_is_refused(null_stack) -> None:
    answer = post(null_stack.port, ask(1, 1, service_tier="cheap"))
    assert (answer.status, answer.error["param"]) == (400, "service_tier")
