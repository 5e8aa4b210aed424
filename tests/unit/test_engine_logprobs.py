"""Logprobs as the engine gives them: in order, once, whatever the chunks, the cache and the others do."""

from __future__ import annotations

import pytest

from tests.helpers.engines import ask, build, drain, finish, logprobs, prompt_logprobs, tokens
from tests.helpers.fake_runner import reference, scores
from workers.engine.types import Finish, Output

PROMPT = [(at * 7 + 3) % 50 for at in range(22)]
COURSE = reference(PROMPT, 0, 20)
WANTED = scores(PROMPT, 2)
both_depths = pytest.mark.parametrize("overlap", [0, 1])


@both_depths
def test_a_token_comes_with_its_logprobs_where_they_are_asked_for(overlap):
    engine, _ = build(overlap=overlap)
    engine.add(ask("asks", PROMPT, max_tokens=6, logprobs=3))
    engine.add(ask("zero", PROMPT, max_tokens=6, logprobs=0))
    engine.add(ask("plain", PROMPT, max_tokens=6))
    outputs = drain(engine)
    assert logprobs(outputs["asks"]) == scores(PROMPT, 3, COURSE[:6])
    assert logprobs(outputs["zero"]) == scores(PROMPT, 0, COURSE[:6])
    assert logprobs(outputs["plain"]) == [None] * 6
    assert outputs["asks"][-1].finish is Finish.LENGTH
    assert [tokens(got) for got in outputs.values()] == [COURSE[:6]] * 3


@both_depths
@pytest.mark.parametrize("budget", [1, 2, 5, 7, 21, 22, 64])
def test_a_prompt_is_scored_chunk_by_chunk(overlap, budget):
    engine, runner = build(overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=1)
    engine.add(ask("a", PROMPT, max_tokens=3, prompt_logprobs=2))
    outputs = drain(engine)["a"]
    assert prompt_logprobs(outputs) == WANTED
    assert (tokens(outputs), logprobs(outputs)) == (COURSE[:3], [None] * 3)
    assert sum(output.prompt is not None for output in outputs) == -(-21 // budget)
    chunks = [row for plan in runner.plans for row in plan.rows if row.targets]
    assert [len(row.tokens) for row in chunks[:-1]] == [budget] * (len(chunks) - 1), "as fast as without"


@both_depths
def test_rows_of_one_step_do_not_mix(overlap):
    engine, runner = build(overlap=overlap, max_num_batched_tokens=20, max_num_seqs=5)
    prompts = {f"r{at}": [at, *PROMPT[: 3 * at + 1]] for at in range(5)}
    for at, (key, prompt) in enumerate(prompts.items()):
        asked = None if at == 2 else at
        engine.add(ask(key, prompt, max_tokens=4, seed=at, logprobs=asked, prompt_logprobs=asked))
    outputs = drain(engine)
    assert any(sum(row.targets is not None for row in plan.rows) > 1 for plan in runner.plans)
    for at, (key, prompt) in enumerate(prompts.items()):
        assert tokens(outputs[key]) == reference(prompt, at, 4)
        if at == 2:
            assert prompt_logprobs(outputs[key]) == []
            assert logprobs(outputs[key]) == [None] * 4
        else:
            assert prompt_logprobs(outputs[key]) == scores(prompt, at)
            assert logprobs(outputs[key]) == scores(prompt, at, tokens(outputs[key]))


def test_a_cached_prompt_is_computed_again_to_be_scored():
    engine, _ = build()
    engine.add(ask("before", PROMPT, max_tokens=1))
    drain(engine)
    engine.add(ask("a", PROMPT, max_tokens=3, logprobs=1, prompt_logprobs=2))
    outputs = drain(engine)["a"]
    assert prompt_logprobs(outputs) == WANTED
    assert logprobs(outputs) == scores(PROMPT, 1, COURSE[:3])
    assert [output.cached_tokens for output in outputs] == [0] * len(outputs)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_was_scored_is_there_for_others_to_hit(max_tokens):
    engine, _ = build(block_size=4)
    engine.add(ask("a", PROMPT, max_tokens=max_tokens, prompt_logprobs=0))
    drain(engine)
    engine.add(ask("b", PROMPT, max_tokens=2))
    outputs = drain(engine)["b"]
    assert outputs[0].cached_tokens == 20
    assert tokens(outputs) == COURSE[:2]


@both_depths
def test_a_retracted_prompt_goes_on_where_its_report_was(overlap):
    """An interactive request takes the only row in the middle of a long prompt of the other class."""
    engine, runner = build(overlap=overlap, max_num_seqs=1, max_num_batched_tokens=5)
    engine.add(ask("batch", PROMPT, max_tokens=3, logprobs=1, prompt_logprobs=2, priority=1))
    got: list[Output] = []
    for _ in range(3):
        got += engine.step()
        engine.check()
    engine.add(ask("live", [9, 8, 7], max_tokens=2))
    outputs = drain(engine)
    got += outputs["batch"]
    assert tokens(outputs["live"]) == reference([9, 8, 7], 0, 2)
    assert engine.stats().preemptions == 1
    assert prompt_logprobs(got) == WANTED
    assert logprobs(got) == scores(PROMPT, 1, COURSE[:3])
    *_, again = [plan.rows[0] for plan in runner.plans if plan.starts]
    assert again.start == 12, "the blocks before what is still to be scored are hits"


@both_depths
def test_a_retracted_generation_reports_no_prompt_again(overlap):
    engine, _ = build(overlap=overlap, max_num_seqs=1)
    engine.add(ask("batch", PROMPT, max_tokens=8, logprobs=1, prompt_logprobs=2, priority=1))
    got = [*engine.step(), *engine.step(), *engine.step(), *engine.step()]
    engine.add(ask("live", [9, 8, 7], max_tokens=2))
    got += drain(engine)["batch"]
    assert engine.stats().preemptions == 1
    assert prompt_logprobs(got) == WANTED
    assert (tokens(got), logprobs(got)) == (COURSE[:8], scores(PROMPT, 1, COURSE[:8]))


@both_depths
def test_a_new_owner_gives_the_same_for_what_is_left(overlap):
    """Whoever generated a token had sent the whole prompt before it; who generated none may not have."""
    engine, runner = build(overlap=overlap)
    more = {"max_tokens": 9, "logprobs": 2, "prompt_logprobs": 2}
    engine.add(ask("later", PROMPT, output_ids=COURSE[:4], **more))
    engine.add(ask("first", PROMPT, output_ids=[], **more))
    outputs = drain(engine)
    assert prompt_logprobs(outputs["later"]) == []
    assert prompt_logprobs(outputs["first"]) == WANTED
    assert logprobs(outputs["later"]) == scores(PROMPT, 2, COURSE[:9])[4:]
    assert logprobs(outputs["first"]) == scores(PROMPT, 2, COURSE[:9])
    assert not any(row.targets for plan in runner.plans for row in plan.rows if row.row == 0)


@both_depths
@pytest.mark.parametrize("budget", [1, 3, 7, 21, 64])
def test_a_request_for_no_tokens_ends_when_its_prompt_is_scored(overlap, budget):
    engine, runner = build(overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=1, eos=[COURSE[0]])
    engine.add(ask("a", PROMPT, max_tokens=0, min_tokens=0, logprobs=1, prompt_logprobs=2))
    outputs = drain(engine)["a"]
    assert prompt_logprobs(outputs) == WANTED
    assert outputs[-1] == Output("a", 0, None, Finish.LENGTH)
    assert all(output.prompt for output in outputs[:-1])
    assert not any(row.sample for plan in runner.plans for row in plan.rows)
    assert engine.stats().kv_blocks_used == 0


@both_depths
def test_it_may_be_paused_cancelled_and_retracted_on_the_way(overlap):
    engine, _ = build(overlap=overlap, max_num_seqs=1, max_num_batched_tokens=7)
    engine.add(ask("a", PROMPT, max_tokens=0, prompt_logprobs=2, priority=1))
    got = engine.step()
    engine.pause("a")
    while engine.has_work():
        got += engine.step()
    engine.resume("a")
    got += engine.step()
    engine.add(ask("live", [1], max_tokens=1))
    got += drain(engine).get("a", [])
    assert prompt_logprobs(got) == WANTED
    assert finish(got) is Finish.LENGTH
    engine.add(ask("b", PROMPT, max_tokens=0, prompt_logprobs=2))
    got = [*engine.step(), *engine.step()]
    engine.cancel("b")
    rest = drain(engine)["b"]
    assert rest == [Output("b", 0, None, Finish.CANCELLED)]
    assert prompt_logprobs(got) == WANTED[: len(prompt_logprobs(got))]


@pytest.mark.parametrize(
    ("prompt", "more"), [(PROMPT, {}), (PROMPT, {"logprobs": 2}), ([5], {"prompt_logprobs": 2})]
)
def test_a_request_for_nothing_ends_at_once(prompt, more):
    engine, runner = build()
    engine.add(ask("a", prompt, max_tokens=0, **more))
    assert drain(engine)["a"] == [Output("a", 0, None, Finish.LENGTH)]
    assert not runner.plans


def test_a_prompt_of_one_token_has_nothing_to_report():
    engine, _ = build()
    engine.add(ask("a", [5], max_tokens=2, prompt_logprobs=2))
    assert [output.prompt for output in drain(engine)["a"]] == [None, None]


@pytest.mark.parametrize("limit", ["context", "cache"])
def test_a_prompt_that_is_only_scored_may_fill_everything(limit):
    limits = {"max_model_len": 24} if limit == "context" else {"num_blocks": 6, "block_size": 4}
    engine, _ = build(**limits)
    prompt = [*PROMPT, 1, 2]
    engine.add(ask("scored", prompt, max_tokens=0, prompt_logprobs=1))
    engine.add(ask("generating", prompt, max_tokens=1, prompt_logprobs=1))
    engine.add(ask("longer", [*prompt, 3], max_tokens=0, prompt_logprobs=1))
    outputs = drain(engine)
    assert prompt_logprobs(outputs["scored"]) == scores(prompt, 1)
    assert finish(outputs["scored"]) is Finish.LENGTH
    assert [finish(outputs[key]) for key in ("generating", "longer")] == [Finish.ERROR] * 2


def test_rows_that_do_not_ask_are_planned_as_before():
    engine, runner = build()
    engine.add(ask("a", PROMPT, max_tokens=3))
    drain(engine)
    assert all((row.logprobs, row.targets) == (None, None) for plan in runner.plans for row in plan.rows)
