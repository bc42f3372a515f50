"""Incremental detokenizing against one-shot decoding."""

from __future__ import annotations

import codecs
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.errors import ModelError
from trioserve.text.detokenizer import Detokenizer
from trioserve.text.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 530), max_size=40)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """One id at a time, and the end."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def after_prompt(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The oracle: what decoding the whole adds to decoding the prompt."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(prompt + ids)
    assert whole.startswith(before)
    return whole[len(before) :]


def test_api_02_one_id_at_a_time(any_tokenizer: Tokenizer, hard_text: str) -> None:
    ids = any_tokenizer.encode(hard_text, add_special_tokens=False)
    parts = pieces(any_tokenizer, ids)
    assert "".join(parts) == any_tokenizer.decode(ids)
    assert "\ufffd" not in "".join(parts)
    assert parts[-1] == ""


def test_api_02_corpus_does_split_characters(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("👨‍👩‍👧‍👦日本")
    assert sum(part == "" for part in pieces(byte_level, ids)[:-1]) >= 5


def test_api_02_cut_anywhere(byte_level: Tokenizer, hard_text: str) -> None:
    ids = byte_level.encode(hard_text)
    for end in range(len(ids) + 1):
        parts = pieces(byte_level, ids[:end])
        assert "".join(parts) == byte_level.decode(ids[:end])
        assert all("\ufffd" not in part for part in parts[:-1])
        assert parts[-1] in ("", "\ufffd")


def test_api_02_cut_anywhere_in_byte_tokens(sentencepiece: Tokenizer, hard_text: str) -> None:
    ids = sentencepiece.encode(hard_text, add_special_tokens=False)
    for end in range(len(ids) + 1):
        parts = pieces(sentencepiece, ids[:end])
        assert hard_text.startswith("".join(parts[:-1]))
        assert parts[-1] in ("", "\ufffd")


def test_api_02_streamed_is_plain(any_tokenizer: Tokenizer, hard_text: str) -> None:
    ids = any_tokenizer.encode(hard_text)[:-1]
    plain = Detokenizer(any_tokenizer)
    assert plain.push(ids) + plain.finish() == "".join(pieces(any_tokenizer, ids))


@given(ids=IDS)
def test_api_02_any_byte_level_ids(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(byte_level, ids)) == byte_level.decode(ids)


@given(ids=IDS, prompt=IDS)
def test_any_byte_level_ids_whatever_the_prompt(
    byte_level: Tokenizer, ids: list[int], prompt: list[int]
) -> None:
    assert pieces(byte_level, ids, prompt) == pieces(byte_level, ids)


@given(data=st.data())
def test_any_pieces_after_any_prompt(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    piece = st.sampled_from([1, 2, *range(259, sentencepiece.vocab_size)])
    spaces = st.sampled_from([*sentencepiece.encode("  a", add_special_tokens=False), 1])
    some = st.lists(piece | spaces, max_size=12)
    prompt, ids = data.draw(some), data.draw(some)
    assert "".join(pieces(sentencepiece, ids, prompt)) == after_prompt(sentencepiece, prompt, ids)


@given(data=st.data())
def test_any_metaspace_pieces_after_any_prompt(metaspace: Tokenizer, data: st.DataObject) -> None:
    piece = st.sampled_from([1, 2, *range(259, metaspace.vocab_size)])
    prompt, ids = data.draw(st.lists(piece, max_size=8)), data.draw(st.lists(piece, max_size=8))
    assert "".join(pieces(metaspace, ids, prompt)) == after_prompt(metaspace, prompt, ids)


@given(ids=st.lists(st.integers(0, 300), max_size=40))
def test_api_02_any_byte_tokens(sentencepiece: Tokenizer, ids: list[int]) -> None:
    shown = [token_id for token_id in ids if not sentencepiece.is_special(token_id)]
    data = b"".join(sentencepiece.token_bytes(token_id) for token_id in shown)
    expected = data.removeprefix(b" ").decode(errors="replace")
    assert "".join(pieces(sentencepiece, ids)) == expected


@given(chunks=st.lists(st.binary(max_size=6) | st.text(max_size=2).map(str.encode)))
def test_the_incremental_decoder_agrees_with_the_one_shot_decoder(chunks: list[bytes]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    joined = "".join(map(decoder.decode, chunks)) + decoder.decode(b"", final=True)
    assert joined == b"".join(chunks).decode(errors="replace")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([], "the dog"), ([1], "the dog"), ([1, 2, 1], "the dog"), ("the fox", " the dog")],
)
def test_leading_space_depends_on_the_prompt(
    sentencepiece: Tokenizer, metaspace: Tokenizer, prompt: list[int] | str, text: str
) -> None:
    for tokenizer in (sentencepiece, metaspace):
        before = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = tokenizer.encode("the dog", add_special_tokens=False)
        assert "".join(pieces(tokenizer, ids, before)) == text


def test_a_prompt_of_one_space_uses_up_the_stripping(sentencepiece: Tokenizer) -> None:
    space = next(i for i in range(600) if sentencepiece.token_content(i) == "▁")
    ids = sentencepiece.encode("the dog", add_special_tokens=False)
    assert "".join(pieces(sentencepiece, ids, [space])) == " the dog"


def test_control_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the<|im_end|> dog<tool call>")
    assert "".join(pieces(byte_level, ids)) == "the dog<tool call>"
    shown = Detokenizer(byte_level, [], skip_special_tokens=False)
    assert shown.push(ids) == byte_level.decode(ids, skip_special_tokens=False)


def test_a_control_token_inside_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("日")
    [end] = byte_level.encode("<|im_end|>")
    assert len(ids) == 3
    assert pieces(byte_level, [ids[0], end, ids[1], end, ids[2]]) == ["", "", "", "", "日", ""]


def test_ids_without_a_token_are_no_text(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode("the dog")
    holes = [i for token_id in ids for i in (10**6, token_id, -1)]
    assert "".join(pieces(any_tokenizer, holes)) == any_tokenizer.decode(ids)


def test_step_gives_the_bytes_that_become_text(any_tokenizer: Tokenizer, hard_text: str) -> None:
    detokenizer = Detokenizer(any_tokenizer)
    steps = [detokenizer.step(i) for i in any_tokenizer.encode(hard_text)]
    assert b"".join(data for data, _ in steps).decode() == "".join(text for _, text in steps)


def test_bytes_held_back_are_counted(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    held = []
    for token_id in byte_level.encode("日a"):
        detokenizer.push([token_id])
        held.append(detokenizer.num_held_bytes)
    assert held == [1, 2, 0, 0]
    detokenizer.push(byte_level.encode("日")[:2])
    assert (detokenizer.finish(), detokenizer.num_held_bytes) == ("\ufffd", 0)


def test_a_decoder_that_strips_two_spaces(
    specs: dict[str, dict[str, Any]], load: Callable[[dict[str, Any]], Tokenizer]
) -> None:
    spec = copy.deepcopy(specs["sentencepiece"])
    spec["decoder"]["decoders"][-1]["start"] = 2
    tokenizer = load(spec)
    ids = [i for piece in "▁▁▁a" for i in range(600) if tokenizer.token_content(i) == piece]
    for start in range(4):
        assert "".join(pieces(tokenizer, ids[start:])) == tokenizer.decode(ids[start:])


def test_undecodable_tokenizer_is_refused_at_once(
    specs: dict[str, dict[str, Any]], load: Callable[[dict[str, Any]], Tokenizer]
) -> None:
    spec = copy.deepcopy(specs["byte-level"]) | {"decoder": {"type": "WordPiece", "prefix": "##"}}
    spec["decoder"]["cleanup"] = True
    with pytest.raises(ModelError, match="WordPiece"):
        Detokenizer(load(spec))


def test_pf_02_5000_tokens_without_text(
    byte_level: Tokenizer, count_lines: Callable[[Callable[[], object]], int]
) -> None:
    [end] = byte_level.encode("<|im_end|>")
    first, *rest = byte_level.encode("日")
    detokenizer = Detokenizer(byte_level)
    detokenizer.push([first])

    def run(num_tokens: int) -> int:
        return count_lines(lambda: [detokenizer.push([end]) for _ in range(num_tokens)])

    early = run(100)
    run(4800)
    assert run(100) == early
    assert detokenizer.num_held_bytes == 1
    assert detokenizer.push(rest) == "日"
    assert detokenizer.num_held_bytes == 0


@pytest.mark.parametrize("text", ["the dog ", "日本👨‍👩‍👧"])
def test_pf_02_work_per_token_is_flat(
    any_tokenizer: Tokenizer, text: str, count_lines: Callable[[Callable[[], object]], int]
) -> None:
    ids = any_tokenizer.encode(text, add_special_tokens=False)

    def per_round(num_rounds: int) -> float:
        detokenizer = Detokenizer(any_tokenizer, ids)
        widest = 0

        def run() -> None:
            nonlocal widest
            for _ in range(num_rounds):
                for token_id in ids:
                    detokenizer.push([token_id])
                    widest = max(widest, detokenizer.num_held_bytes)

        lines = count_lines(run)
        assert widest <= 3
        return lines / num_rounds

    assert per_round(500) <= per_round(10) * 1.1


def test_pf_02_a_long_prompt_is_not_read(
    byte_level: Tokenizer,
    sentencepiece: Tokenizer,
    count_lines: Callable[[Callable[[], object]], int],
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        long = tokenizer.encode("the dog and the fox " * 500)
        assert len(long) > 2000
        work = [
            count_lines(functools.partial(Detokenizer, tokenizer, prompt))
            for prompt in (long[:20], long)
        ]
        assert work[0] == work[1]
