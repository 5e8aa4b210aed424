"""Who holds which row and blocks, and the one way they come back: `release`, fenced by a step number.

Blocks and rows of a request must stay as they are until the last step that was planned with them has been
committed, whoever gave them up: finish, cancel, retraction and error all come through here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from workers.engine.block_pool import BlockPool
from workers.engine.request import Request


class Ownership:
    """Rows and blocks lent to requests."""

    def __init__(self, pool: BlockPool, num_rows: int) -> None:
        self.pool = pool
        self._num_rows = num_rows
        #: Lowest row first, so that the rows in use stay together.
        self._free_rows = list(range(num_rows))
        #: (step, row, blocks): given up, but the step may still be touching them.
        self._fenced: list[tuple[int, int, Sequence[int]]] = []
        self._committed = 0

    @property
    def num_free_rows(self) -> int:
        """Rows a request could take now."""
        return len(self._free_rows)

    @property
    def num_used_blocks(self) -> int:
        """Blocks owned by requests or waiting for a step to be committed."""
        return self.pool.num_blocks - self.pool.num_free

    def take(self, request: Request, hits: list[int]) -> None:
        """Give ``request`` a row and blocks for all its tokens, the first of them being prefix hits.

        The whole prompt gets its blocks at once, although it may be computed in chunks: half-computed
        prompts that wait for each other's blocks would be a deadlock to resolve.
        """
        self.pool.acquire(hits)
        fresh = self.pool.allocate(self.pool.blocks_for(request.total) - len(hits))
        request.row = heappop(self._free_rows)
        request.blocks = hits + fresh
        request.registered = len(hits)
        request.computed = request.committed = len(hits) * self.pool.block_size

    def grow(self, request: Request) -> None:
        """One more block at the end of the table."""
        request.blocks += self.pool.allocate(1)

    def release(self, request: Request) -> None:
        """Take back what ``request`` holds, as soon as the last step that uses it is committed."""
        if request.row >= 0:
            if request.last_step > self._committed:
                self._fenced.append((request.last_step, request.row, request.blocks))
            else:
                self._return(request.row, request.blocks)
        request.vacate()

    def settle(self, step: int) -> None:
        """``step`` has been committed: what only it and earlier ones used comes back."""
        self._committed = step
        fenced, self._fenced = self._fenced, []
        for fence, row, blocks in fenced:
            if fence <= step:
                self._return(row, blocks)
            else:
                self._fenced.append((fence, row, blocks))

    def _return(self, row: int, blocks: Sequence[int]) -> None:
        heappush(self._free_rows, row)
        self.pool.release(blocks)

    def check(self, holders: Collection[Request]) -> None:
        """Prove that every row and every block is free, fenced, or with one of ``holders``."""
        fenced_rows = [row for _, row, _ in self._fenced]
        rows = [*self._free_rows, *fenced_rows, *(request.row for request in holders)]
        assert sorted(rows) == list(range(self._num_rows)), "a row is lost or has two owners"
        tables = [blocks for _, _, blocks in self._fenced]
        self.pool.check([*tables, *(request.blocks for request in holders)])
