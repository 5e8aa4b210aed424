"""Keys and values of every cached token, in the planner's blocks: two flat tensors per layer.

A list of tensors and not one big tensor with views: each layer is written on its own, and whoever compiles
or captures a step sees small independent buffers. Which slots a row may read is the attention backend's.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from workers.checkpoint import ModelConfig
from workers.engine.plan import Row

Positions: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class KVStore:
    """Slot ``block * block_size + offset`` of a layer's tensor holds one token, [kv_heads, head_dim].

    The tensors start uninitialised: memory is taken from the system when a block is first written, and a
    backend reads no slot that its row has not written.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        shape = (num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, dtype=dtype) for _ in range(config.num_layers)]

    def slots(self, row: Row, positions: Positions) -> Positions:
        """Where the tokens of a row at ascending ``positions`` live."""
        size = self.block_size
        blocks = np.array(row.blocks[: int(positions[-1]) // size + 1], dtype=np.int64)
        return blocks[positions // size] * size + positions % size

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a step's tokens."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)
