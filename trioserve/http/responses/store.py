"""Responses kept in memory, so that they can be read again and conversations go on from them.

Pure: nothing here waits or knows HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import orjson

from trioserve.errors import RequestError

ITEM_OVERHEAD_BYTES = 512  # of an entry beside its texts, roughly
EVENT_OVERHEAD_BYTES = 64
MAX_SHOWN = 80  # characters of an id that a client chose


class ResponseNotFound(RequestError):
    """No such response is kept. Raised by the store."""

    status: ClassVar[int] = 404

    def __init__(self, id: str) -> None:
        shown = id if len(id) <= MAX_SHOWN else id[: MAX_SHOWN - 3] + "..."
        super().__init__(
            f"no response {shown!r} is kept here; it was not stored, was deleted or made room for"
            " newer ones (http.max_stored_responses)",
            param="response_id",
            code="response_not_found",
        )


@attrs.define(eq=False)
class Turn:
    """What one response added to its conversation: the items it was given, then its own.

    Turns form a tree by ``parent``: a conversation is one turn and all before it. They live as
    long as anything refers to them, so a conversation stays whole when its first responses make
    room for newer ones.

    Attributes:
        raw: the items as a JSON array.
        num_input: how many of them were given; the others are the answer.
        holders: kept responses and counted turns that refer to this one. Only the store writes it.
    """

    parent: Turn | None
    raw: bytes
    num_input: int
    holders: int = 0

    @classmethod
    def of(cls, parent: Turn | None, given: list[dict[str, Any]]) -> Turn:
        """A turn that has no answer yet; ``given`` holds at least one item."""
        return cls(parent, orjson.dumps(given), len(given))

    def answered(self, output: list[dict[str, Any]]) -> Turn:
        """The same turn with its answer."""
        if not output:
            return self
        raw = b"%b,%b" % (self.raw[:-1], orjson.dumps(output)[1:])
        return Turn(self.parent, raw, self.num_input)

    @property
    def num_bytes(self) -> int:
        """What it takes, without its parent."""
        return len(self.raw) + ITEM_OVERHEAD_BYTES

    @property
    def conversation_bytes(self) -> int:
        """What it takes with all turns before it."""
        return self.num_bytes + sum(turn.num_bytes for turn in self._ancestors())

    def given(self) -> list[dict[str, Any]]:
        """All items the response was made from, the oldest first."""
        before = self.parent.items() if self.parent is not None else []
        return before + list(orjson.loads(self.raw)[: self.num_input])

    def items(self) -> list[dict[str, Any]]:
        """All items up to and with this turn, the oldest first."""
        turns = [self, *self._ancestors()]
        return [item for turn in reversed(turns) for item in orjson.loads(turn.raw)]

    def _ancestors(self) -> Iterator[Turn]:
        turn = self.parent
        while turn is not None:
            yield turn
            turn = turn.parent


@attrs.frozen(eq=False)
class Kept:
    """A response that has ended.

    Attributes:
        raw: the response object as JSON.
        status, background: as in ``raw``.
        turn: what a next response continues.
        events: its events as they were streamed, where they can be streamed again.
    """

    id: str
    raw: bytes
    status: str
    background: bool
    turn: Turn
    events: tuple[bytes, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes, without its turn."""
        events = self.events or ()
        of_events = sum(map(len, events)) + EVENT_OVERHEAD_BYTES * len(events)
        return len(self.raw) + ITEM_OVERHEAD_BYTES + of_events


class ResponseStore:
    """The newest responses of one app, as many as fit both bounds.

    Turns are counted once however many conversations share them.

    Args:
        max_responses: 0 keeps none.
        max_bytes: of responses and of the turns they refer to.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: dict[str, Kept] = {}  # the oldest first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_responses > 0

    def put(self, response: Kept) -> bool:
        """Keep a response; the oldest make room. False if it is larger than the store, which then
        stays as it is."""
        self.discard(response.id)
        if response.num_bytes + response.turn.conversation_bytes > self._max_bytes:
            return False
        self._kept[response.id] = response
        self.num_bytes += response.num_bytes
        self._hold(response.turn)
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self.discard(next(iter(self._kept)))
        return response.id in self._kept

    def get(self, id: str) -> Kept:
        """A response that is kept. Raises ResponseNotFound."""
        response = self._kept.get(id)
        if response is None:
            raise ResponseNotFound(id)
        return response

    def discard(self, id: str) -> None:
        """Forget a response, if it is kept."""
        response = self._kept.pop(id, None)
        if response is not None:
            self.num_bytes -= response.num_bytes
            self._drop(response.turn)

    def _hold(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders += 1
            if turn.holders > 1:
                return  # it and all before it are counted already
            self.num_bytes += turn.num_bytes
            turn = turn.parent

    def _drop(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            self.num_bytes -= turn.num_bytes
            turn = turn.parent

    def check_integrity(self) -> None:
        """Raise AssertionError unless the count of bytes is that of what is kept."""
        turns: dict[int, Turn] = {}
        for response in self._kept.values():
            turn: Turn | None = response.turn
            while turn is not None:
                turns[id(turn)] = turn
                turn = turn.parent
        counted = sum(response.num_bytes for response in self._kept.values())
        assert self.num_bytes == counted + sum(turn.num_bytes for turn in turns.values())
        assert all(turn.holders > 0 for turn in turns.values())
        assert len(self._kept) <= self._max_responses
        assert self.num_bytes <= self._max_bytes
