"""The block pool against a model that keeps the same facts as plain sets and lists."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.engine.block_pool import BlockPool, chain_digest

SIZE = 2
#: Few sequences of few tokens, so that equal prefixes and copies are common.
SEQUENCES = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 9, 9), (1, 2, 7, 7, 5, 6)]


def chain(pool: BlockPool, tokens: tuple[int, ...], salt: str) -> list[bytes]:
    digests = [pool.root(salt)]
    for start in range(0, len(tokens), SIZE):
        digests.append(chain_digest(digests[-1], tokens[start : start + SIZE]))
    return digests[1:]


class PoolMachine(RuleBasedStateMachine):
    """Tables own blocks; ``content`` says what a block holds until it is handed out again."""

    @initialize(num_blocks=st.integers(1, 9))
    def build(self, num_blocks):
        self.pool = BlockPool(num_blocks, SIZE, namespace="m", verify=True)
        self.tables: list[tuple[list[int], tuple[int, ...], str]] = []
        self.content: dict[int, bytes] = {}

    @rule(tokens=st.sampled_from(SEQUENCES), salt=st.sampled_from(["", "s"]), fill=st.integers(0, 3))
    def take(self, tokens, salt, fill):
        """A request comes, hits what it can, computes ``fill`` of its blocks."""
        digests = chain(self.pool, tokens, salt)
        hits = self.pool.match(digests, tokens)
        cached = set(self.content.values())
        expected = next((i for i, digest in enumerate(digests) if digest not in cached), len(digests))
        assert [self.content[block] for block in hits] == digests[:expected]
        fresh = len(digests) - len(hits)
        free = self.pool.num_free - self.pool.num_idle(hits)
        if fresh > free:
            return
        self.pool.acquire(hits)
        table = hits + self.pool.allocate(fresh)
        for index in range(len(hits), len(digests)):
            self.content.pop(table[index], None)
            if index < fill:
                self.pool.register(table[index], digests[index], tokens[index * SIZE : (index + 1) * SIZE])
                self.content[table[index]] = digests[index]
        self.tables.append((table, tokens, salt))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data):
        table, _, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        owned = {block for other, _, _ in self.tables for block in other}
        for block in reversed(table):
            copies = [other for other, digest in self.content.items() if digest == self.content.get(block)]
            if block not in owned and len(copies) > 1:
                del self.content[block]
        self.pool.release(table)

    @invariant()
    def proved(self):
        if not hasattr(self, "pool"):
            return
        tables = [table for table, _, _ in self.tables]
        self.pool.check(tables)
        assert self.pool.num_free == self.pool.num_blocks - len(
            {block for table in tables for block in table}
        )


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase
