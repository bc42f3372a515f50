"""Find the first stop string in a text that arrives in pieces, and hold back what may be one."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopMatcher:
    """An Aho-Corasick automaton over the stop strings of one request.

    The state is the longest end of the text that begins a stop string, and exactly that is held
    back: the text itself need not be kept, since it is the beginning of a known stop string. The
    work is linear in the text and does not depend on what came before. States are made as deep as
    a text has come, so that long stop strings that never show cost nothing.

    The match that completes first wins, among several that complete at the same character the
    first in the list. With ``include`` the stop string is part of the text, so nothing is held.
    """

    __slots__ = (
        "_best",
        "_children",
        "_depth",
        "_fail",
        "_first_leaf",
        "_include",
        "_leaves",
        "_matched",
        "_starts",
        "_state",
        "_stops",
        "_word",
    )

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``stops`` must not hold the empty string; SamplingParams.validate sees to it."""
        self._stops = tuple(stops)
        self._include = include
        self._matched: str | None = None
        self._state = 0
        # Per state: its successors, its length, where to go on if none fits, the first stop
        # string in the list that ends here or -1, and one stop string that begins with it.
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._best = [-1]
        self._word = [0]
        # The deepest states so far, whose successors are not made yet: from which number on they
        # lie, and which stop strings go through each.
        self._first_leaf = 0
        self._leaves: list[tuple[int, list[int]]] = [(0, list(range(len(self._stops))))]
        self._deepen()
        first_chars = "".join(re.escape(char) for char in self._children[0])
        self._starts = re.compile(f"[{first_chars}]" if first_chars else "(?!)")

    def push(self, text: str) -> tuple[str, str | None]:
        """More text: what of all so far can be shown now, and the stop string if one is complete.

        After a match the text has ended, and every later call gives ``("", match)``.
        """
        if self._matched is not None:
            return "", self._matched
        before = self._state
        end = self._advance(text)
        num_held = self._depth[before]
        best = self._best[self._state]
        if best >= 0:
            self._matched = self._stops[best]
            cut = num_held + end - (0 if self._include else len(self._matched))
        else:
            cut = num_held + len(text) - (0 if self._include else self._depth[self._state])
        if self._include:
            return text[: cut - num_held], self._matched
        if cut <= num_held:
            return self._begin_of(before, cut), self._matched
        return self._begin_of(before, num_held) + text[: cut - num_held], self._matched

    def finish(self) -> str:
        """The text ends here without a match: what was held back."""
        num_held = self.num_held
        text = self._begin_of(self._state, num_held)
        self._state = 0
        return text

    @property
    def num_held(self) -> int:
        """Characters held back at present, less than the longest stop string."""
        hidden = self._include or self._matched is not None
        return 0 if hidden else self._depth[self._state]

    def _advance(self, text: str) -> int:
        """Run the automaton; returns how many characters were read, all or up to a match."""
        children, fail, best = self._children, self._fail, self._best
        state, position, end = self._state, 0, len(text)
        while position < end:
            if state == 0:
                candidate = self._starts.search(text, position)
                if candidate is None:
                    position = end
                    break
                position = candidate.start()
            char = text[position]
            position += 1
            if state >= self._first_leaf:
                self._deepen()
            while (following := children[state].get(char)) is None and state:
                state = fail[state]
            state = following or 0
            if best[state] >= 0:
                break
        self._state = state
        return position

    def _begin_of(self, state: int, num_chars: int) -> str:
        return self._stops[self._word[state]][:num_chars] if num_chars else ""

    def _deepen(self) -> None:
        """Make the states that are one character deeper than the deepest so far."""
        leaves: list[tuple[int, list[int]]] = []
        self._first_leaf = len(self._children)
        for state, indices in self._leaves:
            depth = self._depth[state]
            members: dict[int, list[int]] = {}
            for index in indices:
                stop = self._stops[index]
                if len(stop) == depth:
                    continue
                following = self._children[state].get(stop[depth])
                if following is None:
                    following = self._add(state, stop[depth], index)
                    members[following] = []
                members[following].append(index)
                best = self._best[following]
                if len(stop) == depth + 1 and (best < 0 or index < best):
                    self._best[following] = index
            leaves += members.items()
        self._leaves = leaves

    def _add(self, state: int, char: str, index: int) -> int:
        shorter = self._fail[state]
        while shorter and char not in self._children[shorter]:
            shorter = self._fail[shorter]
        fail = self._children[shorter].get(char, 0) if state else 0
        following = self._children[state][char] = len(self._children)
        self._children.append({})
        self._depth.append(self._depth[state] + 1)
        self._fail.append(fail)
        self._best.append(self._best[fail])
        self._word.append(index)
        return following
