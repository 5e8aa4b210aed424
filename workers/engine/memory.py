"""How much memory an engine takes and how much there is, in bytes; no torch.

KV tensors take their memory page by page as blocks are written, so a system that is too small would fail
in the middle of serving. These numbers let it fail at the start.
"""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import MillstreamError
from workers.checkpoint import ModelConfig

#: For activations, the interpreter and torch itself.
HEADROOM = 512 << 20
#: Most memory a KV cache takes when nobody says how large it shall be, and its share of what is free.
KV_LIMIT = 4 << 30
KV_SHARE = 0.5


class EngineMemoryError(MillstreamError):
    """The model does not fit the memory."""


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Memory of the weights."""
    heads = config.num_heads + config.num_kv_heads
    attention = 2 * config.hidden_size * config.head_dim * heads  # q and o, k and v
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    # In half precision the head is kept in a layout of its own, a second copy even when it is tied.
    tables = 1 if config.tie_word_embeddings and itemsize == 4 else 2
    return (config.num_layers * layer + tables * config.vocab_size * config.hidden_size) * itemsize


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Memory of one cached token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def kv_blocks(
    config: ModelConfig,
    *,
    itemsize: int,
    block_size: int,
    wanted: int | None,
    useful: int,
    available: int,
) -> int:
    """How many blocks the KV cache gets.

    ``wanted`` tokens if somebody said so, else as many as are ``useful``, within bounds. Raises
    `EngineMemoryError` when they do not fit, together with the weights, in the ``available`` memory.
    """
    weights, per_token = weight_bytes(config, itemsize), kv_bytes_per_token(config, itemsize)
    free = available - weights - HEADROOM
    if wanted is None:
        bound = min(KV_LIMIT, int(max(free, 0) * KV_SHARE)) // per_token
        tokens = min(useful, max(bound, block_size))
    else:
        tokens = wanted
    blocks = -(-tokens // block_size)
    needed = blocks * block_size * per_token
    if needed > free:
        raise EngineMemoryError(
            f"not enough memory: {_gib(weights)} for the weights, {_gib(HEADROOM)} to work in and "
            f"{_gib(needed)} for a KV cache of {blocks * block_size} tokens; {_gib(available)} are free"
        )
    return blocks


def available_bytes(root: Path = Path("/")) -> int:
    """Memory this process could take: what the system has free, or less where a control group says so."""
    bounds = [bound for bound in (_system(root), _group(root)) if bound is not None]
    return min(bounds) if bounds else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _system(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group(root: Path) -> int | None:
    """What the process's own control group leaves it (version 2; in a container that is the container's)."""
    path = _read(root / "proc/self/cgroup").partition("0::/")[2].strip()
    for folder in (root / "sys/fs/cgroup" / path, root / "sys/fs/cgroup"):
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            # File pages that nobody uses are given back when memory is needed.
            unused = [
                line
                for line in _read(folder / "memory.stat").splitlines()
                if line.startswith("inactive_file ")
            ]
            return int(limit) - int(used) + sum(int(line.split()[1]) for line in unused)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
