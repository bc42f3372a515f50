"""Find the first stop string in a text that arrives in pieces, and hold back what may be one."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """An Aho-Corasick automaton over the stop strings of one request.

    The state is the longest end of the text that begins a stop string, and exactly that is held
    back: the text itself need not be kept, since it is the beginning of a known stop string. The
    work is linear in the text and does not depend on what came before.

    The match that completes first wins, among several that complete at the same character the
    first in the list. With ``include`` the stop string is part of the text, so nothing is held.
    """

    __slots__ = (
        "_best",
        "_children",
        "_depth",
        "_fail",
        "_include",
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
        for index, stop in enumerate(self._stops):
            self._add(index, stop)
        self._link()
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
            while (following := children[state].get(char)) is None and state:
                state = fail[state]
            state = following or 0
            if best[state] >= 0:
                break
        self._state = state
        return position

    def _begin_of(self, state: int, num_chars: int) -> str:
        return self._stops[self._word[state]][:num_chars] if num_chars else ""

    def _add(self, index: int, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._children[state].get(char)
            if following is None:
                following = self._children[state][char] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(0)
                self._best.append(-1)
                self._word.append(index)
            state = following
        if self._best[state] < 0:
            self._best[state] = index

    def _link(self) -> None:
        """Breadth first, so that the state a fail link leads to is complete already."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._children[state].items():
                shorter = self._fail[state]
                while shorter and char not in self._children[shorter]:
                    shorter = self._fail[shorter]
                self._fail[following] = self._children[shorter].get(char, 0)
                ends = self._best[self._fail[following]]
                if ends >= 0 and (self._best[following] < 0 or ends < self._best[following]):
                    self._best[following] = ends
                queue.append(following)
