"""Tokenizer files that cannot be used, bytes of tokens, the bound before tokenizing."""

from __future__ import annotations

import copy
import json
import math
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.errors import InvalidRequest, ModelError
from trioserve.text.token_bytes import shrink_factor
from trioserve.text.tokenizer import Tokenizer

Load = Callable[[dict[str, Any]], Tokenizer]
Specs = dict[str, dict[str, Any]]


def test_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelError, match=r"cannot read tokenizer .*tokenizer\.json: No such file"):
        Tokenizer(str(path))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "Nonsense"}}', "\xff"])
def test_broken_file_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable") as caught:
        Tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_encode_and_library_decode_round_trip(any_tokenizer: Tokenizer, hard_text: str) -> None:
    ids = any_tokenizer.encode(hard_text)
    assert ids
    assert all(isinstance(token_id, int) for token_id in ids)
    assert any_tokenizer.decode(ids).strip() == hard_text.strip()


def test_special_tokens_are_added_on_request_only(specs: Specs, load: Load) -> None:
    spec = copy.deepcopy(specs["sentencepiece"])
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tokenizer = load(spec)
    assert tokenizer.encode("the dog") == [1, *tokenizer.encode("the dog", False)]


def test_truncation_and_padding_in_the_file_are_not_obeyed(specs: Specs, load: Load) -> None:
    spec = copy.deepcopy(specs["byte-level"])
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    spec["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    tokenizer = load(spec)
    text = "the dog and the fox and the dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_the_clients_fault(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate pair at character 3"):
        any_tokenizer.encode("the\ud83d")
    assert any_tokenizer.min_num_tokens("the\ud83d") >= 0


def test_pf_01_encoding_lets_other_threads_run(byte_level: Tokenizer) -> None:
    text = "the quick brown fox " * 20_000
    thread = threading.Thread(target=byte_level.encode, args=(text,))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0)  # offers the interpreter; a thread that locks it would keep it to its end
    thread.join()
    assert turns > 20


def test_token_bytes_joined_are_the_text(any_tokenizer: Tokenizer, hard_text: str) -> None:
    ids = any_tokenizer.encode(hard_text, add_special_tokens=False)
    joined = b"".join(any_tokenizer.token_bytes(token_id) for token_id in ids)
    assert joined.decode() in (hard_text, " " + hard_text)


def test_every_single_token_decodes_as_the_library_does(any_tokenizer: Tokenizer) -> None:
    for token_id in range(any_tokenizer.vocab_size):
        ours = any_tokenizer.token_bytes(token_id).decode(errors="replace")
        theirs = any_tokenizer.decode([token_id], skip_special_tokens=False)
        assert ours.removeprefix(" ") == theirs.removeprefix(" "), token_id


def test_ids_without_a_token_are_empty(any_tokenizer: Tokenizer) -> None:
    for token_id in (any_tokenizer.vocab_size, 10**9, -1):
        assert any_tokenizer.token_bytes(token_id) == b""
        assert any_tokenizer.token_content(token_id) is None
        assert not any_tokenizer.is_special(token_id)


def test_special_and_visible_added_tokens(byte_level: Tokenizer) -> None:
    [end] = byte_level.encode("<|im_end|>")
    [visible] = byte_level.encode("<tool call>")
    assert byte_level.is_special(end)
    assert not byte_level.is_special(visible)
    assert byte_level.token_bytes(visible) == b"<tool call>"
    assert byte_level.vocab_size == visible + 1


@pytest.mark.parametrize(
    ("decoder", "word"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}, "regular expression"),
        ({"type": "Strip", "content": " ", "start": 0, "stop": 1}, "Strip at the end"),
    ],
)
def test_undecodable_tokenizers_encode_and_say_why(
    specs: Specs, load: Load, decoder: dict[str, Any], word: str
) -> None:
    spec = copy.deepcopy(specs["byte-level"]) | {"decoder": decoder}
    tokenizer = load(spec)
    assert tokenizer.encode("the dog")
    assert word in str(tokenizer.decoder_fault)
    with pytest.raises(ModelError, match=word):
        tokenizer.token_bytes(0)


def test_pf_01_bound_is_useful(all_tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in all_tokenizers.values():
        assert tokenizer.max_token_bytes < 64
        assert tokenizer.min_num_tokens("x" * 64_000) > 1000
        assert tokenizer.min_num_tokens("") == 0


@given(text=st.text(max_size=200) | st.sampled_from(["the ", "é", "👨‍👩‍👧"]).map(lambda s: s * 50))
def test_pf_01_bound_holds(all_tokenizers: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in all_tokenizers.values():
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, False))


def test_pf_01_counting_stops_when_it_is_enough(byte_level: Tokenizer) -> None:
    text = "x" * 5_000_000
    full, early = byte_level.min_num_tokens(text), byte_level.min_num_tokens(text, enough=100)
    assert full == math.ceil(len(text) / byte_level.max_token_bytes)
    assert 100 <= early < full / 50
    assert byte_level.min_num_tokens("the dog", enough=100) == byte_level.min_num_tokens("the dog")


def test_pf_01_bound_holds_for_every_token_of_the_vocabulary(any_tokenizer: Tokenizer) -> None:
    for token_id in range(any_tokenizer.vocab_size):
        assert len(any_tokenizer.token_bytes(token_id)) <= any_tokenizer.max_token_bytes


def test_pf_01_bytes_without_a_token_are_not_counted(specs: Specs, load: Load) -> None:
    spec = copy.deepcopy(specs["byte-level"])
    vocab = spec["model"]["vocab"]
    for char in "ĄĆñĀ":  # bytes 4, 6, 0xF1 and 0, as the alphabet writes them
        vocab[f"gap{vocab.pop(char)}"] = len(vocab) + 1000
    tokenizer = load(spec)
    assert tokenizer.encode("\x04\x06\x00" * 1000) == []
    assert tokenizer.min_num_tokens("\x04\x06\x00" * 1000) == 0
    text = "the \x04dog \U00040000\U00050000" * 100
    assert 0 < tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.max_token_bytes < math.inf
    assert load(spec | {"normalizer": {"type": "NFC"}}).max_token_bytes == math.inf


def _with_lstrip(spec: dict[str, Any]) -> None:
    spec["added_tokens"][0]["lstrip"] = True


def _without_byte_fallback(spec: dict[str, Any]) -> None:
    spec["model"]["byte_fallback"] = False


def _with_a_gap_in_bytes(spec: dict[str, Any]) -> None:
    vocab = spec["model"]["vocab"]
    vocab["gap"] = vocab.pop("<0x04>")


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("byte-level", _with_lstrip),
        ("sentencepiece", _without_byte_fallback),
        ("sentencepiece", _with_a_gap_in_bytes),
        ("byte-level", lambda spec: spec.update(normalizer={"type": "NFKC"})),
        ("byte-level", lambda spec: spec.update(normalizer={"type": "StripAccents"})),
        (
            "byte-level",
            lambda spec: spec.update(
                normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": ""}
            ),
        ),
        (
            "byte-level",
            lambda spec: spec.update(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [{"type": "WhitespaceSplit"}, spec["pre_tokenizer"]],
                }
            ),
        ),
    ],
)
def test_pf_01_no_bound_where_text_may_vanish(
    specs: Specs, load: Load, family: str, change: Callable[[dict[str, Any]], None]
) -> None:
    spec = copy.deepcopy(specs[family])
    change(spec)
    tokenizer = load(spec)
    assert tokenizer.max_token_bytes == math.inf
    assert tokenizer.min_num_tokens("x" * 10_000) == 0


def test_pf_01_normal_forms_shrink_no_more_than_we_say() -> None:
    triples = ["\u1100\u1161\u11a8", "\u0dd9\u0dcf\u0dca", "\u2126\u0313\u0342\u0345"]
    chars = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    worst = 1.0
    for form in ("NFC", "NFD"):
        factor = shrink_factor({"type": form})
        assert factor is not None
        for text in [*triples, *chars]:
            if text.isascii() or unicodedata.is_normalized(form, text):
                continue
            after = unicodedata.normalize(form, text)
            worst = max(worst, len(text.encode()) / len(after.encode()))
        assert 1 < worst <= factor


def test_pf_01_replace_counts_bytes_lost(specs: Specs, load: Load) -> None:
    spec = copy.deepcopy(specs["byte-level"])
    plain = load(spec).max_token_bytes
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": "—"}, "content": "-"}
    assert load(spec).max_token_bytes == 3 * plain


def test_tokens_without_a_decoder_are_joined_by_spaces(specs: Specs, load: Load) -> None:
    tokenizer = load(copy.deepcopy(specs["byte-level"]) | {"decoder": None})
    ids = tokenizer.encode("thedog")
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ")
    assert joined == tokenizer.decode(ids)


def test_file_is_what_the_library_writes(any_tokenizer: Tokenizer) -> None:
    assert json.loads(Path(any_tokenizer.path).read_text())["model"]["type"] == "BPE"
