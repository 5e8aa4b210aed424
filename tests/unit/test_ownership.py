"""Rows and blocks: lent, fenced by a step, and back exactly once."""

from __future__ import annotations

import pytest

from tests.helpers.engines import ask
from workers.engine.block_pool import BlockPool
from workers.engine.ownership import Ownership
from workers.engine.request import Ending, Request


def ownership_of(num_blocks: int = 8, rows: int = 2) -> Ownership:
    return Ownership(BlockPool(num_blocks, 2, namespace=""), rows)


def request_of(length: int) -> Request:
    source = ask("a", range(length))
    ending = Ending.of(source, max_model_len=100, eos_ids=())
    return Request(source, ending, arrival=0, masked=(), root=b"", block_size=2)


def test_a_request_gets_the_lowest_row_and_blocks_for_all_its_tokens():
    ownership, first, second = ownership_of(), request_of(5), request_of(2)
    ownership.take(first, [])
    ownership.take(second, [])
    assert (first.row, second.row) == (0, 1)
    assert (len(first.blocks), len(second.blocks)) == (3, 1)
    assert (ownership.num_free_rows, ownership.num_used_blocks) == (0, 4)
    ownership.check([first, second])
    ownership.release(first)
    ownership.take(third := request_of(1), [])
    assert third.row == 0


def test_hits_count_as_computed():
    ownership, request = ownership_of(), request_of(5)
    ownership.take(request, [6, 7])
    assert request.blocks[:2] == [6, 7]
    assert (request.computed, request.committed, request.registered) == (4, 4, 2)
    ownership.check([request])


def test_nothing_comes_back_before_the_step_that_uses_it():
    ownership, request = ownership_of(), request_of(4)
    ownership.take(request, [])
    request.launch(3, 4, sample=True)
    ownership.release(request)
    assert (ownership.num_used_blocks, ownership.num_free_rows) == (2, 1)
    ownership.check([])
    ownership.settle(2)
    assert (ownership.num_used_blocks, ownership.num_free_rows) == (2, 1)
    ownership.settle(3)
    assert (ownership.num_used_blocks, ownership.num_free_rows) == (0, 2)
    ownership.check([])


def test_what_no_step_uses_comes_back_at_once():
    ownership, request = ownership_of(), request_of(4)
    ownership.take(request, [])
    request.launch(1, 4, sample=True)
    request.land(4, 9)
    ownership.settle(1)
    ownership.release(request)
    assert (ownership.num_used_blocks, ownership.num_free_rows) == (0, 2)
    ownership.release(request)
    ownership.check([])


def test_a_lost_row_is_noticed():
    ownership, request = ownership_of(), request_of(4)
    ownership.take(request, [])
    with pytest.raises(AssertionError, match="row"):
        ownership.check([])
