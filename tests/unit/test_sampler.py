"""The sampler: exact distributions, exact greedy, and rows that depend on nothing but themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from common.sampling import SamplingParams
from workers.engine import noise
from workers.engine.filters import candidates
from workers.engine.plan import RowStart
from workers.engine.sampler import Draw, Sampler

GREEDY = SamplingParams(temperature=0)


def sampler_for(
    *params: SamplingParams,
    vocab: int,
    seed: int = 1,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Sampler:
    sampler = Sampler(vocab, len(params))
    for row, each in enumerate(params):
        sampler.start(RowStart(row, prompt, output, each, seed))
    return sampler


def logits_of(
    vocab: int, rows: int = 1, *, seed: int = 0, scale: float = 3.0, ties: bool = False
) -> torch.Tensor:
    values = torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32))
    return values.bfloat16().float() if ties else values


def exact(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that the parameters describe, by definition: sort all, keep, renormalise."""
    scores = logits.astype(np.float64) / params.temperature
    order = np.lexsort((np.arange(len(scores)), -scores))
    kept = order[: params.top_k or len(order)]
    weights = np.exp(scores[kept] - scores[kept[0]])
    weights /= weights.sum()
    if params.top_p < 1:
        kept = kept[: max(1, int((weights.cumsum() - weights < params.top_p).sum()))]
    if params.min_p:
        kept = kept[np.exp(scores[kept] - scores[kept[0]]) >= params.min_p]
    result = np.zeros(len(scores))
    result[kept] = np.exp(scores[kept] - scores[kept[0]])
    return result / result.sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the counts are off; rare outcomes share one bin."""
    if counts[expected == 0].any():
        return math.inf
    wanted = expected * counts.sum()
    common = wanted >= 5
    got = np.append(counts[common], counts[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    terms = (got - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]
    degrees = len(terms) - 1
    return float((terms.sum() - degrees) / math.sqrt(2 * max(degrees, 1)))


def counted(params: SamplingParams, logits: torch.Tensor, draws: int, *, by: str) -> np.ndarray:
    """How often each id came out, over positions of one request or over seeds at one position."""
    vocab = logits.shape[1]
    counts: Counter[int | None] = Counter()
    batch = 500
    sampler = sampler_for(params, vocab=vocab)
    for start in range(0, draws, batch):
        if by == "seeds":
            sampler = Sampler(vocab, batch)
            for row in range(batch):
                sampler.start(RowStart(row, (), (), params, start + row))
            places = [Draw(row, 7) for row in range(batch)]
        else:
            places = [Draw(0, start + at) for at in range(batch)]
        tokens, errors = sampler.sample(logits.repeat(batch, 1), places)
        assert not errors
        counts.update(tokens)
    return np.array([counts[token] for token in range(vocab)])


DISTRIBUTIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.7, top_p=0.95, min_p=0.1),
]


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=lambda p: p.to_json())
def test_draws_follow_the_exact_distribution(params: SamplingParams, vocab: int) -> None:
    logits = logits_of(vocab)
    expected = exact(logits[0].numpy(), params)
    counts = counted(params, logits, 6000, by="positions")
    assert chi_square(counts, expected) < 4


def test_draws_follow_the_distribution_over_seeds_too() -> None:
    logits = logits_of(50)
    counts = counted(SamplingParams(), logits, 6000, by="seeds")
    assert chi_square(counts, exact(logits[0].numpy(), SamplingParams())) < 4


def test_the_chi_square_test_can_fail() -> None:
    logits = logits_of(50)
    counts = counted(SamplingParams(), logits, 6000, by="positions")
    assert chi_square(counts, exact(logits[0].numpy(), SamplingParams(temperature=1.15))) > 6
    assert chi_square(counts, exact(logits[0].numpy(), SamplingParams(min_p=0.01))) > 6


def test_noise_is_uniform_in_every_byte_and_independent_between_ids() -> None:
    drawn = np.stack([noise.bits(noise.key(3, at), noise.spread(np.arange(256))) for at in range(1000)])
    for shift in (0, 8, 16, 24):
        values = np.bincount(((drawn >> shift) & 255).ravel(), minlength=256)
        assert chi_square(values, np.full(256, 1 / 256)) < 4
    uniform = drawn.astype(np.float64)
    near = np.corrcoef(uniform[:, :-1].ravel(), uniform[:, 1:].ravel())[0, 1]
    after = np.corrcoef(uniform[:-1].ravel(), uniform[1:].ravel())[0, 1]
    assert max(abs(near), abs(after)) < 0.01


def test_noise_is_a_definition_that_must_not_drift() -> None:
    bits = noise.bits(noise.key(-5, 1234), noise.spread(np.array([0, 1, 49151])))
    assert bits.tolist() == NOISE_GOLDEN
    assert noise.key(2**63 - 1, 0) != noise.key(-(2**63), 0)
    assert noise.key(1, 2) != noise.key(2, 1)


NOISE_GOLDEN = [142237138, 1793584270, 3041840664]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_an_unfiltered_draw_is_the_argmax_over_all_noise(temperature: float) -> None:
    logits = logits_of(5000, seed=2)
    for position in range(300):
        params = SamplingParams(temperature=temperature)
        tokens, _ = sampler_for(params, vocab=5000, seed=9).sample(logits.clone(), [Draw(0, position)])
        every = noise.gumbel(noise.bits(noise.key(9, position), noise.spread(np.arange(5000))))
        scores = (logits - logits.max()).div(torch.tensor([[temperature]]))[0].numpy()
        assert tokens == [int((scores + every).argmax())]


def test_a_filtered_draw_uses_the_noise_of_its_ids_not_of_their_ranks() -> None:
    """A cut that spares the winner does not change the winner."""
    logits = logits_of(5000, seed=3)
    for position in range(200):
        open_draw, _ = sampler_for(SamplingParams(), vocab=5000).sample(logits.clone(), [Draw(0, position)])
        for params in (SamplingParams(top_k=2000), SamplingParams(top_p=0.999), SamplingParams(min_p=0.0001)):
            kept = candidates((logits - logits.max()).clone(), [params])[0]
            assert kept is not None
            if open_draw[0] in kept.ids:
                cut, _ = sampler_for(params, vocab=5000).sample(logits.clone(), [Draw(0, position)])
                assert cut == open_draw


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scale", [0.05, 0.5, 4.0])
def test_prefilters_keep_exactly_what_a_full_sort_keeps(ties: bool, scale: float) -> None:
    logits = logits_of(4000, 3, seed=4, scale=scale, ties=ties)
    scores = logits - logits.max(dim=-1, keepdim=True).values
    for top_k in (0, 1, 3, 100, 127, 128, 129, 1023, 1024, 2000, 4000, 5000):
        for top_p in (1.0, 0.999, 0.9, 0.3, 1e-9):
            for min_p in (0.0, 0.2):
                params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
                for row, found in enumerate(candidates(scores, [params] * 3)):
                    wanted = np.flatnonzero(exact(scores[row].numpy(), params))
                    ids = np.arange(4000) if found is None else np.sort(found.ids)
                    # The share at which top_p cuts is a float32 sum: one id more or less is rounding.
                    off = np.setxor1d(ids, wanted)
                    assert len(off) <= (1 if 0 < top_p < 1 and not top_k else 0), params


def test_greedy_is_the_lowest_of_the_largest_whatever_the_filters_say() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [70, 41, 200]] = 5.0
    params = SamplingParams(temperature=0, top_p=0.1, top_k=2, min_p=0.9, seed=3)
    assert sampler_for(params, vocab=300).sample(logits, [Draw(0, 5)]) == ([41], {})


@pytest.mark.parametrize("temperature", [1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = logits_of(1000, seed=6)
    best = int(logits.argmax())
    params = [SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.5)]
    tokens, errors = sampler_for(*params, vocab=1000).sample(logits.repeat(2, 1), [Draw(0, 1), Draw(1, 1)])
    assert (tokens, errors) == ([best, best], {})


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    params = [
        *DISTRIBUTIONS,
        GREEDY,
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
        SamplingParams(logit_bias=((5, 3.0), (9, -100.0)), top_p=0.9),
        SamplingParams(temperature=3.0, top_p=0.999),
    ]
    logits = logits_of(20_000, len(params), seed=7, ties=True)
    together = sampler_for(*params, vocab=20_000, prompt=(1, 2, 3), output=(4, 4))
    backwards = sampler_for(*params, vocab=20_000, prompt=(1, 2, 3), output=(4, 4))
    alone = [sampler_for(*params, vocab=20_000, prompt=(1, 2, 3), output=(4, 4)) for _ in params]
    for position in range(5, 15):
        draws = [Draw(row, position, masked=(row,)) for row in range(len(params))]
        tokens, _ = together.sample(logits.clone(), draws)
        reverse, _ = backwards.sample(logits.flip(0), draws[::-1])
        each = [
            alone[row].sample(logits[row : row + 1].clone(), [draws[row]])[0][0] for row in range(len(params))
        ]
        assert tokens == each == reverse[::-1]


def penalised(
    logits: list[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    result = list(logits)
    for token, bias in params.logit_bias:
        result[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token, count in Counter(output).items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    return result


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.4),
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=0.8),
        SamplingParams(
            temperature=0,
            repetition_penalty=0.8,
            presence_penalty=-0.5,
            frequency_penalty=0.9,
            logit_bias=((3, 2.0), (7, -1.5)),
        ),
    ],
    ids=lambda p: p.to_json(),
)
def test_penalties_follow_their_formulas_over_a_generation(params: SamplingParams) -> None:
    prompt, output = [1, 2, 2, 9], []
    sampler = sampler_for(params, vocab=200, prompt=prompt)
    for position in range(4, 154):
        raw = logits_of(200, seed=position, scale=1.0)
        wanted = penalised(raw[0].tolist(), params, prompt, output)
        tokens, errors = sampler.sample(raw, [Draw(0, position)])
        assert not errors
        assert raw[0].tolist() == pytest.approx(wanted, abs=1e-5)
        output.append(tokens[0])


def test_a_continued_generation_goes_on_as_the_undisturbed_one() -> None:
    params = SamplingParams(temperature=1.2, repetition_penalty=1.2, frequency_penalty=0.4, top_p=0.95)
    logits = logits_of(300, seed=8)
    whole = sampler_for(params, vocab=300, prompt=(1, 2))
    tokens = [whole.sample(logits.clone(), [Draw(0, 2 + at)])[0][0] for at in range(60)]
    second = sampler_for(params, vocab=300, prompt=(1, 2), output=tokens[:25])
    assert [second.sample(logits.clone(), [Draw(0, 2 + at)])[0][0] for at in range(25, 60)] == tokens[25:]


def test_masked_ids_are_never_chosen_and_bias_reaches_its_id() -> None:
    logits = torch.zeros(2, 20)
    logits[:, 4] = 50.0
    params = [GREEDY, SamplingParams(temperature=0, logit_bias=((6, 60.0), (99, 5.0), (-1, 5.0)))]
    tokens, _ = sampler_for(*params, vocab=20).sample(logits, [Draw(0, 1, masked=(4,)), Draw(1, 1)])
    assert tokens == [0, 6]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(poison: float) -> None:
    params = [SamplingParams(), GREEDY, SamplingParams(top_p=0.9), GREEDY]
    logits = logits_of(100, 4)
    wanted, _ = sampler_for(*params, vocab=100).sample(logits.clone(), [Draw(row, 3) for row in range(4)])
    logits[1, 17] = poison
    logits[2, 99] = poison
    tokens, errors = sampler_for(*params, vocab=100).sample(logits, [Draw(row, 3) for row in range(4)])
    assert tokens == [wanted[0], None, None, wanted[3]]
    assert set(errors) == {1, 2}
    assert all("not finite" in error for error in errors.values())


def test_a_row_with_nothing_left_to_choose_fails_alone() -> None:
    logits = torch.zeros(2, 3)
    tokens, errors = sampler_for(GREEDY, GREEDY, vocab=3).sample(
        logits, [Draw(0, 1, masked=(0, 1, 2)), Draw(1, 1)]
    )
    assert tokens == [None, 0]
    assert "no token" in errors[0]
    assert set(errors) == {0}


def test_a_row_taken_again_forgets_what_was_there() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler = sampler_for(params, vocab=10, output=(3,))
    logits = torch.zeros(1, 10)
    logits[0, 3] = 1.0
    assert sampler.sample(logits.clone(), [Draw(0, 1)])[0] == [0]
    sampler.start(RowStart(0, (), (), params, 1))
    assert sampler.sample(logits.clone(), [Draw(0, 1)])[0] == [3]
