"""Token sequences that an answer must never complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BadWords:
    """The bad words of one sequence, found by the last token that stands before the end of each.

    Args:
        words: token sequences; one of a single token is never allowed at all, an empty one says
            nothing.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        distinct = dict.fromkeys(tuple(word) for word in words)
        self.always = [word[0] for word in distinct if len(word) == 1]
        self._beginnings: dict[int, list[tuple[list[int], int]]] = {}
        for word in distinct:
            if len(word) > 1:
                entry = (list(word[:-1]), word[-1])
                self._beginnings.setdefault(word[-2], []).append(entry)

    @property
    def needs_output(self) -> bool:
        """Whether what may come depends on the answer so far."""
        return bool(self._beginnings)

    def banned_after(self, output: list[int]) -> list[int]:
        """The tokens, beside ``always``, that would complete a bad word after ``output``."""
        if not output:
            return []
        return [
            last
            for beginning, last in self._beginnings.get(output[-1], ())
            if output[-len(beginning) :] == beginning
        ]
