"""The engine as its driver sees it: endings, cancel, pause, continuation, cache counts, failing rows."""

from __future__ import annotations

import pytest

from tests.helpers.engines import ask, build, drain, finish, tokens
from tests.helpers.fake_runner import FakeRunner, reference
from workers.engine.config import EngineConfig
from workers.engine.core import NativeEngine
from workers.engine.plan import StepPlan, StepResult
from workers.engine.types import Engine, Finish, Output

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
COURSE = reference(PROMPT, 0, 40)
both_depths = pytest.mark.parametrize("overlap", [0, 1])


def test_it_is_an_engine():
    engine: Engine = build()[0]
    assert not engine.has_work()
    assert engine.step() == []


@both_depths
def test_tokens_come_one_by_one_and_the_last_says_why(overlap):
    engine, _ = build(overlap=overlap)
    engine.add(ask("a", PROMPT, max_tokens=3))
    assert drain(engine)["a"] == [
        Output("a", 0, COURSE[0]),
        Output("a", 1, COURSE[1]),
        Output("a", 2, COURSE[2], Finish.LENGTH),
    ]


@both_depths
@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_an_end_id_is_the_last_token(overlap, how):
    end = next(i for i in range(2, 40) if COURSE[i] not in COURSE[:i])
    engine, _ = build(overlap=overlap, eos=[COURSE[end]] if how == "eos" else [])
    more = {} if how == "eos" else {"stop_token_ids": (COURSE[end],), "ignore_eos": True}
    engine.add(ask("a", PROMPT, max_tokens=None, **more))
    outputs = drain(engine)["a"]
    assert (tokens(outputs), finish(outputs)) == (COURSE[: end + 1], Finish.STOP)


def test_ignore_eos_goes_on():
    engine, _ = build(eos=COURSE[:2])
    engine.add(ask("a", PROMPT, max_tokens=6, ignore_eos=True))
    assert tokens(drain(engine)["a"]) == COURSE[:6]


@both_depths
def test_min_tokens_masks_every_end(overlap):
    eos, stop = COURSE[0], COURSE[1]
    engine, runner = build(overlap=overlap, eos=[eos])
    engine.add(ask("a", PROMPT, max_tokens=6, min_tokens=3, stop_token_ids=(stop, 10**6)))
    outputs = drain(engine)["a"]
    expected = reference(PROMPT, 0, 6, min_tokens=3, masked=(eos, stop))
    assert tokens(outputs) == expected[: len(tokens(outputs))]
    assert len(tokens(outputs)) >= 3
    assert [set(plan.rows[0].masked) for plan in runner.plans[:4]] == [{eos, stop}] * 3 + [set()]


def test_the_context_length_ends_what_max_tokens_does_not():
    engine, _ = build(max_model_len=len(PROMPT) + 4)
    engine.add(ask("a", PROMPT, max_tokens=None))
    engine.add(ask("b", PROMPT, max_tokens=100, seed=1))
    outputs = drain(engine)
    assert [(len(out), finish(out)) for out in outputs.values()] == [(4, Finish.LENGTH)] * 2


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("x", range(40)), "context length"),
        (ask("x", []), "empty"),
        (ask("x", [1, 999]), "vocabulary"),
        (ask("x", range(33)), "do not fit the KV cache of 32"),
        (ask("x", range(32)), "do not fit the KV cache of 32"),
        (ask("x", range(20), max_tokens=30, output_ids=range(12)), "do not fit the KV cache of 32"),
    ],
)
def test_what_can_never_run_fails_alone(request_, words):
    engine, _ = build(num_blocks=8, block_size=4, max_model_len=40)
    engine.add(ask("a", PROMPT))
    engine.add(request_)
    outputs = drain(engine)
    assert tokens(outputs["a"]) == COURSE[:5]
    (output,) = outputs["x"]
    assert (output.token, output.finish, output.index) == (None, Finish.ERROR, len(request_.output_ids))
    assert words in output.error


def test_a_key_is_free_again_only_after_its_end():
    engine, _ = build()
    engine.add(ask("a", PROMPT, max_tokens=2))
    with pytest.raises(ValueError, match="already here"):
        engine.add(ask("a", PROMPT))
    drain(engine)
    engine.add(ask("a", PROMPT, max_tokens=2))
    assert tokens(drain(engine)["a"]) == COURSE[:2]


@both_depths
def test_a_new_owner_continues_where_the_old_one_was(overlap):
    engine, runner = build(overlap=overlap)
    engine.add(ask("a", PROMPT, max_tokens=9, output_ids=COURSE[:4]))
    outputs = drain(engine)["a"]
    assert tokens(outputs) == COURSE[4:9]
    assert [output.index for output in outputs] == [4, 5, 6, 7, 8]
    assert runner.plans[0].starts[0].output_ids == COURSE[:4]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"max_tokens": 4}, Finish.LENGTH),
        ({"max_tokens": 0}, Finish.LENGTH),
        ({"max_tokens": 9, "stop_token_ids": (COURSE[3],)}, Finish.STOP),
    ],
)
def test_what_was_already_complete_ends_at_once(more, expected):
    engine, runner = build()
    engine.add(ask("a", PROMPT, output_ids=COURSE[:4], **more))
    assert engine.has_work()
    assert drain(engine)["a"] == [Output("a", 4, None, expected)]
    assert not runner.plans


@both_depths
@pytest.mark.parametrize("when", ["waiting", "mid-prefill", "running", "paused", "parked"])
def test_cancel_ends_it_wherever_it_is(overlap, when):
    engine, _ = build(overlap=overlap, max_num_seqs=2, max_num_batched_tokens=4)
    engine.add(ask("other", [1], max_tokens=30))
    if when == "waiting":
        engine.add(ask("another", [2], max_tokens=30))
    engine.add(ask("a", PROMPT, max_tokens=30))
    got: list[Output] = []
    for _ in range({"mid-prefill": 2, "running": 6, "paused": 6}.get(when, 1)):
        got += [output for output in engine.step() if output.key == "a"]
    if when in ("paused", "parked"):
        engine.pause("a")
    engine.cancel("a")
    engine.cancel("a")
    got += [output for output in engine.step() if output.key == "a"]
    assert got[-1] == Output("a", len(got) - 1, None, Finish.CANCELLED)
    assert tokens(got) == COURSE[: len(got) - 1]
    outputs = drain(engine)
    assert "a" not in outputs
    assert engine.stats().kv_blocks_used == 0


def test_blocks_are_back_with_the_step_that_reports_the_cancel():
    engine, _ = build()
    engine.add(ask("a", PROMPT))
    engine.step()
    assert engine.stats().kv_blocks_used == 2
    engine.cancel("a")
    engine.step()
    assert engine.stats().kv_blocks_used == 0
    assert not engine.has_work()


@both_depths
def test_pause_keeps_everything_and_resume_goes_on(overlap):
    engine, runner = build(overlap=overlap)
    engine.add(ask("a", PROMPT, max_tokens=8))
    got: list[Output] = []
    for _ in range(3):
        got += engine.step()
    engine.pause("a")
    engine.pause("a")
    while engine.has_work():
        got += engine.step()
    assert len(got) == 3
    assert (engine.stats().running, engine.stats().paused) == (0, 1)
    assert engine.stats().kv_blocks_used > 0
    assert engine.step() == []
    engine.resume("a")
    engine.resume("a")
    assert tokens(got + drain(engine)["a"]) == COURSE[:8]
    assert sum(len(plan.starts) for plan in runner.plans) == 1


def test_a_paused_request_waits_outside_the_queue():
    engine, _ = build(max_num_seqs=1)
    engine.add(ask("a", PROMPT, max_tokens=3))
    engine.add(ask("b", PROMPT, max_tokens=2, seed=1))
    engine.pause("a")
    assert finish(drain(engine)["b"]) is Finish.LENGTH
    engine.resume("a")
    assert tokens(drain(engine)["a"]) == COURSE[:3]


@both_depths
@pytest.mark.parametrize("scarce", ["rows", "blocks"])
def test_nobody_waits_for_a_paused_request(overlap, scarce):
    limits = {"max_num_seqs": 1} if scarce == "rows" else {"num_blocks": 4}
    engine, _ = build(overlap=overlap, **limits)
    engine.add(ask("slow", PROMPT, max_tokens=6))
    got = [*engine.step(), *engine.step(), *engine.step()]
    engine.pause("slow")
    assert engine.room() > 0
    engine.add(ask("b", [9, *PROMPT], max_tokens=5, seed=1))
    while engine.has_work():
        got += engine.step()
        engine.check()
    assert tokens(o for o in got if o.key == "b") == reference([9, *PROMPT], 1, 5)
    assert engine.stats().preemptions == 1
    engine.resume("slow")
    got += drain(engine)["slow"]
    assert tokens(o for o in got if o.key == "slow") == COURSE[:6]


def test_unknown_keys_are_ignored():
    engine, _ = build()
    engine.cancel("a")
    engine.pause("a")
    engine.resume("a")
    assert not engine.has_work()


def test_cached_tokens_are_told_once_and_counted():
    engine, _ = build(block_size=4)
    engine.add(ask("a", PROMPT, max_tokens=2))
    drain(engine)
    engine.add(ask("b", [*PROMPT, 7], max_tokens=3))
    outputs = drain(engine)["b"]
    assert [output.cached_tokens for output in outputs] == [8, 0, 0]
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (17, 8)


def test_a_conversation_hits_its_own_answer():
    engine, _ = build(block_size=4)
    engine.add(ask("a", PROMPT, max_tokens=9))
    answer = tokens(drain(engine)["a"])
    engine.add(ask("b", [*PROMPT, *answer, 1], max_tokens=1))
    assert drain(engine)["b"][0].cached_tokens == 16


def test_only_prompt_tokens_count_as_cached():
    engine, _ = build(block_size=4)
    engine.add(ask("a", PROMPT[:5], max_tokens=12))
    output = tokens(drain(engine)["a"])
    engine.add(ask("b", PROMPT[:5], max_tokens=12, output_ids=output[:10]))
    outputs = drain(engine)["b"]
    assert [output.cached_tokens for output in outputs] == [5, 0]


def test_salts_do_not_share():
    engine, _ = build(block_size=4)
    for key, salt, cached in (("a", "", 0), ("b", "s", 0), ("c", "s", 4), ("d", "", 4)):
        engine.add(ask(key, PROMPT, max_tokens=1, salt=salt))
        assert drain(engine)[key][0].cached_tokens == cached


def test_caching_can_be_off():
    engine, _ = build(block_size=4, enable_prefix_caching=False)
    for key in "ab":
        engine.add(ask(key, PROMPT, max_tokens=1))
        assert drain(engine)[key][0].cached_tokens == 0


@both_depths
def test_a_failing_row_fails_its_request_alone(overlap):
    engine, _ = build(overlap=overlap, fault=lambda start, at: "not finite" if start.seed and at > 9 else "")
    engine.add(ask("bad", PROMPT, seed=1, max_tokens=9))
    engine.add(ask("good", PROMPT, max_tokens=9))
    outputs = drain(engine)
    assert tokens(outputs["good"]) == COURSE[:9]
    assert outputs["bad"][-1] == Output("bad", 2, None, Finish.ERROR, "not finite")
    assert len(outputs["bad"]) == 3


class BrokenRunner(FakeRunner):
    def launch(self, plan: StepPlan) -> object:
        raise RuntimeError("device lost")

    def collect(self, launched: object) -> StepResult:
        raise AssertionError


def test_a_broken_runner_is_the_drivers_business():
    config = EngineConfig(max_model_len=10, max_num_seqs=1, max_num_batched_tokens=4)
    engine = NativeEngine(BrokenRunner(4, 16), config=config, eos_ids=[], model_id="")
    engine.add(ask("a", [1]))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def test_blocks_of_another_size_are_refused():
    config = EngineConfig(max_model_len=10, max_num_seqs=1, max_num_batched_tokens=4)
    with pytest.raises(ValueError, match="blocks"):
        NativeEngine(FakeRunner(4, 8), config=config, eos_ids=[], model_id="")


def test_both_depths_give_the_same_streams():
    def run(overlap: int) -> dict[str, list[int]]:
        engine, _ = build(14, 4, overlap=overlap, max_num_batched_tokens=12, eos=[3], new_token_ratio=0.01)
        streams: dict[str, list[int | None]] = {}
        for i in range(12):
            engine.add(ask(f"r{i}", [*PROMPT[: i % 7], i], max_tokens=14 + i, seed=i))
            for output in engine.step():
                streams.setdefault(output.key, []).append(output.token)
        for key, outputs in drain(engine).items():
            streams.setdefault(key, []).extend(tokens(outputs))
        assert engine.stats().preemptions
        return streams

    assert run(0) == run(1)
