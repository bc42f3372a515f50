"""config.json → ModelSpec, against transformers' own reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trioserve.errors import ModelError
from trioserve.models.spec import ModelSpec, RopeScaling
from trioserve.models.spec_from_config import spec_from_config

PATH = Path("/m/config.json")
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def make(values: dict[str, Any], **changes: Any) -> ModelSpec:
    return spec_from_config({**values, **changes}, {}, PATH)


def test_all_fields(config_values: dict[str, Any], spec: ModelSpec) -> None:
    assert make(config_values) == spec


def test_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    theirs = LlamaConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=1000,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        head_dim=16,
        attention_bias=True,
        eos_token_id=[5, 6],
        architectures=["LlamaForCausalLM"],
    )
    theirs.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in values
    ours = spec_from_config(values, {}, tmp_path / "config.json")
    assert ours == ModelSpec(
        architecture="llama",
        num_layers=3,
        hidden_size=48,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=1000,
        max_position=131072,
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            kind="llama3",
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=8192,
        ),
        attention_bias=True,
        eos_token_ids=(5, 6),
        bos_token_id=1,
    )


def test_defaults_are_those_of_transformers(config_values: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    values = {name: config_values[name] for name in (*names, "vocab_size", "architectures")}
    theirs, ours = LlamaConfig(**values), make(values)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert (ours.attention_bias, ours.mlp_bias) == (theirs.attention_bias, theirs.mlp_bias)


def test_rope_of_transformers_4(config_values: dict[str, Any]) -> None:
    old = make(config_values, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    assert old.rope_theta == 5e5
    assert old.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    later = make(config_values, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert later.rope_scaling is not None
    assert later.rope_scaling.factor == 32.0
    assert make(config_values, rope_scaling=None).rope_scaling is None
    assert make(config_values, rope_parameters={"rope_type": "default"}).rope_scaling is None


def test_stop_tokens_of_both_files(config_values: dict[str, Any]) -> None:
    spec = spec_from_config(
        {**config_values, "eos_token_id": [7, 2]}, {"eos_token_id": [2, 9]}, PATH
    )
    assert spec.eos_token_ids == (7, 2, 9)
    assert make(config_values, eos_token_id=None).eos_token_ids == ()


def test_an_old_file_names_only_the_family(config_values: dict[str, Any]) -> None:
    del config_values["architectures"]
    assert make(config_values).architecture == "llama"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT9"]}, "architecture GPT9 unsupported, supported: LlamaForCausalLM"),
        ({"architectures": [3]}, "architecture 3 unsupported"),
        ({"architectures": None, "model_type": "x"}, "missing field architectures"),
        ({"hidden_size": None}, "missing field hidden_size"),
        (
            {"hidden_size": None, "vocab_size": None},
            "missing fields hidden_size, vocab_size",
        ),
        ({"hidden_size": "8"}, "hidden_size is '8', expected an integer"),
        ({"hidden_size": True}, "hidden_size is True, expected an integer"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', expected a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"hidden_act": 3}, "hidden_act is 3, expected a string"),
        ({"eos_token_id": ["x"]}, "expected a token id"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x', expected an object"),
        ({"num_hidden_layers": 0}, "num_layers is 0, must be 1 to 1024"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, must be 1 to"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, must be at least 1"),
        ({"num_key_value_heads": 3}, "no multiple of num_kv_heads"),
        ({"head_dim": 5}, "head_dim is 5, rotary positions need it even"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, must be above 0"),
        ({"hidden_act": "gelu"}, "activation gelu unsupported, supported: silu"),
        ({"eos_token_id": 512}, "eos_token_id is 512, outside the vocabulary of 512"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope type yarn unsupported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: missing field factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5, must be at least 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "low_freq_factor < high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {}}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"this kind \(gptq\) are unsupported"),
    ],
)
def test_faults(config_values: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        make(config_values, **changes)
    assert str(caught.value).startswith("/m/config.json: ")
    assert "\n" not in str(caught.value)
