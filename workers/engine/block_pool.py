"""Who owns which KV block, and which blocks hold a prefix that may be used again.

Blocks are numbers here: the pool knows no tensors, no requests and no steps. It trusts its callers to give
back a block only when no step in flight touches it (`ownership.py` sees to that).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a full block: of its tokens and, through ``parent``, of everything before them."""
    return sha256(parent + array("i", tokens).tobytes()).digest()


class BlockPool:
    """Fixed blocks with reference counts, a prefix cache, and lazy LRU eviction.

    Two requests that computed the same prefix side by side own two blocks with one digest. Neither is
    swapped for the other: a block table that is only ever appended to cannot go stale under a step that
    is already running. The spare copy is dropped when its last owner lets go of it.
    """

    def __init__(self, num_blocks: int, block_size: int, *, namespace: str, verify: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self._namespace = sha256(namespace.encode()).digest()
        self._refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, list[int]] = {}
        #: Tokens of every registered block, to compare on a hit; kept only for debugging.
        self._contents: dict[int, tuple[int, ...]] | None = {} if verify else None
        # The free list is a ring through these two arrays, so that a hit leaves its middle in O(1);
        # the extra last element is the ring's head. Next to the head: first to be handed out.
        self._head = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def root(self, salt: str) -> bytes:
        """Parent digest of a first block: requests share blocks only within one namespace and salt."""
        return sha256(self._namespace + salt.encode("utf-8", "surrogatepass")).digest()

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def match(self, digests: Iterable[bytes], tokens: Sequence[int]) -> list[int]:
        """Blocks that hold the longest cached run of ``digests``; changes nothing.

        ``tokens`` are what the digests stand for, compared only when debugging: sha256 does not collide,
        but a block registered under the wrong digest would look just like a hit.
        """
        hits: list[int] = []
        for digest in digests:
            holders = self._cached.get(digest)
            if holders is None:
                break
            hits.append(holders[0])
        if self._contents is not None:
            for index, block in enumerate(hits):
                wanted = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
                assert self._contents[block] == wanted, f"block {block} does not hold what its digest says"
        return hits

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these nobody owns: acquiring them uses up that much of ``num_free``."""
        refs = self._refs
        return sum(not refs[block] for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these (cache hits), taken off the free list where idle."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
                self.num_free -= 1
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks for one new owner, never-cached ones first, then the least recently used."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken: list[int] = []
        for _ in range(count):
            block = self._next[self._head]
            self._unlink(block)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        self.num_free -= count
        return taken

    def register(self, block: int, digest: bytes, tokens: Sequence[int]) -> None:
        """Offer an owned block, full and computed, for reuse."""
        assert self._refs[block], f"block {block} registered without an owner"
        assert self._digests[block] is None, f"block {block} registered twice"
        self._digests[block] = digest
        self._cached.setdefault(digest, []).append(block)
        if self._contents is not None:
            self._contents[block] = tuple(tokens)

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each of these. Last blocks first, so that a prefix outlives what follows it."""
        for block in reversed(blocks):
            assert self._refs[block], f"block {block} released without an owner"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._give_back(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove the drawing against all the tables there are.

        ::

            refs > 0          owned: in as many tables as it has refs, on no list
                ├─ no digest      being filled (or caching is off)
                └─ digest         full and computed: hits add owners
            refs = 0          free: on the ring exactly once, in no table
                ├─ no digest      at the front (the last given back first)
                └─ digest         behind them, least recently used first; a hit takes it off again,
                                  being handed out makes it lose its digest (lazy eviction)

            ring   head ⇄ [ ][ ][ ] ⇄ [d][d][d][d] ⇄ head
                          front: next out        back: last out
        """
        counted = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                counted[block] += 1
        assert counted == self._refs, "owners and reference counts differ"
        ring = self._ring()
        assert len(ring) == self.num_free, "the free list and its count differ"
        assert sorted(ring) == [block for block, refs in enumerate(self._refs) if refs == 0]
        idle = [self._digests[block] for block in ring]
        assert None not in idle[idle.count(None) :], "a cached block would be evicted before an empty one"
        known = sorted(block for holders in self._cached.values() for block in holders)
        assert known == [block for block, digest in enumerate(self._digests) if digest is not None]
        for digest, holders in self._cached.items():
            assert all(self._digests[block] == digest for block in holders)
            assert holders == holders[:1] or self.num_idle(holders) <= 1, "idle copies pile up"

    def _ring(self) -> list[int]:
        ring: list[int] = []
        block = self._next[self._head]
        while block != self._head:
            assert self._prev[self._next[block]] == block, "the free list is torn"
            assert len(ring) < self.num_blocks, "the free list is a knot"
            ring.append(block)
            block = self._next[block]
        return ring

    def _give_back(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None and len(self._cached[digest]) > 1:
            self._forget(block)  # the other copy serves; this one would only push useful blocks out
            digest = None
        before = self._head if digest is None else self._prev[self._head]
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is None:
            return
        self._digests[block] = None
        holders = self._cached[digest]
        holders.remove(block)
        if not holders:
            del self._cached[digest]
        if self._contents is not None:
            del self._contents[block]
