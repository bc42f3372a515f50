"""``random:`` sources: any field by name, and a tokenizer of exactly the size asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from trioserve.config.schema import ModelConfig
from trioserve.errors import ModelError
from trioserve.models.inspect import inspect
from trioserve.models.random_model import (
    CONTROL_TOKENS,
    MAX_VOCABULARY,
    RandomModel,
    byte_alphabet,
    make_tokenizer,
    parse_random,
)
from trioserve.models.source import fetch, parse_source
from trioserve.models.spec import ModelSpec, RopeScaling


async def get(source: str, root: Path) -> RandomModel:
    model = await fetch(
        parse_source(source), cache_dir=str(root), hf_token=None, progress=lambda *_: None
    )
    assert isinstance(model, RandomModel)
    return model


def test_every_field_by_name() -> None:
    query = (
        "num_layers=3&hidden_size=96&num_heads=6&num_kv_heads=3&head_dim=20&intermediate_size=80&"
        "vocab_size=700&max_position=99&rms_norm_eps=1e-6&rope_theta=5e5&tie_embeddings=true&"
        "attention_bias=1&mlp_bias=false&hidden_act=silu&eos_token_ids=2,5&bos_token_id=none&"
        "tasks=generate&rope_scaling.kind=llama3&rope_scaling.factor=8&"
        "rope_scaling.original_max_position=64&seed=7"
    )
    model = parse_random("llama", query)
    assert model.seed == 7
    assert model.spec == ModelSpec(
        architecture="llama",
        num_layers=3,
        hidden_size=96,
        num_heads=6,
        num_kv_heads=3,
        head_dim=20,
        intermediate_size=80,
        vocab_size=700,
        max_position=99,
        rms_norm_eps=1e-6,
        rope_theta=5e5,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position=64),
        tie_embeddings=True,
        attention_bias=True,
        eos_token_ids=(2, 5),
        bos_token_id=None,
    )


def test_head_size_follows_from_the_others() -> None:
    assert parse_random("llama", "hidden_size=128&num_heads=4").spec.head_dim == 32


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("num_lyers=3", r"unknown key num_lyers; did you mean num_layers\?"),
        ("sed=3", r"unknown key sed; did you mean seed\?"),
        ("zzz=3", "unknown key zzz; known: "),
        ("rope_scaling.factr=3", r"did you mean rope_scaling\.factor\?"),
        ("rope_scaling.factor=3", r"needs rope_scaling\.kind and \.factor"),
        ("rope_scaling.kind=yarn", r"rope_scaling\.kind=yarn is not a value"),
        ("architecture=x", "unknown key architecture"),
        ("num_layers=x", "num_layers=x is not a value of type int"),
        ("num_layers=", "num_layers= is not a value of type int"),
        ("tie_embeddings=maybe", "tie_embeddings=maybe is not a value of type bool"),
        ("eos_token_ids=1,x", "eos_token_ids=1,x is not a value of type tuple"),
        ("num_heads=3", "no multiple of num_kv_heads"),
        ("num_layers=0", "num_layers is 0, must be 1 to 1024"),
        ("vocab_size=100", "vocab_size is 100, must be 259 to|eos_token_id"),
        (f"vocab_size={MAX_VOCABULARY + 1}", "must be 259 to"),
        ("eos_token_ids=9999", "eos_token_id is 9999, outside the vocabulary of 512"),
    ],
)
def test_faults(query: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        parse_random("llama", query)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocab_size", [259, 300, 512, 49152])
def test_the_tokenizer_has_exactly_that_many_tokens(vocab_size: int) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(make_tokenizer(vocab_size)))
    assert tokenizer.get_vocab_size() == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    assert all(tokenizer.id_to_token(token_id) for token_id in range(vocab_size))


@pytest.mark.parametrize("vocab_size", [259, 512, 5000])
def test_text_goes_there_and_back(vocab_size: int) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(make_tokenizer(vocab_size)))
    for text in ("the  answer\n\tis 42", "naïve 你好 🙂", "", "\x00\x7f\u00ad"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    ids = tokenizer.encode("<|im_start|>a<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)


def test_more_vocabulary_makes_shorter_prompts() -> None:
    text = "there is nothing either good or bad but thinking makes it so"
    lengths = [
        len(Tokenizer.from_str(json.dumps(make_tokenizer(size))).encode(text).ids)
        for size in (259, 900, 20_000)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[2] < lengths[0] / 2


def test_the_byte_alphabet_is_that_of_the_library() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())
    (piece,) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("\x00 ~\x7f")
    assert piece[0] == "".join(byte_alphabet()[byte] for byte in b"\x00 ~\x7f")


async def test_made_once_and_inspected(tmp_path: Path) -> None:
    source = "random:llama?seed=3&vocab_size=600"
    model = await get(source, tmp_path)
    written = model.tokenizer_path.stat().st_mtime_ns
    assert (await get(source, tmp_path)).tokenizer_path.stat().st_mtime_ns == written
    resolved = inspect(model, ModelConfig(source=source))
    assert (resolved.name, resolved.format, resolved.seed) == ("random-llama", "random", 3)
    assert resolved.spec.vocab_size == 600
    assert resolved.tokenizer_path == str(model.tokenizer_path)
    assert (resolved.bos_token, resolved.eos_token) == (CONTROL_TOKENS[0], CONTROL_TOKENS[2])
    assert "<|im_start|>assistant" in (resolved.chat_template or "")


async def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot write the cache .*set model\.cache_dir"):
        await get("random:llama", tmp_path / "file")
