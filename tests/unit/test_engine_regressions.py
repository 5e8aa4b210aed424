"""Bugs that engines of this kind have had, one test each, named after what went wrong there."""

from __future__ import annotations

import pytest

from tests.helpers.engines import ask, build, drain, finish, tokens
from tests.helpers.fake_runner import VOCAB, reference
from workers.engine.types import Finish, Output

B = 4
TEXT = [(7 * i + i * i) % VOCAB for i in range(60)]
both_depths = pytest.mark.parametrize("overlap", [0, 1])


@both_depths
def test_identical_prompts_in_one_batch_do_not_lose_their_blocks(overlap):
    """Elsewhere the second was moved onto the first one's blocks, and decoded on freed ones."""
    engine, _ = build(overlap=overlap, block_size=B)
    for i in range(4):
        engine.add(ask(f"r{i}", TEXT[:13], max_tokens=9, seed=i))
    outputs = drain(engine)
    for i in range(4):
        assert tokens(outputs[f"r{i}"]) == reference(TEXT[:13], i, 9)


@both_depths
def test_sixteen_samples_compute_their_prompt_once(overlap):
    engine, runner = build(
        overlap=overlap, block_size=B, num_blocks=200, max_num_seqs=16, max_num_batched_tokens=64
    )
    for i in range(16):
        engine.add(ask(f"r{i}", TEXT[:50], max_tokens=6, seed=i))
    outputs = drain(engine)
    for i in range(16):
        assert tokens(outputs[f"r{i}"]) == reference(TEXT[:50], i, 6)
    prompt_tokens = sum(len(row.tokens) for plan in runner.plans for row in plan.rows[plan.num_decode :])
    assert prompt_tokens == 50 + 15 * 2  # the others compute only what follows the last full block
    assert [outputs[f"r{i}"][0].cached_tokens for i in range(16)] == [0] + [48] * 15


@both_depths
def test_a_shared_beginning_does_not_make_a_prompt_wait_for_all_of_another(overlap):
    """Following a prompt that computes the same block must not mean following it to its end."""
    engine, runner = build(
        overlap=overlap, block_size=B, num_blocks=100, max_num_seqs=2, max_num_batched_tokens=20
    )
    engine.add(ask("long", TEXT[:50], max_tokens=2))
    engine.add(ask("short", [*TEXT[:8], 1, 2, 3], max_tokens=2))
    drain(engine)
    started = {start.row: plan.step for plan in runner.plans for start in plan.starts}
    assert started == {0: 1, 1: 3}  # with the rest of the long one, although it is not committed yet


@both_depths
def test_a_follower_of_a_prompt_that_stops_goes_its_own_way(overlap):
    """A prompt that waits for another's blocks must not wait for one that was paused or cancelled."""
    for stop in ("pause", "cancel"):
        engine, _ = build(overlap=overlap, block_size=B, max_num_batched_tokens=8)
        engine.add(ask("leader", TEXT[:40], max_tokens=2))
        engine.add(ask("follower", TEXT[:40], max_tokens=2, seed=1))
        engine.step()
        getattr(engine, stop)("leader")
        outputs = drain(engine)
        assert tokens(outputs["follower"]) == reference(TEXT[:40], 1, 2)


@both_depths
@pytest.mark.parametrize("hit", [False, True])
def test_abort_during_prefill_gives_back_every_block_once(overlap, hit):
    """Elsewhere pages ended up in the cache and on the free list, or a reference count below zero."""
    engine, _ = build(overlap=overlap, block_size=B, max_num_batched_tokens=8)
    if hit:
        engine.add(ask("before", TEXT[:16], max_tokens=1))
        drain(engine)
    engine.add(ask("a", TEXT[:40], max_tokens=4))
    engine.step()
    engine.cancel("a")
    engine.check()
    assert drain(engine)["a"] == [Output("a", 0, None, Finish.CANCELLED, cached_tokens=16 * hit)]
    assert engine.stats().kv_blocks_used == 0
    engine.add(ask("b", TEXT[:40], max_tokens=4))
    assert tokens(drain(engine)["b"]) == reference(TEXT[:40], 0, 4)


def test_an_aborted_prefill_leaves_what_it_computed_to_hit():
    engine, _ = build(block_size=B, max_num_batched_tokens=8)
    engine.add(ask("a", TEXT[:40], max_tokens=4))
    engine.step()
    engine.cancel("a")
    drain(engine)
    engine.add(ask("b", TEXT[:40], max_tokens=4))
    assert drain(engine)["b"][0].cached_tokens == 8


@both_depths
def test_abort_of_a_request_that_ends_in_the_step_in_flight(overlap):
    """Elsewhere its row was given back twice."""
    engine, _ = build(overlap=overlap, max_num_seqs=2)
    engine.add(ask("a", TEXT[:3], max_tokens=2))
    outputs = [*engine.step(), *engine.step()]
    engine.cancel("a")
    outputs += drain(engine).get("a", [])
    assert sum(output.finish is not None for output in outputs) == 1
    for key in "bc":
        engine.add(ask(key, TEXT[:3], max_tokens=2))
    assert all(len(out) == 2 for out in drain(engine).values())


def test_a_row_is_not_reused_while_a_step_in_flight_has_it():
    """Elsewhere a late write reached the row's next owner. The fake runner refuses such a plan."""
    engine, _ = build(overlap=1, max_num_seqs=1, block_size=B, num_blocks=6)
    engine.add(ask("a", TEXT[:10], max_tokens=9))
    engine.add(ask("b", TEXT[20:30], max_tokens=3))
    engine.step()
    engine.step()
    engine.cancel("a")
    engine.check()
    outputs = engine.step()
    engine.check()
    for got in drain(engine).values():
        outputs += got
    assert tokens(o for o in outputs if o.key == "b") == reference(TEXT[20:30], 0, 3)


@both_depths
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("shared", ["nothing", "a block", "everything"])
def test_prompt_lengths_around_a_block_with_hits(overlap, size, off, shared):
    """Elsewhere a full hit left nothing to compute, or block counts were taken before the hit."""
    length = 3 * size + off
    prompt, other = TEXT[:length], TEXT[:size] if shared == "a block" else TEXT[:length]
    engine, runner = build(overlap=overlap, block_size=size, num_blocks=32)
    if shared != "nothing":
        engine.add(ask("before", [*other, 1], max_tokens=2))
        drain(engine)
    engine.add(ask("a", prompt, max_tokens=5, seed=3))
    outputs = drain(engine)["a"]
    expected = {"nothing": 0, "a block": 1, "everything": (length - 1) // size}[shared] * size
    assert outputs[0].cached_tokens == min(expected, (length - 1) // size * size)
    assert tokens(outputs) == reference(prompt, 3, 5)
    assert all(row.tokens for plan in runner.plans for row in plan.rows)


@both_depths
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_comes_back_on_its_own_blocks(overlap, size, caching):
    """Elsewhere lengths from before the preemption met blocks from after the hit."""
    engine, runner = build(
        overlap=overlap,
        block_size=size,
        num_blocks=40 // size,
        new_token_ratio=0.01,
        enable_prefix_caching=caching,
    )
    for i in range(3):
        engine.add(ask(f"r{i}", TEXT[i : i + 9], max_tokens=20, seed=i))
    outputs = drain(engine)
    assert engine.stats().preemptions
    for i in range(3):
        assert tokens(outputs[f"r{i}"]) == reference(TEXT[i : i + 9], i, 20)
    back = [start for plan in runner.plans for start in plan.starts if start.output_ids]
    assert back
    assert all(
        list(start.output_ids) == reference(start.prompt_ids, start.seed, len(start.output_ids))
        for start in back
    )


@both_depths
def test_the_last_request_out_of_memory_fails_alone(overlap):
    """Elsewhere the scheduler died with it."""
    engine, _ = build(overlap=overlap, block_size=B, num_blocks=5)
    engine.add(ask("big", TEXT[:10], max_tokens=100))
    engine.add(ask("small", TEXT[:4], max_tokens=3))
    outputs = drain(engine)
    assert tokens(outputs["big"]) == reference(TEXT[:10], 0, 11)
    assert finish(outputs["big"]) is Finish.ERROR
    assert "outgrown the KV cache of 20 tokens" in outputs["big"][-1].error
    assert tokens(outputs["small"]) == reference(TEXT[:4], 0, 3)
    assert engine.stats().kv_blocks_used == 0


@both_depths
def test_one_that_outgrew_the_cache_while_paused_does_not_block_the_queue(overlap):
    """It could be retracted with more tokens than there is room for, and would wait at the head for ever."""
    engine, _ = build(overlap=overlap, block_size=1, num_blocks=12)
    engine.add(ask("a", TEXT[:10], max_tokens=9))
    got: list[Output] = []
    for _ in range(3):
        got += engine.step()
    engine.pause("a")
    engine.add(ask("b", TEXT[:11], max_tokens=1))
    while engine.has_work():
        got += engine.step()
    engine.resume("a")
    got += drain(engine).get("a", [])
    assert tokens(o for o in got if o.key == "a") == reference(TEXT[:10], 0, 3)
    assert finish([o for o in got if o.key == "a"]) is Finish.ERROR
    assert tokens(o for o in got if o.key == "b") == reference(TEXT[:11], 0, 1)


@both_depths
@pytest.mark.parametrize("count", [2, 5])
def test_requests_of_half_the_cache_each_do_not_livelock(overlap, count):
    """Two that each need more than half must not take turns in preempting one another."""
    engine, _ = build(overlap=overlap, block_size=B, num_blocks=12, new_token_ratio=0.01)
    for i in range(count):
        engine.add(ask(f"r{i}", TEXT[i : i + 12], max_tokens=20, seed=i))
    outputs = drain(engine, steps=count * 60)
    for i in range(count):
        assert tokens(outputs[f"r{i}"]) == reference(TEXT[i : i + 12], i, 20)
    assert engine.stats().preemptions <= 2 * count


@both_depths
def test_churn_of_aborts_leaks_nothing(overlap):
    engine, _ = build(overlap=overlap, block_size=B, num_blocks=20, max_num_seqs=3, max_num_batched_tokens=6)
    for i in range(100):
        engine.add(ask(f"r{i}", TEXT[i % 5 : i % 5 + 1 + i % 17], max_tokens=1 + i % 6, seed=i))
        if i % 2:
            engine.step()
        if i % 3 == 0:
            engine.cancel(f"r{i - i % 4}")
        engine.check()
    drain(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.paused, stats.kv_blocks_used) == (0, 0, 0, 0)
