"""What every attention backend owes: exactly the row's own tokens, up to the position, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from workers.checkpoint import ModelConfig
from workers.engine.attention import AttentionBackend
from workers.engine.attention.cpu import CPUAttention, group_by_length
from workers.engine.kv_store import KVStore
from workers.engine.plan import Row, StepPlan

NUM_BLOCKS, DIM = 600, 16


def cpu(config: ModelConfig, block_size: int, dtype: torch.dtype) -> CPUAttention:
    store = KVStore(config, num_blocks=NUM_BLOCKS, block_size=block_size, dtype=dtype)
    for tensor in (*store.keys, *store.values):
        tensor.fill_(float("nan"))  # whoever reads a slot that was not written gives itself away
    return CPUAttention(store, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, dtype=dtype)


BACKENDS: dict[str, Callable[..., AttentionBackend[Any]]] = {"cpu": cpu}


def config(heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        rms_norm_eps=1.0,
        rope_theta=1.0,
        rope_scaling=None,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        bos_id=None,
        eos_ids=frozenset(),
    )


class Sequences:
    """Rows with all their keys, values and queries, and a plain reference for what attention gives."""

    def __init__(
        self, count: int, length: int, heads: int, kv_heads: int, *, block_size: int, dtype: Any
    ) -> None:
        random = torch.Generator().manual_seed(5)
        shape = (2, count, length)  # layers, rows, positions
        self.k = torch.randn(*shape, kv_heads, DIM, generator=random).to(dtype)
        self.v = torch.randn(*shape, kv_heads, DIM, generator=random).to(dtype)
        self.q = torch.randn(*shape, heads, DIM, generator=random).to(dtype)
        self.group = heads // kv_heads
        order = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
        per_row = -(-length // block_size)
        self.blocks = [order[at * per_row : (at + 1) * per_row] for at in range(count)]

    def reference(self, layer: int, row: int, start: int, end: int) -> torch.Tensor:
        k = self.k[layer, row, :end].double().repeat_interleave(self.group, dim=1)
        v = self.v[layer, row, :end].double().repeat_interleave(self.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self.q[layer, row, start:end].double(), k) / DIM**0.5
        future = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(end - start, -1)


def run(
    backend: AttentionBackend[Any], rows: Sequences, parts: Sequence[tuple[int, int, int]], decodes: int = 0
) -> None:
    """One step of ``parts`` (row, start, end) through all layers, each checked against the reference."""
    plan = StepPlan(
        1,
        (),
        tuple(Row(row, [0] * (end - start), start, rows.blocks[row], True) for row, start, end in parts),
        decodes,
    )
    metadata = backend.prepare(plan)
    for layer in range(2):
        q, k, v = (
            torch.cat([source[layer, row, start:end] for row, start, end in parts])
            for source in (rows.q, rows.k, rows.v)
        )
        got = backend.forward(layer, q, k, v, metadata)
        wanted = torch.cat([rows.reference(layer, row, start, end) for row, start, end in parts])
        tolerance = 1e-5 if got.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_chunks_decodes_and_mixed_steps(
    make: Callable[..., AttentionBackend[Any]], heads: int, kv_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    length = 40 if block_size == 1 else 90
    rows = Sequences(4, length, heads, kv_heads, block_size=block_size, dtype=dtype)
    backend = make(config(heads, kv_heads), block_size, dtype)
    run(backend, rows, [(0, 0, 17), (1, 0, 1), (2, 0, 30)])  # several prompts, one of a single token
    run(backend, rows, [(0, 17, 18), (1, 1, 2), (2, 30, 34), (3, 0, 5)], decodes=2)
    run(backend, rows, [(2, 34, 35), (0, 18, 19), (1, 2, 3), (3, 5, 6)], decodes=4)
    run(backend, rows, [(3, 6, 7), (1, 3, length), (2, 35, 36)], decodes=1)  # a chunk of one token
    run(backend, rows, [(1, length - 1, length), (0, 19, 20)], decodes=2)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_decode_rows_of_very_different_lengths(make: Callable[..., AttentionBackend[Any]]) -> None:
    rows = Sequences(5, 1500, 4, 2, block_size=16, dtype=torch.float32)
    backend = make(config(4, 2), 16, torch.float32)
    lengths = [1499, 3, 700, 200, 1200]
    run(backend, rows, [(row, 0, length) for row, length in enumerate(lengths)])
    run(backend, rows, [(row, length, length + 1) for row, length in enumerate(lengths)], decodes=5)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_a_row_that_shares_the_blocks_of_another(make: Callable[..., AttentionBackend[Any]]) -> None:
    rows = Sequences(2, 40, 4, 2, block_size=4, dtype=torch.float32)
    backend = make(config(4, 2), 4, torch.float32)
    for source in (rows.q, rows.k, rows.v):
        source[:, 1, :16] = source[:, 0, :16]
    rows.blocks[1][:4] = rows.blocks[0][:4]
    run(backend, rows, [(0, 0, 20)])
    run(backend, rows, [(0, 20, 21), (1, 16, 30)], decodes=1)
    run(backend, rows, [(0, 21, 22), (1, 30, 31)], decodes=2)


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_what_is_not_finite_in_one_row_stays_there(make: Callable[..., AttentionBackend[Any]]) -> None:
    rows = Sequences(3, 40, 4, 2, block_size=4, dtype=torch.float32)
    backend = make(config(4, 2), 4, torch.float32)
    rows.k[:, 1], rows.v[:, 1] = float("nan"), float("inf")
    parts = [(0, 0, 20), (2, 0, 9)]
    run(backend, rows, parts)
    plan = tuple(Row(row, [0], start, rows.blocks[row], True) for row, start in ((0, 20), (1, 0), (2, 9)))
    metadata = backend.prepare(StepPlan(1, (), plan, 3))
    at = [(0, 20), (1, 0), (2, 9)]
    q, k, v = (torch.stack([source[0, row, pos] for row, pos in at]) for source in (rows.q, rows.k, rows.v))
    got = backend.forward(0, q, k, v, metadata)
    for place, (row, position) in ((0, (0, 20)), (2, (2, 9))):
        wanted = rows.reference(0, row, position, position + 1)
        torch.testing.assert_close(got[place : place + 1].double(), wanted, atol=1e-5, rtol=1e-5)


def test_groups_pad_no_row_to_more_than_twice_its_length() -> None:
    assert group_by_length([]) == []
    assert group_by_length([5, 250, 1]) == [[0, 1, 2]]
    assert group_by_length([300, 4000, 100, 2100, 160, 700]) == [[1, 3], [5], [0, 4], [2]]
