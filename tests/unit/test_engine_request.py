"""A request's life, counters and endings; and the limits of a configuration."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.engines import ask
from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.request import TRANSITIONS, Ending, Event, Request, State, defect
from workers.engine.types import EngineRequest, Finish


def request_of(source: EngineRequest, block_size: int = 4) -> Request:
    ending = Ending.of(source, max_model_len=100, eos_ids=())
    root = BlockPool(1, block_size, namespace="").root("")
    return Request(source, ending, arrival=0, masked=(), root=root, block_size=block_size)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_move_is_in_the_table_or_refused(state, event):
    request = request_of(ask("a", [1]))
    request.state = state
    target = TRANSITIONS[state].get(event)
    if target is None:
        with pytest.raises(AssertionError, match=event.name):
            request.fire(event)
        assert request.state is state
    else:
        request.fire(event)
        assert request.state is target


def test_every_state_but_the_end_can_end():
    assert all((Event.END in moves) == (state is not State.ENDED) for state, moves in TRANSITIONS.items())


def test_counters_of_a_step():
    request = request_of(ask("a", [1, 2, 3]))
    assert (request.remaining, request.left) == (3, 5)
    request.launch(1, 3, sample=True)
    assert (request.computed, request.in_flight, request.committed, request.pending) == (3, 3, 0, 1)
    assert (request.total, request.remaining, request.left) == (4, 1, 4)
    request.land(3, 9)
    assert (request.computed, request.in_flight, request.committed, request.pending) == (3, 0, 3, 0)
    assert (request.tokens, request.generated, request.left) == ([1, 2, 3, 9], 1, 4)


def test_retraction_keeps_tokens_and_digests():
    request = request_of(ask("a", [1, 2, 3, 4, 5]))
    digest, blocks = request.digest(0), request.blocks
    request.launch(1, 5, sample=True)
    request.land(5, 6)
    request.vacate()
    assert (request.tokens, request.remaining, request.digest(0)) == ([1, 2, 3, 4, 5, 6], 6, digest)
    assert request.blocks is not blocks


def test_only_full_blocks_have_digests():
    request = request_of(ask("a", [1, 2, 3, 4, 5]))
    with pytest.raises(AssertionError, match="full"):
        request.digest(1)


@pytest.mark.parametrize(("length", "most"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_hit_leaves_a_token_to_compute(length, most):
    request = request_of(ask("a", range(length)))
    assert request.max_hits == most
    assert len(list(request.digests())) == most


@pytest.mark.parametrize(
    ("computed", "most"), [(0, 0), (3, 0), (4, 1), (5, 1), (8, 2), (17, 4), (18, 4), (19, 4)]
)
def test_a_hit_leaves_what_stands_before_the_next_to_score(computed, most):
    """Position p is scored by the logits of p - 1. At the end the last token is left, as ever."""
    request = request_of(ask("a", range(19), prompt_logprobs=0))
    if computed:
        request.score(computed)
    assert request.max_hits == most


def test_every_position_of_the_prompt_is_scored_once():
    request = request_of(ask("a", range(10), prompt_logprobs=0))
    assert [list(request.score(end)) for end in (4, 5, 3, 5, 10)] == [[1, 2, 3, 4], [5], [], [], [6, 7, 8, 9]]
    assert not request.unscored
    request.vacate()
    assert not request.unscored


@pytest.mark.parametrize("more", [{}, {"logprobs": 3}, {"prompt_logprobs": 3, "output_ids": [5]}])
def test_nothing_is_scored_unasked_or_again(more):
    assert not request_of(ask("a", range(10), **more)).unscored


@pytest.mark.parametrize(
    ("more", "generated", "last", "expected"),
    [
        ({}, 1, 5, None),
        ({}, 1, 7, Finish.STOP),
        ({}, 3, 5, Finish.LENGTH),
        ({}, 3, 7, Finish.STOP),
        ({"ignore_eos": True}, 1, 7, None),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, 1, 5, Finish.STOP),
        ({"max_tokens": None}, 6, 5, None),
        ({"max_tokens": None}, 7, 5, Finish.LENGTH),
        ({"max_tokens": 50}, 7, 5, Finish.LENGTH),
    ],
)
def test_endings(more, generated, last, expected):
    request = ask("a", [1, 2, 3], **({"max_tokens": 3} | more))
    assert Ending.of(request, max_model_len=10, eos_ids=[7]).after(generated, last) is expected


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("a", []), "empty"),
        (ask("a", range(10)), "context length is 10"),
        (ask("a", [1, 50]), "vocabulary of 50"),
        (ask("a", [-1]), "vocabulary of 50"),
        (ask("a", [1], output_ids=[2, 60]), "vocabulary of 50"),
        (ask("a", range(9)), ""),
        (ask("a", range(10), max_tokens=0), ""),
        (ask("a", range(11), max_tokens=0), "context length is 10"),
    ],
)
def test_what_can_never_run_is_told_why(request_, words):
    said = defect(request_, max_model_len=10, vocab_size=50)
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_batched_tokens": 3}, "must not be below"),
        ({"overlap": 2}, "overlap"),
        ({"new_token_ratio": 0.0}, "new_token_ratio"),
    ],
)
def test_impossible_limits_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**{"max_model_len": 10, "max_num_seqs": 4, "max_num_batched_tokens": 8} | wrong)
