"""Expected need: how the ratio moves, what it makes of a request, how many newcomers fit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.engines import ask
from workers.engine.admission import CLIP_TOKENS, DECAY_STEPS, FLOOR_SHARE, MARGIN_TOKENS, Admission
from workers.engine.request import Ending, Request


def request_of(prompt: int, **more: Any) -> Request:
    source = ask("a", range(prompt), **more)
    ending = Ending.of(source, max_model_len=100_000, eos_ids=())
    return Request(source, ending, arrival=0, masked=(), root=b"", block_size=16)


@pytest.mark.parametrize(
    ("ratio", "more", "blocks"),
    [
        (0.5, {"max_tokens": 160}, 5),  # half of 160 tokens
        (0.5, {"max_tokens": 8}, 1),  # all 8: less than a block is no estimate
        (0.01, {"max_tokens": 160}, 1),  # never less than a block of tokens
        (0.5, {"max_tokens": 160, "ignore_eos": True}, 10),  # it will use them all
        (0.5, {"max_tokens": None}, CLIP_TOKENS // 32),
    ],
)
def test_growth_of_a_full_prompt(ratio, more, blocks):
    assert Admission(16, ratio).growth(request_of(32, **more)) == blocks


def test_growth_counts_what_is_there_already():
    admission, request = Admission(16, 0.5), request_of(33, max_tokens=10)
    # 33 tokens take three blocks; ten more fit the third.
    assert (admission.growth(request), admission.need(request)) == (0, 3)
    request.blocks = [0, 1, 2, 3]
    request.tokens += [1] * 9
    assert admission.growth(request) == 0


def test_the_ratio_falls_to_its_floor_and_comes_back_when_idle():
    admission = Admission(16, 0.7)
    admission.decay()
    assert 0.69 < admission.ratio < 0.7
    for _ in range(DECAY_STEPS):
        admission.decay()
    assert admission.ratio == pytest.approx(0.7 * FLOOR_SHARE)
    admission.reset()
    assert admission.ratio == 0.7


def test_a_retraction_sets_the_ratio_from_what_requests_did():
    admission, request = Admission(16, 0.7), request_of(4, max_tokens=99)
    request.tokens += [1] * 30
    admission.retracted([request])
    assert admission.ratio == pytest.approx((30 + MARGIN_TOKENS) / 100)
    request.tokens += [1] * 69
    admission.retracted([request])
    assert admission.ratio == 1.0


def test_newcomers_are_counted_by_the_average_request():
    admission = Admission(16, 0.5)
    assert admission.newcomers(7) == 7
    admission.met(request_of(64, max_tokens=32))
    assert admission.newcomers(10) == 2
    for _ in range(100):
        admission.met(request_of(16, max_tokens=1))
    assert admission.newcomers(10) == 4
    assert admission.newcomers(-3) == 0
