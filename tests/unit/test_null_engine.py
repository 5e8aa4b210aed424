"""The engine without a model: the same stream everywhere, an even pace, and the manners of the real one."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.helpers.engines import ask, drain, finish, logprobs, prompt_logprobs, tokens
from tests.helpers.text import bundled_codec
from workers.engine.null import ASCII_IDS, STRETCH, NullEngine, logprobs_at, token_at
from workers.engine.types import Engine, Finish, Output, TokenLogprobs


class Clock:
    """Time that passes only in `sleep`, a little longer than asked."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 100.0
        self.late = late

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late


def null(**more: Any) -> NullEngine:
    limits = {"step_ms": 0, "max_num_seqs": 4, "max_model_len": 1000, "vocab_size": 49152}
    return NullEngine(**limits | more)


def course(seed: int, count: int) -> list[int]:
    return [token_at(seed, index) for index in range(count)]


def test_it_is_an_engine():
    engine: Engine = null()
    assert not engine.has_work()
    assert engine.step() == []
    assert engine.stats().kv_blocks_total == 0


def test_tokens_depend_on_seed_and_index_alone():
    engine = null()
    engine.add(ask("a", [1, 2, 3], max_tokens=50, seed=-(2**63)))
    engine.add(ask("b", [9], max_tokens=50, seed=2**63 - 1, temperature=0.0))
    outputs = drain(engine)
    assert tokens(outputs["a"]) == course(-(2**63), 50)
    assert tokens(outputs["b"]) == course(2**63 - 1, 50)
    assert [output.index for output in outputs["a"]] == list(range(50))
    assert finish(outputs["a"]) is Finish.LENGTH


def test_streams_differ_and_do_not_repeat():
    streams = [course(seed, 300) for seed in (*range(100), *range(-(2**63), -(2**63) + 100))]
    assert len({tuple(stream[:8]) for stream in streams}) == 200
    assert all(len(set(stream)) > 70 for stream in streams)
    assert not any(first == second for stream in streams for first, second in pairwise(stream))
    assert not any(
        stream[:20] == stream[offset : offset + 20] for stream in streams for offset in range(1, 280)
    )


def test_end_ids_and_what_the_vocabulary_lacks_are_never_generated():
    engine = null(vocab_size=60, eos_ids=ASCII_IDS[:30])
    for i in range(4):
        engine.add(ask(f"r{i}", [1], max_tokens=200, seed=i))
    outputs = drain(engine)
    seen = {token for got in outputs.values() for token in tokens(got)}
    assert seen == set(range(47, 60))
    assert tokens(outputs["r1"]) == [token_at(1, i, ids=engine.ids) for i in range(200)]


def test_a_vocabulary_with_none_of_the_ids_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 17"):
        null(vocab_size=17)


def test_every_id_is_text_in_the_real_vocabulary():
    codec = bundled_codec()
    texts = [codec.decode([token], skip_special_tokens=True) for token in ASCII_IDS]
    assert texts == [chr(ord("!") + i) for i in range(len(ASCII_IDS))]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"max_tokens": 3}, (3, Finish.LENGTH)),
        ({"max_tokens": None}, (7, Finish.LENGTH)),
        ({"max_tokens": 50}, (7, Finish.LENGTH)),
        ({"max_tokens": 50, "stop_token_ids": (token_at(1, 4),)}, (5, Finish.STOP)),
        ({"max_tokens": 50, "stop_token_ids": (token_at(1, 4),), "min_tokens": 6}, (7, Finish.LENGTH)),
        ({"max_tokens": 5, "stop_token_ids": (token_at(1, 4),)}, (5, Finish.STOP)),
    ],
)
def test_endings(more, expected):
    engine = null(max_model_len=10)
    engine.add(ask("a", [1, 2, 3], seed=1, **more))
    outputs = drain(engine)["a"]
    assert (len(tokens(outputs)), finish(outputs)) == expected
    assert tokens(outputs) == course(1, expected[0])


def test_a_new_owner_continues_where_the_old_one_was():
    engine = null()
    engine.add(ask("a", [1], max_tokens=9, seed=1, output_ids=course(1, 4)))
    outputs = drain(engine)["a"]
    assert tokens(outputs) == course(1, 9)[4:]
    assert [output.index for output in outputs] == [4, 5, 6, 7, 8]


PROMPT = [(at * 31) % 49152 for at in range(2 * STRETCH + 10)]


def said(of: list[int], places: range, top: int) -> list[TokenLogprobs]:
    return [logprobs_at(of[place], place, top, vocab_size=49152) for place in places]


def test_logprobs_are_made_up_of_token_and_place_alone():
    near_the_end = ((49150, -0.25), (49151, -1.25), (0, -2.25), (1, -3.25))
    assert logprobs_at(49150, 3, 4, vocab_size=49152) == (-0.25, near_the_end)
    assert logprobs_at(2, 0, 9, vocab_size=3).top == ((2, -0.0625), (0, -1.0625), (1, -2.0625))
    assert logprobs_at(7, 5, 0, vocab_size=9).top == ()


def test_a_token_comes_with_its_logprobs_where_they_are_asked_for():
    engine = null()
    engine.add(ask("asks", [1], max_tokens=9, seed=1, logprobs=2))
    engine.add(ask("zero", [1], max_tokens=9, seed=1, logprobs=0))
    engine.add(ask("plain", [1], max_tokens=9, seed=1))
    engine.add(ask("later", [1], max_tokens=9, seed=1, logprobs=2, output_ids=course(1, 4)))
    outputs = drain(engine)
    assert logprobs(outputs["asks"]) == said(course(1, 9), range(9), 2)
    assert logprobs(outputs["zero"]) == said(course(1, 9), range(9), 0)
    assert logprobs(outputs["plain"]) == [None] * 9
    assert logprobs(outputs["later"]) == said(course(1, 9), range(4, 9), 2)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_is_scored_stretch_by_stretch_before_its_tokens(max_tokens):
    engine = null()
    engine.add(ask("a", PROMPT, max_tokens=max_tokens, prompt_logprobs=2))
    engine.add(ask("b", PROMPT, max_tokens=5))
    [begun, _] = engine.step()
    engine.pause("a")
    assert [output.key for output in engine.step()] == ["b"]
    engine.resume("a")
    outputs = drain(engine)
    got = [begun, *outputs["a"]]
    assert prompt_logprobs(got) == said(PROMPT, range(1, len(PROMPT)), 2)
    assert max(len(output.prompt.tokens) for output in got if output.prompt) == STRETCH
    assert (tokens(got), finish(got)) == (course(0, max_tokens), Finish.LENGTH)
    assert tokens(outputs["b"]) == course(0, 5)[2:]
    assert not any(output.prompt for output in outputs["b"])


def test_a_new_owner_scores_no_prompt_of_which_there_are_tokens():
    engine = null()
    engine.add(ask("a", PROMPT, max_tokens=9, prompt_logprobs=2, output_ids=course(0, 1)))
    assert prompt_logprobs(drain(engine)["a"]) == []


def test_what_asks_for_no_tokens_ends_at_once_or_when_it_is_scored():
    engine = null(max_model_len=len(PROMPT))
    engine.add(ask("nothing", PROMPT, max_tokens=0))
    engine.add(ask("short", [1], max_tokens=0, prompt_logprobs=1))
    engine.add(ask("scored", PROMPT, max_tokens=0, prompt_logprobs=1))
    outputs = drain(engine)
    assert outputs["nothing"] == [Output("nothing", 0, None, Finish.LENGTH)]
    assert outputs["short"] == [Output("short", 0, None, Finish.LENGTH)]
    assert len(prompt_logprobs(outputs["scored"])) == len(PROMPT) - 1
    assert outputs["scored"][-1] == Output("scored", 0, None, Finish.LENGTH)


def test_what_was_complete_or_can_never_run_ends_at_once():
    engine = null(max_model_len=10)
    engine.add(ask("done", [1], max_tokens=2, output_ids=[20, 21]))
    engine.add(ask("long", range(10)))
    engine.add(ask("wrong", [10**6]))
    outputs = drain(engine)
    assert outputs["done"] == [Output("done", 2, None, Finish.LENGTH)]
    assert [finish(outputs[key]) for key in ("long", "wrong")] == [Finish.ERROR] * 2
    assert "context length" in outputs["long"][0].error


def test_rows_priorities_and_room():
    engine = null(max_num_seqs=2)
    assert engine.room() == 2
    for key, priority in (("batch", 1), ("a", 0), ("b", 0)):
        engine.add(ask(key, [1], max_tokens=2, priority=priority))
    assert engine.room() == 0
    assert [output.key for output in engine.step()] == ["a", "b"]
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)
    assert engine.room() == 0
    engine.step()
    assert (engine.room(0), engine.room(1)) == (2, 1)
    drain(engine)
    assert engine.room() == 2


def test_cancel_pause_and_resume():
    engine = null(max_num_seqs=2)
    for key in "abc":
        engine.add(ask(key, [1], max_tokens=4, seed=1))
    engine.step()
    engine.pause("a")
    engine.pause("c")
    engine.pause("c")
    engine.cancel("b")
    engine.cancel("nobody")
    assert engine.step() == [Output("b", 1, None, Finish.CANCELLED)]
    assert (engine.stats().paused, engine.has_work(), engine.room()) == (2, False, 2)
    engine.check()
    engine.resume("c")
    engine.resume("a")
    engine.cancel("c")
    outputs = drain(engine)
    assert outputs["c"] == [Output("c", 0, None, Finish.CANCELLED)]
    assert tokens(outputs["a"]) == course(1, 4)[1:]


def test_a_key_is_free_again_only_after_its_end():
    engine = null(max_num_seqs=1)
    engine.add(ask("a", [1], max_tokens=1))
    engine.add(ask("b", [1], max_tokens=1))
    engine.pause("b")
    for key in "ab":
        with pytest.raises(ValueError, match="already here"):
            engine.add(ask(key, [1]))
    drain(engine)
    engine.add(ask("a", [1], max_tokens=1))


def test_steps_keep_a_grid():
    clock = Clock(late=0.003)
    engine = null(step_ms=10, clock=clock, sleep=clock.sleep)
    engine.add(ask("a", [1], max_tokens=200))
    drain(engine)
    assert clock.now == pytest.approx(100 + 200 * 0.010 + 0.003)


def test_missed_steps_are_not_made_up_for():
    clock = Clock()
    engine = null(step_ms=10, clock=clock, sleep=clock.sleep)
    engine.add(ask("a", [1], max_tokens=200))
    engine.step()
    clock.now += 0.0345
    engine.step()
    assert clock.now == pytest.approx(100.0445)
    engine.step()
    assert clock.now == pytest.approx(100.050)


def test_a_step_after_an_idle_time_takes_its_time():
    clock = Clock()
    engine = null(step_ms=10, clock=clock, sleep=clock.sleep)
    for key in "ab":
        engine.add(ask(key, [1], max_tokens=1))
        clock.now += 5.0
        before = clock.now
        assert len(drain(engine)[key]) == 1
        assert clock.now - before == pytest.approx(0.010)


def test_random_steering_ends_every_request_once():
    rng = random.Random(5)
    engine, outputs, live = null(max_num_seqs=3), {}, {}
    for i in range(300):
        key = f"r{i}"
        live[key] = ask(key, [1], max_tokens=rng.randint(1, 9), seed=i, priority=i % 2)
        engine.add(live[key])
        for act in rng.choices(("cancel", "pause", "resume"), k=2):
            getattr(engine, act)(rng.choice(list(live)))
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
        engine.check()
    for key in live:
        engine.resume(key)
    for key, more in drain(engine).items():
        outputs.setdefault(key, []).extend(more)
    for key, request in live.items():
        got = tokens(outputs[key])
        assert got == course(request.seed, len(got))
        assert finish(outputs[key]) in (Finish.LENGTH, Finish.CANCELLED)


def test_a_token_is_cheap():
    """Aim: 0.5 microseconds. Asserted at five times that, the best of several runs."""
    engine = null(max_num_seqs=64, max_model_len=10**6)
    for i in range(64):
        engine.add(ask(f"r{i}", [1], max_tokens=None, seed=i))
    best = min(_seconds(engine, 100) for _ in range(5)) / 6400
    assert best < 2.5e-6


def _seconds(engine: NullEngine, steps: int) -> float:
    before = time.process_time()
    for _ in range(steps):
        engine.step()
    return time.process_time() - before


def test_batch_gives_its_row_to_interactive_and_takes_it_back():
    engine = null(max_num_seqs=2)
    for number in range(3):
        engine.add(ask(f"b{number}", [1], max_tokens=20, seed=number, priority=1))
    for _ in range(3):
        engine.step()
    assert (engine.room(0), engine.room(1)) == (2, 0)
    engine.add(ask("live", [1], max_tokens=2, seed=9))
    assert [output.key for output in engine.step()] == ["b0", "live"]
    assert (engine.stats().running, engine.stats().waiting, engine.stats().preemptions) == (2, 2, 1)
    outputs = drain(engine)
    assert list(outputs) == ["b0", "live", "b1", "b2"]
    assert tokens(outputs["b1"]) == course(1, 20)[3:]
    assert [output.index for output in outputs["b1"]] == list(range(3, 20))


def test_only_as_many_rows_are_taken_as_are_asked_for_and_never_within_a_class():
    engine = null(max_num_seqs=4)
    engine.add(ask("early", [1], max_tokens=9, priority=1))
    engine.pause("early")
    for number in range(4):
        engine.add(ask(f"b{number}", [1], max_tokens=9, priority=1))
    engine.step()
    engine.resume("early")
    engine.add(ask("live", [1], max_tokens=9))
    assert [output.key for output in engine.step()] == ["b0", "b1", "b2", "live"]
    assert engine.stats().preemptions == 1
