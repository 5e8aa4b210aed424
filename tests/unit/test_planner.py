"""What a step is made of: budget, order, chunks, starts, and who gives way when blocks run out."""

from __future__ import annotations

from tests.helpers.engines import ask, build, drain, finish, tokens
from tests.helpers.fake_runner import reference
from workers.engine.plan import StepPlan


def shape(plan: StepPlan) -> list[tuple[int, int, bool]]:
    """(row, tokens, sample) of every row."""
    return [(row.row, len(row.tokens), row.sample) for row in plan.rows]


def test_decode_rows_come_first_and_prompts_share_what_is_left():
    engine, runner = build(max_num_batched_tokens=10)
    engine.add(ask("a", [1, 2]))
    engine.step()
    engine.add(ask("b", range(10, 15)))
    engine.add(ask("c", range(20, 30)))
    engine.step()
    assert shape(runner.plans[-1]) == [(0, 1, True), (1, 5, True), (2, 4, False)]
    assert runner.plans[-1].num_decode == 1
    engine.step()
    assert shape(runner.plans[-1]) == [(0, 1, True), (1, 1, True), (2, 6, True)]
    assert runner.plans[-1].num_decode == 2


def test_a_chunk_of_one_token_without_a_sample_is_not_a_decode_row():
    engine, runner = build(max_num_seqs=1, max_num_batched_tokens=1)
    engine.add(ask("a", [1, 2], max_tokens=1))
    assert tokens(drain(engine)["a"]) == reference([1, 2], 0, 1)
    assert [plan.num_decode for plan in runner.plans] == [0, 1]


def test_no_prompt_delays_running_rows_by_more_than_the_budget():
    engine, runner = build(num_blocks=200, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=300)
    engine.add(ask("a", [1], max_tokens=30))
    engine.step()
    for key in "bcd":
        engine.add(ask(key, range(49), max_tokens=2, salt=key))
    drain(engine)
    decoding = [plan for plan in runner.plans if 0 in {row.row for row in plan.rows}]
    assert [plan.step for plan in decoding] == list(range(1, 31))
    assert max(sum(len(row.tokens) for row in plan.rows) for plan in runner.plans) == 16


def test_lower_priority_numbers_first_then_first_come():
    engine, runner = build(max_num_seqs=2, max_num_batched_tokens=4)
    for key, priority in (("batch", 1), ("first", 0), ("second", 0)):
        engine.add(ask(key, range(3), priority=priority, seed=priority, salt=key))
    engine.step()
    started = [start.params for start in runner.plans[0].starts]
    assert len(started) == 2
    assert engine.stats().waiting == 1
    outputs = drain(engine)
    order = sorted(outputs, key=lambda key: list(outputs).index(key))
    assert order == ["first", "second", "batch"]


def test_a_better_priority_overtakes_a_half_computed_prompt():
    engine, runner = build(max_num_batched_tokens=8)
    engine.add(ask("batch", range(20), priority=1, salt="b"))
    engine.step()
    engine.add(ask("live", range(6)))
    engine.step()
    assert shape(runner.plans[-1]) == [(1, 6, True), (0, 2, False)]


def test_rows_start_once_with_what_sampling_needs():
    engine, runner = build()
    request = ask("a", [1, 2, 3], max_tokens=4, seed=5, output_ids=reference([1, 2, 3], 5, 2))
    engine.add(request)
    drain(engine)
    starts = [start for plan in runner.plans for start in plan.starts]
    assert [(start.row, start.prompt_ids, list(start.output_ids)) for start in starts] == [
        (0, [1, 2, 3], request.output_ids)
    ]
    assert (starts[0].params, starts[0].seed) == (request.params, 5)


def test_the_row_of_one_that_ended_starts_anew_for_the_next():
    engine, runner = build(max_num_seqs=1)
    engine.add(ask("a", [1], max_tokens=2))
    engine.add(ask("b", [2], max_tokens=2))
    outputs = drain(engine)
    assert [start.row for plan in runner.plans for start in plan.starts] == [0, 0]
    assert tokens(outputs["b"]) == reference([2], 0, 2)


def test_a_request_sure_to_end_with_the_step_in_flight_is_not_planned_again():
    engine, runner = build(overlap=1)
    engine.add(ask("a", [1, 2], max_tokens=3))
    assert tokens(drain(engine)["a"]) == reference([1, 2], 0, 3)
    assert len(runner.plans) == 3


def test_the_fewest_tokens_give_way_then_the_latest_to_come():
    engine, runner = build(num_blocks=9, block_size=4, new_token_ratio=0.01)
    engine.add(ask("a", [1] * 5, max_tokens=12))
    engine.step()
    engine.add(ask("b", [2] * 5, max_tokens=12))
    engine.add(ask("c", [3] * 5, max_tokens=12))
    outputs = drain(engine)
    assert engine.stats().preemptions
    rows = [[row.row for row in plan.rows] for plan in runner.plans]
    # All have three blocks, and the one that came first wants its fourth.
    assert rows[:9] == [[0], *[[0, 1, 2]] * 7, [0, 1]]
    for key, token in (("b", 2), ("c", 3)):
        assert tokens(outputs[key]) == reference([token] * 5, 0, 12)


def test_retraction_takes_the_least_important_even_if_it_is_further_on():
    engine, _ = build(num_blocks=7, block_size=4, new_token_ratio=0.01)
    engine.add(ask("batch", range(6), max_tokens=12, priority=1))
    for _ in range(3):
        engine.step()
    engine.add(ask("live", range(7), max_tokens=10))
    outputs = {"batch": [], "live": []}
    ended: list[str] = []
    while engine.has_work():
        for output in engine.step():
            outputs[output.key].append(output)
            if output.finish:
                ended.append(output.key)
        engine.check()
    assert engine.stats().preemptions
    assert ended == ["live", "batch"]


def test_retracted_requests_keep_their_tokens_and_their_stream():
    engine, runner = build(num_blocks=6, block_size=4, new_token_ratio=0.01)
    for key, seed in (("a", 1), ("b", 2), ("c", 3)):
        engine.add(ask(key, range(5), max_tokens=14, seed=seed, ignore_eos=False))
    outputs = drain(engine)
    assert engine.stats().preemptions
    again = [start for plan in runner.plans for start in plan.starts if start.output_ids]
    assert again, "nobody came back with what it had"
    for key, seed in (("a", 1), ("b", 2), ("c", 3)):
        assert tokens(outputs[key]) == reference(range(5), seed, 14)
        assert [output.index for output in outputs[key]] == list(range(14))
        assert [output.cached_tokens for output in outputs[key][1:]] == [0] * 13


def test_admission_expects_some_of_max_tokens_not_all():
    def started(ratio: float) -> int:
        engine, runner = build(num_blocks=20, block_size=4, new_token_ratio=ratio)
        for key in "abcdefgh":
            engine.add(ask(key, [1, 2, 3], max_tokens=40))
        engine.step()
        return len(runner.plans[0].starts)

    assert [started(ratio) for ratio in (1.0, 0.5, 0.1)] == [1, 3, 8]


def test_one_that_must_wait_for_blocks_is_not_overtaken():
    engine, runner = build(num_blocks=10, block_size=4, enable_prefix_caching=False)
    engine.add(ask("a", range(20), max_tokens=8))
    engine.step()
    engine.add(ask("big", range(20), max_tokens=8))
    engine.add(ask("small", [1], max_tokens=1))
    engine.step()
    assert engine.stats().waiting == 2
    outputs = drain(engine)
    assert all(finish(outputs[key]) for key in outputs)
    started = [start.prompt_ids for plan in runner.plans for start in plan.starts]
    assert started == [range(20), range(20), [1]]


def test_room_counts_rows_and_what_the_cache_takes():
    engine, _ = build(num_blocks=20, block_size=4, max_num_seqs=4, new_token_ratio=1.0)
    assert engine.room() == 4
    engine.add(ask("a", range(8), max_tokens=8, salt="a"))
    assert engine.room() == 3
    engine.add(ask("b", range(8), max_tokens=32, salt="b"))
    assert engine.room() == 1
    engine.step()
    assert engine.room() == 1
    for key in "cdefg":
        engine.add(ask(key, range(8), max_tokens=8, salt=key))
    assert engine.room() == 0
    drain(engine)
    assert engine.room() > 0


def test_room_never_stays_zero_when_idle():
    engine, _ = build(num_blocks=4, block_size=4)
    engine.add(ask("a", range(15), max_tokens=1))
    engine.step()
    assert not engine.has_work()
    assert engine.room() == 1


def test_paused_requests_give_way_before_running_ones():
    engine, runner = build(num_blocks=9, block_size=4, new_token_ratio=0.01)
    for key, token in (("a", 1), ("b", 2), ("c", 3)):
        engine.add(ask(key, [token] * 5, max_tokens=12))
        engine.step()
    engine.pause("a")
    drain(engine)
    assert (engine.stats().preemptions, engine.stats().paused) == (1, 1)
    assert len([start for plan in runner.plans for start in plan.starts]) == 3


def test_a_paused_request_is_not_robbed_in_vain():
    engine, _ = build(num_blocks=10, block_size=4, new_token_ratio=0.01, enable_prefix_caching=False)
    engine.add(ask("slow", range(8), max_tokens=9))
    engine.add(ask("a", range(8), max_tokens=6))
    engine.step()
    engine.pause("slow")
    engine.add(ask("big", range(26), max_tokens=2))
    engine.step()
    assert (engine.stats().waiting, engine.stats().preemptions) == (1, 0)
    assert finish(drain(engine)["big"])
    assert engine.stats().preemptions == 0


def test_the_step_that_retracts_admits_nobody():
    engine, runner = build(num_blocks=8, block_size=4, max_num_seqs=2, new_token_ratio=0.01)
    engine.add(ask("first", [3], max_tokens=1))
    engine.pause("first")
    engine.add(ask("a", [1] * 10, max_tokens=12))
    engine.add(ask("b", [2] * 10, max_tokens=12))
    engine.step()
    engine.resume("first")
    while not engine.stats().preemptions:
        assert engine.step()
    assert runner.plans[-1].starts == ()
    engine.step()
    assert runner.plans[-1].starts


def test_lookups_are_counted_once_however_often_a_request_comes_back():
    engine, _ = build(num_blocks=9, block_size=4, new_token_ratio=0.01)
    for token in (1, 2, 3):
        engine.add(ask(f"r{token}", [token] * 5, max_tokens=12))
    drain(engine)
    stats = engine.stats()
    assert stats.preemptions
    assert (stats.prefix_queries, stats.prefix_hits) == (15, 0)


def test_expectations_start_afresh_after_an_idle_time():
    engine, runner = build(num_blocks=20, block_size=4, new_token_ratio=1.0)
    engine.add(ask("long", [4], max_tokens=70))
    drain(engine)
    for key in "ab":
        engine.add(ask(key, [1, 2, 3], max_tokens=40, salt=key))
    engine.step()
    # Two would have started with what the ratio had come down to.
    assert len(runner.plans[-1].starts) == 1


def test_retractions_raise_expectations():
    engine, _ = build(num_blocks=24, block_size=4, new_token_ratio=0.01)
    for i in range(8):
        engine.add(ask(f"r{i}", [i] * 5, max_tokens=40, seed=i))
    outputs = drain(engine)
    assert all(len(tokens(got)) == 40 for got in outputs.values())
    assert 0 < engine.stats().preemptions <= 7  # ten if nothing is learned from them


# -- two classes of work ------------------------------------------------------------------------------------


def test_a_row_is_taken_from_batch_at_once():
    engine, runner = build(max_num_seqs=2)
    for key in ("b1", "b2"):
        engine.add(ask(key, [1, 2], max_tokens=8, priority=1, salt=key))
    engine.step()
    engine.step()
    engine.add(ask("live", [3, 4], max_tokens=3))
    assert (engine.room(0), engine.room(1)) == (1, 0)
    outputs = {output.key: output for output in engine.step()}
    assert set(outputs) == {"live", "b1"}, "the one that came last gave way"
    assert [(start.row, list(start.output_ids)) for start in runner.plans[-1].starts] == [(1, [])]
    rest = drain(engine)
    assert tokens(rest["b2"]) == reference([1, 2], 0, 8)[2:], "it came back by itself, with what it had"
    assert tokens(rest["b1"])
    assert engine.stats().preemptions == 1


def test_blocks_are_taken_from_batch_only_as_far_as_needed():
    engine, _ = build(num_blocks=12, block_size=4, new_token_ratio=0.01, enable_prefix_caching=False)
    for key in ("b1", "b2", "b3"):
        engine.add(ask(key, range(13), max_tokens=3, priority=1))
    engine.step()
    engine.add(ask("live", range(20), max_tokens=3))
    got = [output.key for output in engine.step()]
    assert sorted(got) == ["b1", "live"]
    assert engine.stats().preemptions == 2
    outputs = drain(engine)
    assert all(finish(outputs[key]) for key in ("b1", "b2", "b3", "live"))


def test_batch_is_not_robbed_in_vain():
    engine, _ = build(num_blocks=12, block_size=4, new_token_ratio=0.01, enable_prefix_caching=False)
    engine.add(ask("a", range(20), max_tokens=3))
    engine.add(ask("b", range(12), max_tokens=3, priority=1))
    engine.step()
    engine.add(ask("big", range(30), max_tokens=3))
    engine.step()
    assert (engine.stats().waiting, engine.stats().preemptions) == (1, 0)


def test_batch_takes_no_budget_that_interactive_prompts_could_use():
    engine, runner = build(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=200)
    engine.add(ask("b1", [1], max_tokens=30, priority=1))
    engine.add(ask("b2", range(49), max_tokens=2, priority=1, salt="b"))
    engine.step()
    engine.step()
    engine.add(ask("live", range(20), max_tokens=4))
    for _ in range(2):
        engine.step()
        assert shape(runner.plans[-1]) == [(2, 8, False)], "all of it"
    engine.step()
    assert shape(runner.plans[-1]) == [(0, 1, True), (2, 4, True), (1, 3, False)]
    engine.step()
    assert shape(runner.plans[-1]) == [(2, 1, True), (0, 1, True), (1, 6, False)]
    outputs = drain(engine)
    assert {key: finish(outputs[key]) for key in outputs} == dict.fromkeys(("b1", "b2", "live"), "length")


def test_interactive_never_gives_way_to_batch():
    engine, _ = build(max_num_seqs=2)
    for key in ("a", "b"):
        engine.add(ask(key, [1, 2], max_tokens=8, salt=key))
    engine.step()
    engine.add(ask("batch", [3], max_tokens=2, priority=1))
    outputs = drain(engine)
    assert engine.stats().preemptions == 0
    assert list(outputs)[-1] == "batch"


def test_with_a_step_in_flight_batch_gives_way_within_two():
    engine, _ = build(max_num_seqs=2, overlap=1)
    for key in ("b1", "b2"):
        engine.add(ask(key, [1, 2], max_tokens=20, priority=1, salt=key))
    for _ in range(4):
        engine.step()
    engine.add(ask("live", [3, 4], max_tokens=3))
    got = [output.key for _ in range(3) for output in engine.step()]
    assert "live" in got
    outputs = drain(engine)
    assert tokens(outputs["b2"])[-1] == reference([1, 2], 0, 20)[-1]
    assert engine.stats().preemptions == 1


def test_inside_a_class_the_first_to_come_is_the_first_to_start_however_often_others_took_its_row():
    engine, _ = build(max_num_seqs=2)
    for number in range(5):
        engine.add(ask(f"b{number}", [1, 2], max_tokens=6, priority=1, salt=str(number)))
    ended = []
    for step in range(200):
        if step % 7 == 0:
            engine.add(ask(f"live{step}", [3, step % 40], max_tokens=2))
        ended += [output.key for output in engine.step() if output.finish]
        engine.check()
        if step > 60 and not engine.has_work():
            break
    batch = [key for key in ended if key.startswith("b")]
    assert batch == [f"b{number}" for number in range(5)]


def test_a_batch_row_whose_next_block_was_taken_is_left_out_of_the_step():
    engine, runner = build(num_blocks=2, block_size=4, enable_prefix_caching=False)
    engine.add(ask("batch", range(4), max_tokens=4, priority=1))
    engine.step()
    engine.add(ask("live", range(3), max_tokens=1))
    assert [output.key for output in engine.step()] == ["live"]
    assert shape(runner.plans[-1]) == [(1, 3, True)]
    assert tokens(drain(engine)["batch"]) == reference(range(4), 0, 4)[1:]
    assert engine.stats().preemptions == 0
