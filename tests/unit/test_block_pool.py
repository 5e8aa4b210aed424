"""The block pool: order of reuse, digests, copies, and the errors it must not let pass."""

from __future__ import annotations

import pytest

from workers.engine.block_pool import BlockPool, chain_digest


def pool_of(num_blocks: int = 6, block_size: int = 2) -> BlockPool:
    return BlockPool(num_blocks, block_size, namespace="model", verify=True)


def cache(pool: BlockPool, *contents: tuple[int, int]) -> list[int]:
    """Allocate, fill and register a chain of blocks, and let go of them."""
    table = pool.allocate(len(contents))
    parent = pool.root("")
    for block, tokens in zip(table, contents, strict=True):
        parent = chain_digest(parent, tokens)
        pool.register(block, parent, tokens)
    pool.release(table)
    return table


def digests(pool: BlockPool, *contents: tuple[int, int], salt: str = "") -> list[bytes]:
    chained = [pool.root(salt)]
    for tokens in contents:
        chained.append(chain_digest(chained[-1], tokens))
    return chained[1:]


def test_blocks_for_rounds_up():
    assert [pool_of(block_size=4).blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_a_digest_covers_everything_before_it():
    pool = pool_of()
    first, other = digests(pool, (1, 2), (3, 4)), digests(pool, (9, 2), (3, 4))
    assert first[1] != other[1]
    assert digests(pool, (1, 2), (3, 4)) == first


def test_namespace_and_salt_separate_equal_prompts():
    pool = pool_of()
    roots = [pool.root(""), pool.root("a"), BlockPool(1, 2, namespace="other").root("")]
    assert len(set(roots)) == 3
    cache(pool, (1, 2))
    assert pool.match(digests(pool, (1, 2)), [1, 2])
    assert not pool.match(digests(pool, (1, 2), salt="a"), [1, 2])


def test_the_namespace_does_not_run_into_the_salt():
    assert BlockPool(1, 2, namespace="ab").root("c") != BlockPool(1, 2, namespace="a").root("bc")


def test_a_salt_that_is_not_unicode_is_only_a_salt():
    assert pool_of().root("\ud800") != pool_of().root("")


def test_never_cached_blocks_go_first_then_the_least_recently_used():
    pool = pool_of(6)
    old, new = cache(pool, (1, 2), (3, 4)), cache(pool, (5, 6), (7, 8))
    plain = pool.allocate(2)
    pool.release(plain)
    # Within a chain the end goes first: what is left of it is still a prefix.
    assert pool.allocate(6) == [*plain, *reversed(old), *reversed(new)]


def test_a_hit_saves_a_block_from_being_next():
    pool = pool_of(4)
    old, new = cache(pool, (1, 2)), cache(pool, (3, 4))
    hits = pool.match(digests(pool, (1, 2)), [1, 2])
    assert hits == old
    pool.acquire(hits)
    pool.release(hits)
    assert pool.allocate(4)[2:] == [*new, *old]


def test_eviction_is_lazy_and_final():
    pool = pool_of(2)
    table = cache(pool, (1, 2), (3, 4))
    assert pool.match(digests(pool, (1, 2), (3, 4)), [1, 2, 3, 4]) == table
    pool.allocate(1)
    assert pool.match(digests(pool, (1, 2), (3, 4)), [1, 2, 3, 4]) == table[:1]
    pool.allocate(1)
    assert pool.match(digests(pool, (1, 2)), [1, 2]) == []


def test_a_copy_lives_as_long_as_its_owner():
    pool = pool_of(4)
    first, second = pool.allocate(1), pool.allocate(1)
    (digest,) = digests(pool, (1, 2))
    pool.register(first[0], digest, (1, 2))
    pool.register(second[0], digest, (1, 2))
    pool.release(first)
    assert pool.match([digest], [1, 2]) == second
    pool.check([second])
    pool.release(second)
    assert pool.match([digest], [1, 2]) == second
    pool.check([])


def test_hits_add_owners():
    pool = pool_of(3)
    hits = cache(pool, (1, 2))
    assert pool.num_idle(hits) == 1
    pool.acquire(hits)
    pool.acquire(hits)
    assert (pool.num_free, pool.num_idle(hits)) == (2, 0)
    pool.check([hits, hits])
    pool.release(hits)
    assert pool.num_free == 2
    pool.check([hits])


def test_debugging_catches_a_block_under_the_wrong_digest():
    pool = pool_of()
    table = pool.allocate(1)
    pool.register(table[0], chain_digest(pool.root(""), (1, 2)), (1, 3))
    with pytest.raises(AssertionError, match="does not hold"):
        pool.match(digests(pool, (1, 2)), [1, 2])


def test_wrong_owners_do_not_pass():
    pool = pool_of(2)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)
    with pytest.raises(AssertionError, match="owners"):
        pool.check([])
    with pytest.raises(AssertionError, match="twice"):
        pool.check([[table[0], table[0]]])
    pool.release(table)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.release(table)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.register(table[0], b"", (1, 2))
