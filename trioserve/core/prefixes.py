"""Equal prefixes: what is cached, who computes what is not, and who waits for it. Pure.

A waiting sequence whose next missing block is computed by a running one *follows* that one: it is
set aside until the last block they share is in the cache, so that nothing is computed twice. The
leader is then served as its most urgent follower would be in its place, so nobody waits longer by
following than by computing; and where it leaves early, its followers are on their own again.
"""

from __future__ import annotations

from trioserve.core.block_pool import ROOT_DIGEST, BlockHasher, BlockPool
from trioserve.core.sequence import Sequence
from trioserve.core.waiting import Lane, LaneKey, lane_key


class Prefixes:
    """Digests of sequences, and the blocks that running ones are about to fill.

    Writes the ``digests``, ``leader`` and ``followers`` of sequences, and what the pool can find.
    Only the Scheduler calls it. Sequences that it gives back follow no more: the caller has them
    wait for admission again.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hasher = BlockHasher(pool.block_size)
        self._computing: dict[bytes, Sequence] = {}  # missing blocks of running prefills

    def find(self, seq: Sequence) -> list[int]:
        """The cached blocks a sequence could start with; at least one token stays to compute.

        None of a prompt that is to be scored: each of its tokens' logits are needed.
        """
        if not self._pool.prefix_caching:
            return []
        self._extend(seq, seq.num_tokens // self._pool.block_size)
        if seq.prompt_logprobs is not None:
            return []
        return self._pool.find(seq.digests[: self._num_shareable(seq)])

    def leader(self, seq: Sequence, num_hits: int) -> tuple[Sequence, int] | None:
        """Who computes the first block that ``seq`` misses, and how many blocks they share."""
        end = self._num_shareable(seq) if seq.digests else 0
        if num_hits >= end or seq.prompt_logprobs is not None:
            return None
        leader = self._computing.get(seq.digests[num_hits])
        if leader is None:
            return None
        num_shared = num_hits + 1
        while num_shared < end and self._computing.get(seq.digests[num_shared]) is leader:
            num_shared += 1
        return leader, num_shared

    def follow(self, seq: Sequence, leader: Sequence, num_shared: int) -> None:
        """Set ``seq`` aside until ``leader`` has ``num_shared`` blocks in the cache."""
        seq.leader = leader
        leader.followers[seq.id] = (seq, num_shared)

    def unfollow(self, seq: Sequence) -> None:
        """``seq`` waits for nobody any more."""
        if seq.leader is not None:
            del seq.leader.followers[seq.id]
            seq.leader = None

    def begin(self, seq: Sequence, num_hits: int) -> None:
        """``seq`` runs from now on, and will fill its blocks from ``num_hits`` on."""
        for digest in seq.digests[num_hits:]:
            self._computing.setdefault(digest, seq)

    def advance(self, seq: Sequence) -> list[Sequence]:
        """Make the blocks findable that are full of computed tokens now; the followers so freed."""
        num_full = seq.num_computed_tokens // self._pool.block_size
        if num_full == seq.num_registered or not (seq.cacheable and self._pool.prefix_caching):
            return []
        self._extend(seq, num_full)
        for i in range(seq.num_registered, num_full):
            self._pool.register(seq.block_ids[i], seq.digests[i])
            if self._computing.get(seq.digests[i]) is seq:
                del self._computing[seq.digests[i]]
        seq.num_registered = num_full
        if not seq.followers:
            return []
        return self._free([one for one, num in seq.followers.values() if num <= num_full])

    def end(self, seq: Sequence) -> list[Sequence]:
        """``seq`` runs no more; all its followers."""
        for digest in seq.digests[seq.num_registered :]:
            if self._computing.get(digest) is seq:
                del self._computing[digest]
        return self._free([one for one, _ in seq.followers.values()]) if seq.followers else []

    def abandon(self, running: list[Sequence]) -> list[Sequence]:
        """Nothing of the running sequences is to be found, ever; all their followers."""
        self._computing.clear()
        freed = []
        for seq in running:
            seq.cacheable = False
            freed += self._free([one for one, _ in seq.followers.values()])
        return freed

    def check(self, sequences: dict[int, Sequence], running: dict[int, Sequence]) -> None:
        """Check who follows whom, and who is expected to compute.

        Raises:
            RuntimeError: naming the sequence.
        """
        for seq in self._computing.values():
            if running.get(seq.id) is not seq:
                raise RuntimeError(f"sequence {seq.id} does not run, but blocks are expected of it")
        for seq in sequences.values():
            leader = seq.leader
            if leader is not None and (
                running.get(leader.id) is not leader
                or leader.followers[seq.id][1] <= leader.num_registered
                or not leader.cacheable
            ):
                raise RuntimeError(f"sequence {seq.id} follows {leader.id}, which gives it nothing")
            if any(one.leader is not seq for one, _ in seq.followers.values()):
                raise RuntimeError(f"sequence {seq.id} has followers that do not know it")

    def _free(self, followers: list[Sequence]) -> list[Sequence]:
        for seq in followers:
            self.unfollow(seq)
        return followers

    def _num_shareable(self, seq: Sequence) -> int:
        return (seq.num_tokens - 1) // self._pool.block_size

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        size = self._pool.block_size
        for i in range(len(seq.digests), num_blocks):
            parent, extra = (seq.digests[-1], b"") if i else (ROOT_DIGEST, seq.cache_salt)
            tokens = seq.token_ids[i * size : (i + 1) * size]
            seq.digests.append(self._hasher.digest(parent, tokens, extra))


def urgency(lane: Lane, seq: Sequence) -> LaneKey:
    """Sort key of a running prefill in a lane: its own or, where that comes before, the one that
    the most urgent of its followers would have with its progress."""
    key = lane_key(lane, seq)
    for one, _ in seq.followers.values():
        if lane is Lane.FIRST_COME:
            key = min(key, (one.priority, 0, one.arrival))
        else:
            key = min(key, (one.priority, one.num_tokens - seq.num_computed_tokens, one.arrival))
    return key
