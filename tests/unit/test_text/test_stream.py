"""From deltas to text, tokens and log probabilities, held back and cut together."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.engine.api import TextDelta, TokenLogprob
from trioserve.ipc.messages import Delta, TokenLogprobs
from trioserve.sampling_params import SamplingParams
from trioserve.text.stream import TextStream
from trioserve.text.tokenizer import Tokenizer


def logprobs_of(ids: Sequence[int]) -> list[TokenLogprobs]:
    """The chosen token is second best, after its neighbour."""
    return [
        TokenLogprobs(token_id=i, logprob=-1.5, rank=2, top=[(max(i - 1, 0), -0.5), (i, -1.5)])
        for i in ids
    ]


def delta(ids: Sequence[int], reason: str | None = None, stop_id: int | None = None) -> Delta:
    return Delta(
        id=1,
        token_ids=list(ids),
        finish_reason=reason,
        stop_token_id=stop_id,
        logprobs=logprobs_of(ids),
    )


def one_by_one(ids: Sequence[int], reason: str, stop_id: int | None = None) -> list[Delta]:
    return [*(delta([i]) for i in ids[:-1]), delta(ids[-1:], reason, stop_id)]


class Answer:
    """All that a stream gave, joined, with the rules that hold for every delta checked."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        deltas: Sequence[Delta],
        prompt: Sequence[int] = (),
        **sampling: Any,
    ) -> None:
        self.stream = TextStream(tokenizer, prompt, SamplingParams(**sampling))
        self.parts: list[TextDelta] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        for one in deltas:
            was_finished = self.stream.finished
            part = self.stream.push(one)
            if part is None:
                continue
            assert not was_finished
            assert part.text or part.token_ids or part.finish_reason
            assert (part.finish_reason is not None) == self.stream.finished
            self.parts.append(part)
            self.token_ids += part.token_ids
            if part.logprobs is not None:
                assert [entry.token_id for entry in part.logprobs] == part.token_ids
                self.logprobs += part.logprobs
            assert self.stream.num_output_tokens == len(self.token_ids)
        self.text = "".join(part.text for part in self.parts)
        self.bytes = b"".join(entry.token_bytes for entry in self.logprobs)
        self.end = (self.stream.finish_reason, self.stream.stop_reason)


@pytest.fixture
def pieces(byte_level: Tokenizer) -> Callable[..., list[int]]:
    """Ids whose tokens are exactly these texts; fails where the vocabulary lacks one."""

    def find(*texts: str) -> list[int]:
        ids = []
        for text in texts:
            tokens = byte_level.encode(text)
            assert [byte_level.token_bytes(i) for i in tokens] == [text.encode()], text
            ids += tokens
        return ids

    return find


def test_plain_answer(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the dog")
    answer = Answer(byte_level, one_by_one(ids, "length"))
    assert (answer.text, answer.token_ids, answer.end) == ("the dog", ids, ("length", None))
    assert all(part.logprobs is None for part in answer.parts)


def test_nothing_new_is_none(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, [], SamplingParams())
    assert stream.push(delta([])) is None
    assert stream.push(delta(byte_level.encode("日")[:1])) is None
    assert stream.num_output_tokens == 0


def test_an_empty_last_delta_is_shown(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, [], SamplingParams(logprobs=0))
    assert stream.push(delta([], "abort")) == TextDelta("", [], [], "abort", None)
    assert stream.finished


def test_the_end_token_has_no_text_but_counts(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the dog<|im_end|>")
    answer = Answer(byte_level, one_by_one(ids, "stop"), logprobs=2)
    assert (answer.text, answer.end) == ("the dog", ("stop", None))
    assert answer.token_ids == ids
    assert (answer.logprobs[-1].token, answer.logprobs[-1].token_bytes) == ("<|im_end|>", b"")


def test_an_end_token_that_looks_like_text_is_not_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the dog")
    answer = Answer(byte_level, one_by_one(ids, "stop"))
    assert answer.text == byte_level.decode(ids[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_stop_token(byte_level: Tokenizer, include: bool) -> None:
    ids = byte_level.encode("the dog\n")
    deltas = one_by_one(ids, "stop", ids[-1])
    answer = Answer(byte_level, deltas, include_stop_str_in_output=include, logprobs=0)
    assert answer.text == ("the dog\n" if include else "the dog")
    assert answer.bytes == answer.text.encode()
    assert answer.logprobs[-1].token == "\n"
    assert answer.end == ("stop", ids[-1])
    assert answer.stream.num_output_tokens == len(ids)


def test_a_special_stop_token_is_never_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the<|im_end|>")
    deltas = one_by_one(ids, "stop", ids[-1])
    assert Answer(byte_level, deltas, include_stop_str_in_output=True).text == "the"


def test_api_03_stop_string_over_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("alpha beta gamma delta")
    answer = Answer(byte_level, one_by_one(ids, "length"), stop=("beta gamma",), logprobs=0)
    assert (answer.text, answer.end) == ("alpha ", ("stop", "beta gamma"))
    assert answer.bytes.startswith(b"alpha beta gamma")
    needed = next(n for n in range(len(ids)) if "beta gamma" in byte_level.decode(ids[:n]))
    assert answer.token_ids == ids[:needed]
    assert answer.stream.num_output_tokens == needed < len(ids)


def test_api_03_stop_inside_a_token(
    byte_level: Tokenizer, pieces: Callable[..., list[int]]
) -> None:
    ids = pieces("the", " the", " the")
    deltas = one_by_one(ids, "length")
    assert Answer(byte_level, deltas, stop=(" t",)).text == "the"
    kept = Answer(byte_level, deltas, stop=(" t",), include_stop_str_in_output=True)
    assert (kept.text, kept.token_ids) == ("the t", ids[:2])


def test_api_03_stop_begins_in_the_token_that_ends_a_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the 日本 dog")
    answer = Answer(byte_level, one_by_one(ids, "length"), stop=("本",), logprobs=0)
    assert (answer.text, answer.end) == ("the 日", ("stop", "本"))
    assert answer.bytes == "the 日本".encode()


def test_api_03_later_deltas_are_ignored(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one\ntwo")
    stream = TextStream(byte_level, [], SamplingParams(stop=("\n",)))
    last = stream.push(delta(ids))
    assert last is not None
    assert (last.text, last.finish_reason, last.stop_reason) == ("one", "stop", "\n")
    assert stream.push(delta(ids, "length")) is None
    assert stream.push(delta([], "abort")) is None
    assert (stream.finish_reason, stream.stop_reason) == ("stop", "\n")


def test_api_03_a_stop_string_wins_over_the_length_limit(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one\n")
    assert Answer(byte_level, one_by_one(ids, "length"), stop=("\n",)).end == ("stop", "\n")


@pytest.mark.parametrize("reason", ["length", "abort", "stop"])
def test_api_03_what_was_held_back_comes_at_the_end(byte_level: Tokenizer, reason: str) -> None:
    ids = byte_level.encode("one beta<|im_end|>")
    answer = Answer(byte_level, one_by_one(ids, reason), stop=("beta gamma",), logprobs=0)
    assert (answer.text, answer.end) == ("one beta", (reason, None))
    assert answer.token_ids == ids


def test_api_02_cut_in_a_character(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode("the 日", add_special_tokens=False)[:-1]
    answer = Answer(any_tokenizer, one_by_one(ids, "length"), logprobs=0)
    assert answer.text == "the \ufffd"
    assert answer.bytes.decode(errors="replace") == answer.text
    assert answer.token_ids == ids


def test_api_02_a_replacement_character_at_the_end_can_be_a_stop_string(
    byte_level: Tokenizer,
) -> None:
    ids = byte_level.encode("the 日")[:-1]
    answer = Answer(byte_level, one_by_one(ids, "length"), stop=("\ufffd",))
    assert (answer.text, answer.end) == ("the ", ("stop", "\ufffd"))


def test_api_07_bytes_are_the_texts_bytes_at_every_moment(
    any_tokenizer: Tokenizer, hard_text: str
) -> None:
    ids = any_tokenizer.encode(hard_text, add_special_tokens=False)
    prompt = any_tokenizer.encode("the fox", add_special_tokens=False)
    answer = Answer(any_tokenizer, one_by_one(ids, "length"), prompt, logprobs=5)
    for part in answer.parts:
        assert part.logprobs is not None
        assert b"".join(entry.token_bytes for entry in part.logprobs) == part.text.encode()
    assert answer.text in (hard_text, " " + hard_text)


def test_api_07_held_text_holds_its_tokens(
    byte_level: Tokenizer, pieces: Callable[..., list[int]]
) -> None:
    ids = pieces("the", " the", " d", "o")
    answer = Answer(byte_level, one_by_one(ids, "length"), stop=(" the thing",), logprobs=0)
    assert [(part.text, part.token_ids) for part in answer.parts] == [
        ("the", ids[:1]),
        (" the d", ids[1:3]),
        ("o", ids[3:]),
    ]


def test_api_07_a_leading_space_left_out_is_left_out_of_the_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the dog", add_special_tokens=False)
    answer = Answer(sentencepiece, one_by_one(ids, "length"), [1], logprobs=2)
    assert answer.bytes == b"the dog"
    first = answer.logprobs[0]
    assert first.token == first.token_bytes.decode() == "the"
    assert first.top[1] == TokenLogprob(first.token, first.token_id, first.token_bytes, -1.5, (), 2)


def test_api_07_the_chosen_token_is_reported_not_the_best(byte_level: Tokenizer) -> None:
    [token_id] = byte_level.encode("the")
    answer = Answer(byte_level, [delta([token_id], "length")], logprobs=2)
    [entry] = answer.logprobs
    assert (entry.token, entry.token_id, entry.logprob) == ("the", token_id, -1.5)
    assert [(top.token_id, top.logprob) for top in entry.top] == [
        (token_id - 1, -0.5),
        (token_id, -1.5),
    ]


def test_api_07_parts_of_characters_are_spelt_out(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("日")
    answer = Answer(byte_level, one_by_one(ids, "length"), logprobs=0)
    assert [entry.token for entry in answer.logprobs] == [
        "bytes:\\xe6",
        "bytes:\\x97",
        "bytes:\\xa5",
    ]
    assert answer.bytes.decode() == answer.text == "日"


def test_api_07_infinities_become_numbers(byte_level: Tokenizer) -> None:
    [token_id] = byte_level.encode("the")
    given = TokenLogprobs(
        token_id=token_id, logprob=-math.inf, rank=9, top=[(0, -math.inf), (1, math.nan)]
    )
    answer = Answer(
        byte_level,
        [Delta(id=1, token_ids=[token_id], finish_reason="length", logprobs=[given])],
        logprobs=2,
    )
    values = [answer.logprobs[0].logprob, *(top.logprob for top in answer.logprobs[0].top)]
    assert values == [-9999.0] * 3
    json.dumps(values, allow_nan=False)


def test_unasked_logprobs_are_not_shown(byte_level: Tokenizer) -> None:
    answer = Answer(byte_level, one_by_one(byte_level.encode("the dog"), "length"))
    assert all(part.logprobs is None for part in answer.parts)


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "the"), (1, "the"), (2, "the the"), (3, "the the the"), (4, "the the the the")],
)
def test_stop_strings_count_after_min_tokens(
    byte_level: Tokenizer, pieces: Callable[..., list[int]], min_tokens: int, text: str
) -> None:
    ids = pieces("the", " the", " the", " the")
    answer = Answer(byte_level, one_by_one(ids, "length"), stop=(" the",), min_tokens=min_tokens)
    assert answer.text == text
    assert answer.end == (("length", None) if min_tokens == 4 else ("stop", " the"))


def test_a_stop_string_across_the_min_tokens_border_does_not_count(
    byte_level: Tokenizer, pieces: Callable[..., list[int]]
) -> None:
    ids = pieces("the", " the", " the", " the")
    stops = (" the the",)
    assert Answer(byte_level, one_by_one(ids, "length"), stop=stops, min_tokens=2).end[0] == "stop"
    assert (
        Answer(byte_level, one_by_one(ids, "length"), stop=stops, min_tokens=3).end[0] == "length"
    )


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[int], str, int | None, dict[str, Any], list[int]]:
    ids = draw(st.lists(st.integers(0, 525), min_size=1, max_size=30))
    reason = draw(st.sampled_from(["stop", "length", "abort"]))
    stop_id = draw(st.sampled_from([None, ids[-1]])) if reason == "stop" else None
    sampling = {
        "stop": tuple(draw(st.lists(st.text(" athe日\n", min_size=1, max_size=4), max_size=3))),
        "include_stop_str_in_output": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, 10)),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
    }
    cuts = sorted(draw(st.sets(st.integers(1, len(ids)), max_size=5)))
    return ids, reason, stop_id, sampling, cuts


@given(script=scripts())
def test_merged_deltas_give_the_same_answer(
    all_tokenizers: dict[str, Tokenizer],
    script: tuple[list[int], str, int | None, dict[str, Any], list[int]],
) -> None:
    ids, reason, stop_id, sampling, cuts = script
    bounds = [0, *(cut for cut in cuts if cut < len(ids)), len(ids)]
    merged = [delta(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    merged[-1] = msgspec.structs.replace(merged[-1], finish_reason=reason, stop_token_id=stop_id)
    for tokenizer in all_tokenizers.values():
        single = Answer(tokenizer, one_by_one(ids, reason, stop_id), **sampling)
        joined = Answer(tokenizer, merged, **sampling)
        assert joined.text == single.text
        assert joined.token_ids == single.token_ids
        assert joined.logprobs == single.logprobs
        assert joined.end == single.end
        assert joined.stream.finished


@given(script=scripts())
def test_api_07_bytes_and_text_agree_up_to_the_cut(
    all_tokenizers: dict[str, Tokenizer],
    script: tuple[list[int], str, int | None, dict[str, Any], list[int]],
) -> None:
    ids, reason, stop_id, sampling, _ = script
    for tokenizer in all_tokenizers.values():
        answer = Answer(tokenizer, one_by_one(ids, reason, stop_id), **(sampling | {"logprobs": 0}))
        whole = answer.bytes.decode(errors="replace")
        if isinstance(answer.end[1], str):
            assert whole.startswith(answer.text)
            assert answer.token_ids == ids[: len(answer.token_ids)]
        else:
            assert whole == answer.text
            assert answer.token_ids == ids


@pytest.mark.parametrize("text", ["the dog ", "日本👨‍👩‍👧 ", "aaaa"])
def test_pf_02_work_per_token_is_flat(
    byte_level: Tokenizer, text: str, count_lines: Callable[[Callable[[], object]], int]
) -> None:
    ids = byte_level.encode(text)
    sampling = SamplingParams(stop=("a" * 63 + "b",), logprobs=2)

    def per_token(num_tokens: int) -> float:
        stream = TextStream(byte_level, ids, sampling)
        deltas = [delta([ids[n % len(ids)]]) for n in range(num_tokens)]
        widest = 0

        def feed() -> None:
            nonlocal widest
            for one in deltas:
                stream.push(one)
                widest = max(widest, len(stream._held))

        lines = count_lines(feed)
        assert widest <= 64
        return lines / num_tokens

    assert per_token(20_000) <= per_token(200) * 1.1


def test_pf_02_5000_tokens_without_text_are_delivered_as_they_come(byte_level: Tokenizer) -> None:
    [end] = byte_level.encode("<|im_end|>")
    stream = TextStream(byte_level, [], SamplingParams(stop=("x" * 64,), logprobs=0))
    for _ in range(5000):
        part = stream.push(delta([end]))
        assert part is not None
        assert (part.text, part.token_ids) == ("", [end])
    assert stream.num_output_tokens == 5000
