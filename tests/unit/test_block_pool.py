"""What the rule machine for BlockPool does not say: digests, and that faults are found."""

from __future__ import annotations

import pytest

from trioserve.core.block_pool import ROOT_DIGEST, BlockHasher, BlockPool


def test_digests_are_the_same_in_every_process() -> None:
    hasher = BlockHasher(4)
    first = hasher.digest(ROOT_DIGEST, [1, 2, 3, 4])
    assert first.hex() == "f23680cf9d0cdff61c7fe464c491f63b"
    assert len(first) == 16


def test_digests_tell_everything_apart() -> None:
    hasher = BlockHasher(2)
    digests = {
        hasher.digest(ROOT_DIGEST, [1, 2]),
        hasher.digest(ROOT_DIGEST, [2, 1]),
        hasher.digest(ROOT_DIGEST, [1, 2 + 2**16]),
        hasher.digest(ROOT_DIGEST, [1, 2], b"salt"),
        hasher.digest(ROOT_DIGEST, [1, 2], b"salt2"),
        hasher.digest(hasher.digest(ROOT_DIGEST, [1, 2]), [1, 2]),
    }
    assert len(digests) == 6


def test_the_deep_end_of_a_prefix_goes_first() -> None:
    pool = BlockPool(4, 2)
    table = pool.allocate(4)
    digests = [bytes([i]) * 16 for i in range(3)]
    for block_id, digest in zip(table, digests, strict=False):
        pool.register(block_id, digest)
    pool.release(table)
    assert pool.find(digests) == table[:3]
    assert pool.allocate(1) == [table[3]]  # never findable
    pool.allocate(1)
    assert pool.find(digests) == table[:2]


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 2, prefix_caching=False)
    pool.register(pool.allocate(1)[0], ROOT_DIGEST)
    assert pool.find([ROOT_DIGEST]) == []
    pool.check_integrity()


def test_empty_pools_and_false_releases_are_errors() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(0, 16)
    pool = BlockPool(2, 2)
    with pytest.raises(RuntimeError, match="block 1"):
        pool.release([1])


def test_integrity_finds_faults_and_names_the_numbers() -> None:
    def pool() -> BlockPool:
        pool = BlockPool(4, 2)
        pool.allocate(2)
        pool.register(0, ROOT_DIGEST)
        pool.check_integrity([[0, 1]])
        return pool

    with pytest.raises(RuntimeError, match="block 1: 1 owners counted, 0 hold it"):
        pool().check_integrity([[0]])
    with pytest.raises(RuntimeError, match="block 0: 1 owners counted, 2 hold it"):
        pool().check_integrity([[0, 1], [0]])
    broken = pool()
    broken._ref_counts[3] = 1
    with pytest.raises(RuntimeError, match="block 3: 1 owners, in the free list"):
        broken.check_integrity()
    broken = pool()
    broken.num_free = 1
    with pytest.raises(RuntimeError, match="2 blocks in the free list, 1 counted"):
        broken.check_integrity()
    broken = pool()
    broken._digests[0] = None
    with pytest.raises(RuntimeError, match="1 blocks in the index, 0 with a digest"):
        broken.check_integrity()
    broken = pool()
    broken._next[2] = 2
    with pytest.raises(RuntimeError, match="broken at block 2"):
        broken.check_integrity()
