"""Builds a `ModelRunner`: sizes the KV cache, checks that everything fits, loads the weights.

The one place that puts the engine's torch parts together.
"""

from __future__ import annotations

import os

import torch

from workers.checkpoint import Checkpoint, CheckpointError, ModelConfig
from workers.engine import memory
from workers.engine.attention.cpu import CPUAttention, StepAttention
from workers.engine.kv_store import KVStore
from workers.engine.models import Progress, build_model
from workers.engine.runner import ModelRunner
from workers.engine.weights import open_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _silent(done: int, total: int) -> None:
    """Nobody watches the progress."""


def build_runner(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int = 16,
    kv_cache_tokens: int | None = None,
    threads: int | None = None,
    progress: Progress = _silent,
) -> ModelRunner[StepAttention]:
    """A runner for the model, on the CPU.

    Without ``kv_cache_tokens`` the KV cache is as large as all rows together could need, within bounds of
    memory. ``threads`` are torch's, for the whole process; by default every CPU this process may use.
    ``progress`` is called after each layer. Raises `CheckpointError` or `memory.EngineMemoryError`.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    kind = DTYPES[dtype]
    torch.set_num_threads(threads or _cpus())
    num_blocks = memory.kv_blocks(
        config,
        itemsize=kind.itemsize,
        block_size=block_size,
        wanted=kv_cache_tokens,
        useful=max_num_seqs * max_model_len,
        available=memory.available_bytes(),
    )
    with torch.inference_mode():
        weights = open_weights(checkpoint, config, kind)
        model = build_model(config, weights, max_positions=max_model_len, dtype=kind, progress=progress)
        store = KVStore(config, num_blocks=num_blocks, block_size=block_size, dtype=kind)
    attention = CPUAttention(store, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, dtype=kind)
    return ModelRunner(
        model,
        attention,
        vocab_size=config.vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
    )


def _cpus() -> int:
    # Not os.cpu_count(): in a container with a CPU set, threads beyond it only get in each other's way.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
