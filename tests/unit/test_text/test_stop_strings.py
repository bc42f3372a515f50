"""Stop strings spread over pieces, against a search of the whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.errors import InvalidRequest
from trioserve.sampling_params import MAX_STOP_CHARS, SamplingParams
from trioserve.text.stop_strings import StopMatcher

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text("ab\nc", max_size=6), max_size=20)


def run(
    stops: Sequence[str], pieces: Iterable[str], include: bool = False
) -> tuple[list[str], str | None]:
    """What each piece let out, then the end; and the match."""
    matcher = StopMatcher(tuple(stops), include)
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            return shown, matched
    return [*shown, matcher.finish()], None


def naive(stops: Sequence[str], text: str, include: bool) -> tuple[str, str | None]:
    """The definition: the first end of a stop string, ties by list order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def longest_beginning(stops: Sequence[str], text: str) -> int:
    """Length of the longest end of ``text`` that begins a stop string without being one."""
    sizes = range(min(len(text), max(map(len, stops)) - 1) + 1)
    return max(n for n in sizes if n == 0 or any(s.startswith(text[-n:]) for s in stops))


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["beta gamma"], ["alpha be", "ta ga", "mma delta"], ["alpha ", "", ""], "beta gamma"),
        (["\n"], ["one\ntwo"], ["one"], "\n"),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", ""], "\n\n"),
        (["rm"], ["a term here"], ["a te"], "rm"),
        (["日"], ["the 日本"], ["the "], "日"),
        (["a", "b", "c", "d"], ["xyz", "d"], ["xyz", ""], "d"),
        (["abcd", "bc"], ["ab", "cd"], ["", "a"], "bc"),
        (["c", "abc"], ["ab", "c"], ["", "ab"], "c"),
        (["abc", "c"], ["ab", "c"], ["", ""], "abc"),
        (["stop"], ["sto", "sto", "pe"], ["", "sto", ""], "stop"),
        (["aab"], ["aaa", "ab"], ["a", "a"], "aab"),
        (["end", "end"], ["the end"], ["the "], "end"),
        (["abc", "c", "abc"], ["abc"], [""], "abc"),
    ],
)
def test_api_03_spread_over_pieces(
    stops: list[str], pieces: list[str], shown: list[str], matched: str
) -> None:
    assert run(stops, pieces) == (shown, matched)


def test_api_03_not_a_stop_after_all() -> None:
    assert run(["beta gamma"], ["alpha be", "ta ", "test"]) == (
        ["alpha ", "", "beta test", ""],
        None,
    )


def test_api_03_released_at_the_end() -> None:
    assert run(["beta gamma"], ["alpha be"]) == (["alpha ", "be"], None)


def test_api_03_holds_back_no_more_than_needed() -> None:
    matcher = StopMatcher(("z" * 64,))
    assert matcher.push("nothing like it") == ("nothing like it", None)
    assert matcher.num_held == 0
    assert matcher.push("zz") == ("", None)
    assert matcher.num_held == 2


def test_include_keeps_the_stop_and_holds_nothing() -> None:
    assert run(["beta"], ["alpha be", "ta gamma"], include=True) == (["alpha be", "ta"], "beta")


def test_after_a_match_nothing_comes() -> None:
    matcher = StopMatcher(("x",))
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("more") == ("", "x")
    assert matcher.finish() == ""


def test_stop_strings_have_a_greatest_length() -> None:
    SamplingParams(stop=("x" * MAX_STOP_CHARS,)).validate(vocab_size=10)
    with pytest.raises(InvalidRequest, match="at most 1024 characters") as caught:
        SamplingParams(stop=("a", "x" * (MAX_STOP_CHARS + 1))).validate(vocab_size=10)
    assert caught.value.param == "stop"


def test_without_stops_all_passes() -> None:
    assert run([], ["any", " text"]) == (["any", " text", ""], None)


@pytest.mark.parametrize("stop", ["]", "^", "-", "\\", "[a]", "a-z", "."])
def test_characters_that_mean_something_in_patterns(stop: str) -> None:
    assert run([stop], ["x-"[:1] + stop + "y"])[1] == stop
    assert run([stop], ["xyzq"]) == (["xyzq", ""], None)


@given(stops=STOPS, pieces=PIECES, include=st.booleans())
def test_api_03_agrees_with_the_definition(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    shown, matched = run(stops, pieces, include)
    assert ("".join(shown), matched) == naive(stops, "".join(pieces), include)


@given(stops=STOPS, pieces=PIECES)
def test_api_03_held_back_is_exactly_what_may_become_a_stop(
    stops: list[str], pieces: list[str]
) -> None:
    matcher, text, shown = StopMatcher(tuple(stops)), "", ""
    for piece in pieces:
        text += piece
        new, matched = matcher.push(piece)
        if matched is not None:
            return
        shown += new
        num_held = longest_beginning(stops, text)
        assert matcher.num_held == num_held
        assert shown == text[: len(text) - num_held]


@pytest.mark.parametrize(
    ("stops", "piece"),
    [
        (("z" * 64,), "word "),
        (("a" * 63 + "b",), "a"),  # every character may begin it
        (("a" * 63 + "b", "aab" * 20 + "c"), "aab"),
        (("\n\nUser:", "###", "</s>", " "), "word\n"),
    ],
)
def test_pf_02_work_per_character_is_flat(
    stops: tuple[str, ...], piece: str, count_lines: Callable[[Callable[[], object]], int]
) -> None:
    def per_piece(num_pieces: int) -> float:
        matcher = StopMatcher(stops)
        widest = 0

        def feed() -> None:
            nonlocal widest
            for _ in range(num_pieces):
                matcher.push(piece)
                widest = max(widest, matcher.num_held)

        lines = count_lines(feed)
        assert widest < max(map(len, stops))
        return lines / num_pieces

    assert per_piece(20_000) <= per_piece(200) * 1.1


def test_pf_02_size_of_pieces_does_not_matter(
    count_lines: Callable[[Callable[[], object]], int],
) -> None:
    stop, text = "a" * 63 + "b", "a" * 20_000
    whole = count_lines(lambda: StopMatcher((stop,)).push(text))
    assert whole < 11 * len(text)
