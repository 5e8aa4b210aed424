"""Logprobs of a real model against transformers, in every schedule; and what they must not depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.sampling import SamplingParams
from tests.helpers.engines import drain, finish, logprobs, prompt_logprobs, tokens
from tests.helpers.model import assert_logprobs, engine_on, tiny_llama
from workers.engine.types import EngineRequest, Finish, Output, TokenLogprobs

VOCAB = 101
TOP = 4
#: What changes the choice of a token, and must not change what is said of it.
KINDS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.7, max_tokens=9, logit_bias=((5, 9.0), (17, -50.0))),
    SamplingParams(top_k=3, temperature=0.2, max_tokens=15, repetition_penalty=1.5),
    SamplingParams(temperature=0, max_tokens=8, min_tokens=8, stop_token_ids=tuple(range(60))),
    SamplingParams(max_tokens=0),
]
#: Every schedule that may come in between: chunks, other rows, retraction, steps ahead of their commits.
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"overlap": 1},
    {"budget": 9},
    {"kv_tokens": 72, "new_token_ratio": 0.01},
    {"kv_tokens": 72, "new_token_ratio": 0.01, "overlap": 1, "budget": 16},
    {"rows": 3, "enable_prefix_caching": False},
]


@pytest.fixture(scope="module", params=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random Llama: its folder, and transformers' own in float32."""
    folder: Path = tmp_path_factory.mktemp("llama")
    return folder, tiny_llama(folder, tie_word_embeddings=request.param == "tied")


def requests() -> list[EngineRequest]:
    """Shared prefixes, of different lengths; every third asks for nothing."""
    prefix = [(at * 37) % VOCAB for at in range(40)]
    asked = []
    for at in range(15):
        params = replace(KINDS[at % len(KINDS)], logprobs=TOP, prompt_logprobs=TOP)
        if at % 3 == 2:
            params = replace(params, logprobs=None, prompt_logprobs=None)
        asked.append(EngineRequest(f"r{at}", [*prefix[: 8 * (at % 6)], at, 3 * at + 1], params, seed=at))
    return asked


def run(engine: Any, asked: list[EngineRequest]) -> dict[str, list[Output]]:
    for request in asked:
        engine.add(request)
    return drain(engine)


def check(outputs: dict[str, list[Output]], asked: list[EngineRequest], reference: Any) -> None:
    for request in asked:
        got = outputs[request.key]
        generated = tokens(got)
        assert finish(got) in (Finish.LENGTH, Finish.STOP)
        if request.params.logprobs is None:
            assert prompt_logprobs(got) == []
            assert logprobs(got) == [None] * len(generated)
            continue
        prompt = list(request.prompt_ids)
        assert len(prompt_logprobs(got)) == len(prompt) - 1
        assert_logprobs(prompt_logprobs(got), reference, prompt, TOP)
        if generated:
            assert_logprobs(logprobs(got), reference, [*prompt, *generated], TOP)


@pytest.mark.parametrize("limits", SCHEDULES, ids=str)
def test_every_schedule_gives_transformers_numbers(model: tuple[Path, Any], limits: dict[str, Any]) -> None:
    folder, reference = model
    engine, asked = engine_on(folder, **limits), requests()
    check(run(engine, asked), asked, reference)
    if "new_token_ratio" in limits:
        assert engine.stats().preemptions > 0
    # Once more, with all prompts in the cache.
    check(run(engine, asked), asked, reference)
    assert engine.stats().kv_blocks_used == 0


def near(reports: list[TokenLogprobs | None]) -> list[Any]:
    return [report and pytest.approx(report.logprob, abs=1e-4) for report in reports]


def test_a_batch_gives_what_each_gets_alone(model: tuple[Path, Any]) -> None:
    folder, _ = model
    asked = requests()
    together = run(engine_on(folder), asked)
    for request in asked:
        alone = run(engine_on(folder, enable_prefix_caching=False), [request])[request.key]
        assert tokens(together[request.key]) == tokens(alone)
        got = [*prompt_logprobs(together[request.key]), *logprobs(together[request.key])]
        wanted = [*prompt_logprobs(alone), *logprobs(alone)]
        assert [report and report.logprob for report in got] == near(wanted)


def test_a_second_owner_says_the_same_of_what_is_left(model: tuple[Path, Any]) -> None:
    folder, _ = model
    engine = engine_on(folder)
    for request in requests():
        whole = run(engine_on(folder), [request])[request.key]
        given = tokens(whole)[:4]
        if not given or len(given) == len(tokens(whole)):
            continue
        got = run(engine, [replace(request, output_ids=given)])[request.key]
        assert tokens(got) == tokens(whole)[4:]
        assert prompt_logprobs(got) == []
        assert [report and report.logprob for report in logprobs(got)] == near(logprobs(whole)[4:])


def test_asking_changes_no_token(model: tuple[Path, Any]) -> None:
    folder, _ = model
    asked = requests()
    plain = [
        replace(request, params=replace(request.params, logprobs=None, prompt_logprobs=None))
        for request in asked
    ]
    with_them, without = run(engine_on(folder), asked), run(engine_on(folder), plain)
    assert {key: tokens(got) for key, got in with_them.items()} == {
        key: tokens(got) for key, got in without.items()
    }


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_whose_numbers_break_fails_alone(tmp_path: Path, max_tokens: int) -> None:
    """One poisoned embedding. Chunks before it are scored; the one that has it is not."""
    reference = tiny_llama(tmp_path)
    embedding = reference.model.embed_tokens.weight.data
    kept = embedding[49].clone()
    embedding[49] = float("nan")
    reference.save_pretrained(tmp_path)
    embedding[49] = kept
    bad = EngineRequest(
        "bad", [*range(20), 49, *range(9)], SamplingParams(max_tokens=max_tokens, prompt_logprobs=TOP), seed=1
    )
    outputs = run(engine_on(tmp_path, budget=12), [bad, *requests()])
    assert (outputs["bad"][-1].finish, outputs["bad"][-1].token) == (Finish.ERROR, None)
    assert "not finite" in outputs["bad"][-1].error
    scored = prompt_logprobs(outputs["bad"])
    assert 0 < len(scored) < 20
    assert_logprobs(scored, reference, range(len(scored) + 1), TOP)
    asked = [each for each in requests() if 49 not in tokens(outputs[each.key])]
    assert len(asked) > 5
    check(outputs, asked, reference)
