"""BlockPool against a model that keeps everything in plain lists."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trioserve.core.block_pool import BlockPool

from .machine_settings import machine_settings

DIGESTS = [bytes([i]) * 16 for i in range(6)]


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.free = list(range(num_blocks))  # the next to be taken comes first
        self.digests: dict[int, bytes] = {}  # in order of registration
        self.tables: list[list[int]] = []

    @rule(num_blocks=st.integers(0, 5))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            numbers = f"{num_blocks} blocks wanted, {len(self.free)} are free"
            with pytest.raises(RuntimeError, match=numbers):
                self.pool.allocate(num_blocks)
            return
        expected, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert self.pool.allocate(num_blocks) == expected
        for block_id in expected:
            self.digests.pop(block_id, None)
        self.tables.append(expected)

    @rule(digests=st.lists(st.sampled_from(DIGESTS), max_size=4, unique=True))
    def hit(self, digests: list[bytes]) -> None:
        expected = []
        for digest in digests:
            copies = [block_id for block_id, d in self.digests.items() if d == digest]
            if not copies:
                break
            expected.append(copies[0])
        found = self.pool.find(digests)
        assert found == expected
        assert self.pool.count_free(found) == sum(block_id in self.free for block_id in found)
        self.pool.acquire(found)
        self.free = [block_id for block_id in self.free if block_id not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block_id in reversed(table):
            if not any(block_id in other for other in self.tables):
                position = len(self.free) if block_id in self.digests else 0
                self.free.insert(position, block_id)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), digest=st.sampled_from(DIGESTS))
    def register(self, data: st.DataObject, digest: bytes) -> None:
        block_id = data.draw(st.sampled_from(sorted({b for table in self.tables for b in table})))
        self.pool.register(block_id, digest)
        self.digests.pop(block_id, None)
        self.digests[block_id] = digest

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.forget(block_id)
        self.digests.pop(block_id, None)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.digests.clear()

    @invariant()
    def equals_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == self.pool.num_blocks - len(self.free)
        for digest in DIGESTS:
            assert self.pool.is_cached(digest) == (digest in self.digests.values())


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(machine_settings(60), stateful_step_count=40)
