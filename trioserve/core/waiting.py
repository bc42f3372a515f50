"""The sequences that wait for admission, in two orders at once. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import Enum

from trioserve.core.sequence import Sequence, SequenceStatus

LaneKey = tuple[int, int, int]


class Lane(Enum):
    """An order of service: first come, or the one with the least left to compute."""

    FIRST_COME = "first come"
    SHORTEST = "shortest"


def lane_key(lane: Lane, seq: Sequence) -> LaneKey:
    """Sort key of a sequence in a lane, lowest first; never equal for two sequences."""
    if lane is Lane.FIRST_COME:
        return (seq.priority, 0, seq.arrival)
    return (seq.priority, seq.num_left, seq.arrival)


class WaitingQueue:
    """A set of sequences with the first of each lane at hand; some may be parked, in no lane.

    Removal is lazy: each lane is a heap, and entries of sequences that left (or left and came
    back) are dropped when they reach the top, or all at once when they are the majority. All
    operations are O(log n) amortised.

    First come puts preempted sequences of a priority before those that never ran: somebody reads
    their answer already, and their blocks may still be in the prefix cache.
    """

    def __init__(self) -> None:
        self._stamps: dict[int, int] = {}  # of those in the lanes
        self._members: dict[int, Sequence] = {}
        self._last_stamp = 0
        self._heaps: dict[Lane, list[tuple[LaneKey, int, Sequence]]] = {lane: [] for lane in Lane}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._members

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def push(self, seq: Sequence) -> None:
        """Add a sequence; its tokens must not change while it is here."""
        self._last_stamp += 1
        self._members[seq.id] = seq
        self._stamps[seq.id] = self._last_stamp
        for lane, heap in self._heaps.items():
            heapq.heappush(heap, self._entry(lane, seq, self._last_stamp))

    def remove(self, seq: Sequence) -> None:
        """Take a member out."""
        del self._members[seq.id]
        self._stamps.pop(seq.id, None)
        self._shrink()

    def park(self, seq: Sequence) -> None:
        """Take a member out of the lanes; it still counts, and ``push`` puts it back."""
        del self._stamps[seq.id]
        self._shrink()

    def is_parked(self, seq: Sequence) -> bool:
        """Whether it is a member in no lane."""
        return seq.id in self._members and seq.id not in self._stamps

    def peek(self, lane: Lane) -> Sequence | None:
        """The first in a lane, or None when nobody waits."""
        heap = self._heaps[lane]
        while heap:
            _, stamp, seq = heap[0]
            if self._stamps.get(seq.id) == stamp:
                return seq
            heapq.heappop(heap)
        return None

    def _shrink(self) -> None:
        for lane, heap in self._heaps.items():
            if len(heap) > 2 * len(self._stamps) + 16:
                stamps = self._stamps.items()
                heap[:] = [self._entry(lane, self._members[id], stamp) for id, stamp in stamps]
                heapq.heapify(heap)

    @staticmethod
    def _entry(lane: Lane, seq: Sequence, stamp: int) -> tuple[LaneKey, int, Sequence]:
        priority, rank, arrival = lane_key(lane, seq)
        if lane is Lane.FIRST_COME:
            rank = 0 if seq.status is SequenceStatus.PREEMPTED else 1
        return (priority, rank, arrival), stamp, seq
