"""Attention on the CPU: a row's blocks are gathered into one contiguous run, then torch's flash kernel runs.

Gathering costs a copy of the context per step. Keeping rows contiguous instead would save it (about a
quarter of attention's time at 500 tokens, next to nothing at 150), but every prefix hit would be copied
and every block stored twice; one way to store keys and values is simpler and meets the mark. Grouped heads
are never expanded: the query heads that share a key head are handed to the kernel as rows (decode) or as
batch entries that see the same keys (prefill), which is several times faster than the kernel's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from workers.engine.kv_store import KVStore
from workers.engine.plan import Row, StepPlan

#: Padding up to this length is cheaper than another kernel call.
SHORT = 256


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decode rows of similar length, attended in one call, padded to the longest."""

    tokens: torch.Tensor | None  #: their places in the step's tokens; None: the first ``len(slots)``
    slots: torch.Tensor  #: [rows, length]
    mask: torch.Tensor | None  #: [rows, 1, 1, length], -inf on the padding; None when there is none


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one row, ``start`` to ``end`` in the step's tokens."""

    start: int
    end: int
    context: torch.Tensor | None  #: slots of all its tokens so far; None: the chunk begins the row
    mask: torch.Tensor | None  #: [tokens, length], causal; None with no context, where the kernel knows it


@dataclass(frozen=True, slots=True)
class StepAttention:
    """The metadata of a step."""

    slots: torch.Tensor  #: where each of the step's tokens is stored
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


class CPUAttention:
    """`AttentionBackend` over a `KVStore`."""

    def __init__(self, store: KVStore, *, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
        self._store = store
        self._kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._dtype = dtype
        self._gathered = (torch.empty(0), torch.empty(0))

    def prepare(self, plan: StepPlan) -> StepAttention:
        """See `AttentionBackend.prepare`."""
        decodes = plan.rows[: plan.num_decode]
        slots = [
            self._store.slots(row, np.arange(row.start, row.start + len(row.tokens))) for row in plan.rows
        ]
        chunks = []
        at = plan.num_decode
        for row in plan.rows[plan.num_decode :]:
            chunks.append(self._chunk(row, at))
            at += len(row.tokens)
        groups = group_by_length([row.start + 1 for row in decodes])
        return StepAttention(
            torch.from_numpy(np.concatenate(slots)),
            tuple(self._decodes(decodes, members, alone=len(groups) == 1) for members in groups),
            tuple(chunks),
        )

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: StepAttention
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        self._store.write(layer, metadata.slots, k, v)
        q = q.view(len(q), self._kv_heads, self._group, -1)
        out = torch.empty_like(q)
        for decodes in metadata.decodes:
            if decodes.tokens is None:
                out[: len(decodes.slots)] = self._decode(layer, q[: len(decodes.slots)], decodes)
            else:
                out[decodes.tokens] = self._decode(layer, q[decodes.tokens], decodes)
        for chunk in metadata.chunks:
            part = slice(chunk.start, chunk.end)
            out[part] = self._prefill(layer, q[part], k[part], v[part], chunk)
        return out.view(len(q), -1)

    def _decode(self, layer: int, q: torch.Tensor, decodes: Decodes) -> torch.Tensor:
        keys, values = self._gather(layer, decodes.slots.view(-1))
        shape = (*decodes.slots.shape, *keys.shape[1:])
        return functional.scaled_dot_product_attention(
            q, keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2), attn_mask=decodes.mask
        )

    def _prefill(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk
    ) -> torch.Tensor:
        if chunk.context is not None:
            k, v = self._gather(layer, chunk.context)
        shape = (self._group, self._kv_heads, len(k), k.shape[-1])
        out = functional.scaled_dot_product_attention(
            q.permute(2, 1, 0, 3),
            k.transpose(0, 1).expand(shape),
            v.transpose(0, 1).expand(shape),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return out.permute(2, 1, 0, 3)

    def _gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``slots``, good until the next call."""
        # In two buffers that stay: fresh ones of this size would be new pages of the system each time,
        # and clearing those takes longer than attention itself.
        if len(slots) > len(self._gathered[0]):
            shape = (len(slots) * 3 // 2, *self._store.keys[layer].shape[1:])  # contexts grow every step
            self._gathered = (torch.empty(shape, dtype=self._dtype), torch.empty(shape, dtype=self._dtype))
        keys, values = (buffer[: len(slots)] for buffer in self._gathered)
        torch.index_select(self._store.keys[layer], 0, slots, out=keys)
        torch.index_select(self._store.values[layer], 0, slots, out=values)
        return keys, values

    def _chunk(self, row: Row, at: int) -> Chunk:
        count = len(row.tokens)
        if row.start == 0:
            return Chunk(at, at + count, None, None)
        length = row.start + count
        context = torch.from_numpy(self._store.slots(row, np.arange(length)))
        mask = torch.full((count, length), float("-inf"), dtype=self._dtype).triu_(row.start + 1)
        return Chunk(at, at + count, context, mask)

    def _decodes(self, rows: Sequence[Row], members: Sequence[int], *, alone: bool) -> Decodes:
        lengths = np.array([rows[member].start + 1 for member in members])
        positions = np.arange(lengths.max())
        # Padding reads the row's own last token again, never a slot that others write or nobody wrote:
        # a masked value still counts when it is not finite.
        slots = np.stack(
            [
                self._store.slots(rows[member], np.minimum(positions, length - 1))
                for member, length in zip(members, lengths, strict=True)
            ]
        )
        mask = None
        if lengths.min() < len(positions):
            padding = torch.from_numpy(positions >= lengths[:, None])
            mask = torch.zeros(padding.shape, dtype=self._dtype).masked_fill_(padding, float("-inf"))[
                :, None, None
            ]
        tokens = None if alone else torch.tensor(members)
        return Decodes(tokens, torch.from_numpy(slots), mask)


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Rows that go into one call: padded to at most twice their length, or to `SHORT`."""
    groups: list[list[int]] = []
    longest = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not groups or max(lengths[place] * 2, SHORT) < longest:
            groups.append([])
            longest = lengths[place]
        groups[-1].append(place)
    return [sorted(group) for group in groups]
