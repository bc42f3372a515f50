"""The blocks of the KV cache: who holds them, which are free, and which content they still have.

Pure: no torch, no I/O, no clock. Every operation is O(1) per block.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence

ROOT_DIGEST = bytes(16)
"""Parent digest of a sequence's first block."""


class BlockHasher:
    """Digests of full blocks, chained: equal digests mean equal tokens from the beginning on.

    128 bits of blake2b over parent digest, token ids (32 bit, little-endian) and the block's extra
    key. The first two have a fixed size, so no two inputs are written the same way.
    """

    def __init__(self, block_size: int) -> None:
        self._tokens = struct.Struct(f"<{block_size}I")

    def digest(self, parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
        """Digest of one full block, 16 bytes. ``extra`` goes to the first block alone."""
        data = parent + self._tokens.pack(*token_ids) + extra
        return hashlib.blake2b(data, digest_size=16).digest()


class BlockPool:
    """Reference counts, free list and prefix index over ``num_blocks`` blocks.

    A block is free (reference count 0, in the free list) or owned. A free block keeps its digest
    until it is allocated anew, so it can still be hit; allocation takes the least recently used.
    Several blocks may carry one digest: block tables only grow at the end, so copies that were
    computed at the same time are kept and not merged.

    Only the Scheduler writes this.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens is empty")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_free = num_blocks
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        # An insertion-ordered dict serves as a set with a stable first member.
        self._index: dict[bytes, dict[int, None]] = {}
        # Free list: doubly linked through two arrays, with the entry at num_blocks as both ends.
        # _next of it is the block to be taken next.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        """Blocks referenced by a sequence."""
        return self.num_blocks - self.num_free

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest prefix of ``digests``; takes nothing."""
        found = []
        for digest in digests:
            copies = self._index.get(digest)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these are in the free list: what ``acquire`` would take from it."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add an owner to blocks that ``find`` returned."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
            self._ref_counts[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks for new content; what they held is evicted now.

        Raises:
            RuntimeError: fewer are free; the caller has to look at ``num_free`` first.
        """
        if num_blocks > self.num_free:
            raise RuntimeError(f"{num_blocks} blocks wanted, {self.num_free} are free")
        taken = []
        for _ in range(num_blocks):
            block_id = self._next[self.num_blocks]
            self._unlink(block_id)
            self.forget(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one owner of each block of a table (in table order).

        The tail is freed first, so that of one prefix the deeper blocks are evicted earlier; a
        block without a digest can never be hit and goes to the front.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id]
            if count < 1:
                raise RuntimeError(f"block {block_id} is released, but nobody owns it")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._link(block_id, front=self._digests[block_id] is None)

    def register(self, block_id: int, digest: bytes) -> None:
        """Make a full, computed, owned block findable."""
        if self.prefix_caching:
            self.forget(block_id)
            self._digests[block_id] = digest
            self._index.setdefault(digest, {})[block_id] = None

    def forget(self, block_id: int) -> None:
        """Make a block unfindable; its owners keep it."""
        digest = self._digests[block_id]
        if digest is None:
            return
        self._digests[block_id] = None
        copies = self._index[digest]
        del copies[block_id]
        if not copies:
            del self._index[digest]

    def reset_prefix_cache(self) -> None:
        """Make every block unfindable; owners keep theirs."""
        self._digests = [None] * self.num_blocks
        self._index.clear()

    def forget_unused(self) -> int:
        """Make free blocks unfindable; the number of owned ones that stay findable. O(blocks)."""
        num_owned = 0
        for block_id, count in enumerate(self._ref_counts):
            if count == 0:
                self.forget(block_id)
            elif self._digests[block_id] is not None:
                num_owned += 1
        return num_owned

    def is_cached(self, digest: bytes) -> bool:
        """Whether a block with this digest can be found."""
        return digest in self._index

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Check all invariants in O(num_blocks); with ``tables``, owners are counted from them.

        Raises:
            RuntimeError: naming the invariant and the numbers.
        """
        free = self._walk()
        for block_id, count in enumerate(self._ref_counts):
            if count < 0 or (count == 0) != (block_id in free):
                where = "in" if block_id in free else "not in"
                raise RuntimeError(f"block {block_id}: {count} owners, {where} the free list")
        if len(free) != self.num_free:
            raise RuntimeError(f"{len(free)} blocks in the free list, {self.num_free} counted")
        if tables is not None:
            owners = Counter(block_id for table in tables for block_id in table)
            for block_id, count in enumerate(self._ref_counts):
                if count != owners[block_id]:
                    raise RuntimeError(
                        f"block {block_id}: {count} owners counted, {owners[block_id]} hold it"
                    )
        indexed = {block_id: digest for digest, ids in self._index.items() for block_id in ids}
        marked = {block_id: d for block_id, d in enumerate(self._digests) if d is not None}
        if indexed != marked or not all(self._index.values()):
            raise RuntimeError(f"{len(indexed)} blocks in the index, {len(marked)} with a digest")

    def _walk(self) -> set[int]:
        free: set[int] = set()
        end = self.num_blocks
        at = self._next[end]
        while at != end:
            if at in free or self._prev[self._next[at]] != at:
                raise RuntimeError(f"the free list is broken at block {at}")
            free.add(at)
            at = self._next[at]
        return free

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link(self, block_id: int, *, front: bool) -> None:
        end = self.num_blocks
        before, after = (end, self._next[end]) if front else (self._prev[end], end)
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self.num_free += 1
