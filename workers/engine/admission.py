"""How much KV cache requests are expected to need, learned from how generations go. Decides nothing itself.

Reserving every request's max_tokens would leave most of the cache empty, because most end long before;
reserving nothing would retract all the time. The ratio moves between the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import ceil

from workers.engine.request import Request

#: No request is expected to generate more than this, however large its max_tokens.
CLIP_TOKENS = 4096
#: The ratio falls to this share of its start ...
FLOOR_SHARE = 0.14
#: ... over this many steps without a retraction.
DECAY_STEPS = 600
#: Tokens each request is sure to generate before the next look, when the ratio is set from what they did.
MARGIN_TOKENS = 20
#: Weight of the newest request in the size of an average one.
NEWEST_WEIGHT = 0.1


class Admission:
    """Expected need of requests, in blocks."""

    def __init__(self, block_size: int, start_ratio: float) -> None:
        self.ratio = start_ratio
        self._start = start_ratio
        self._floor = start_ratio * FLOOR_SHARE
        self._block_size = block_size
        self._average: float | None = None

    def growth(self, request: Request) -> int:
        """Blocks ``request`` is expected to ask for beyond its own, or beyond those it needs to start."""
        left = max(request.left, 0)
        ratio = 1.0 if request.source.params.ignore_eos else self.ratio
        # At least a block's worth: a row that decodes at all must not depend on the next retraction.
        expected = max(ceil(min(left, CLIP_TOKENS) * ratio), min(left, self._block_size))
        held = len(request.blocks) or self._blocks_for(request.total)
        return max(0, self._blocks_for(request.total + expected) - held)

    def need(self, request: Request) -> int:
        """Blocks a waiting request is expected to use, prefix hits not counted."""
        return self._blocks_for(request.total) + self.growth(request)

    def met(self, request: Request) -> None:
        """A new request came: it moves the average."""
        need = self.need(request)
        self._average = (
            need if self._average is None else self._average + NEWEST_WEIGHT * (need - self._average)
        )

    def newcomers(self, blocks: int) -> int:
        """How many average requests ``blocks`` free blocks would take."""
        return max(0, int(blocks / max(1.0, self._average or 1.0)))

    def decay(self) -> None:
        """A step went by without a retraction."""
        self.ratio = max(self._floor, self.ratio - (self._start - self._floor) / DECAY_STEPS)

    def retracted(self, running: Collection[Request]) -> None:
        """Requests had to give way: expect the rest to go on as they did so far."""
        done = sum(request.generated + MARGIN_TOKENS for request in running)
        whole = sum(request.ending.limit for request in running) + 1
        self.ratio = min(1.0, max(self._floor, done / whole))

    def reset(self) -> None:
        """The engine is idle: what comes next has nothing to do with what went."""
        self.ratio = self._start

    def reserved(self, running: Iterable[Request]) -> int:
        """Blocks that running requests are expected to ask for."""
        return sum(self.growth(request) for request in running)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
