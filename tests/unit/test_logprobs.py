"""Logprobs from logits: exact order, ties, what is not finite, and rows that depend on nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from common.sampling import SamplingParams
from tests.unit.test_sampler import logits_of, sampler_for
from workers.engine.logprobs import SLICE, Distributions, likeliest, of_prompts
from workers.engine.plan import Targets
from workers.engine.sampler import Draw
from workers.engine.types import LOWEST, TokenLogprobs


def exact(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
    """By definition, in double precision: sort all."""
    wide = logits.astype(np.float64)
    values = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    order = np.lexsort((np.arange(len(wide)), -wide))[:top]
    return TokenLogprobs(float(values[token]), tuple((int(at), float(values[at])) for at in order))


def assert_close(got: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert got.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert [number for number, _ in got.top] == [number for number, _ in wanted.top]
    assert [value for _, value in got.top] == pytest.approx([value for _, value in wanted.top], abs=1e-5)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top", [0, 1, 5, 20, 300])
def test_the_definition(top: int, ties: bool) -> None:
    logits = logits_of(300, rows=40, ties=ties)
    tokens = [at * 7 for at in range(40)]
    reports = Distributions(logits, [top] * 40).of(tokens)
    for at, token in enumerate(tokens):
        assert_close(reports[at], exact(logits[at].numpy(), token, top))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 100])
def test_equal_ones_are_in_the_order_of_their_ids(count: int) -> None:
    """Few values, many ties, also across the cut: of every row exactly what a stable sort gives."""
    logits = torch.from_numpy(np.random.default_rng(3).integers(0, 4, (50, 100)).astype(np.float32))
    wanted = logits.sort(descending=True, stable=True).indices[:, :count]
    assert likeliest(logits, count).tolist() == wanted.tolist()


def test_more_than_there_are() -> None:
    [report] = Distributions(logits_of(5), [20]).of([0]).values()
    assert sorted(number for number, _ in report.top) == [0, 1, 2, 3, 4]


def test_only_rows_that_ask_get_something_and_each_what_it_asked_for() -> None:
    logits = logits_of(300, rows=5)
    reports = Distributions(logits, [None, 3, None, 0, 1]).of([1, 2, 3, 4, 5])
    assert {at: len(report.top) for at, report in reports.items()} == {1: 3, 3: 0, 4: 1}
    for at, token in ((1, 2), (3, 4), (4, 5)):
        [alone] = Distributions(logits[at : at + 1], [len(reports[at].top)]).of([token]).values()
        assert alone == reports[at]


def test_nobody_asks() -> None:
    assert Distributions(logits_of(300, rows=2), [None, None]).of([1, 2]) == {}


def test_what_the_model_rules_out_has_a_number_that_json_can_hold() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0, -1e5]])
    [report] = Distributions(logits, [4]).of([1]).values()
    half = pytest.approx(math.log(0.5))
    assert report == (LOWEST, ((0, half), (2, half), (3, LOWEST), (1, LOWEST)))
    assert LOWEST == -9999


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gets_nothing(broken: float) -> None:
    logits = logits_of(50, rows=3)
    logits[1, 7] = broken
    assert set(Distributions(logits, [2, 2, 2]).of([1, 1, None])) == {0, 2}


def test_the_sampler_changes_nothing_of_it() -> None:
    """Biases, penalties, masks and temperature work in place on the very logits."""
    params = SamplingParams(
        temperature=0.3,
        top_p=0.5,
        logprobs=3,
        logit_bias=((5, 100.0), (9, -100.0)),
        repetition_penalty=2.0,
        presence_penalty=2.0,
    )
    logits = logits_of(300)
    raw = logits.clone()
    kept = Distributions(logits, [3])
    chosen, _ = sampler_for(params, vocab=300, prompt=[1, 2], output=[3]).sample(logits, [Draw(0, 3, (7,))])
    assert chosen == [5]
    assert not torch.equal(logits, raw)
    assert_close(kept.of(chosen)[0], exact(raw[0].numpy(), 5, 3))


def test_prompts_are_scored_in_slices_that_nobody_sees() -> None:
    """Several rows, one longer than a slice; the head never makes more than a slice of logits."""
    rng = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(200, 8, generator=rng), torch.randn(300, 8, generator=rng)
    sizes: list[int] = []

    def head(some: torch.Tensor) -> torch.Tensor:
        sizes.append(len(some))
        return some @ weight.T

    rows = [(0, [3, 4, 5], 2), (10, [at % 200 for at in range(2 * SLICE + 9)], 5), (290, [7], 0)]
    scored = of_prompts(hidden, head, [(first, Targets(1, tokens, top)) for first, tokens, top in rows])
    assert max(sizes) == SLICE
    for (first, tokens, top), stretch in zip(rows, scored, strict=True):
        assert stretch is not None
        assert len(stretch) == len(tokens)
        logits = (hidden[first : first + len(tokens)] @ weight.T).numpy()
        for at, token in enumerate(tokens):
            assert_close(stretch[at], exact(logits[at], token, top))


def test_a_prompt_with_a_number_that_broke_gets_nothing() -> None:
    hidden = torch.ones(9, 4)
    hidden[5] = math.nan
    rows = [(0, Targets(1, [1, 2, 3], 1)), (3, Targets(1, [1, 2, 3, 4], 1)), (7, Targets(9, [1, 2], 1))]
    scored = of_prompts(hidden, lambda some: some @ torch.ones(4, 20), rows)
    assert [stretch and len(stretch) for stretch in scored] == [3, None, 2]


def test_nothing_to_score() -> None:
    assert of_prompts(torch.ones(2, 4), lambda some: some, []) == []
