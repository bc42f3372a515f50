"""GGUF: headers against the gguf package, damage with numbers, metadata → ModelSpec."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from trioserve.config.schema import DEFAULT_SOURCE, ModelConfig
from trioserve.errors import ModelError
from trioserve.models.gguf_header import GGUFArray, read_header
from trioserve.models.gguf_names import gguf_name, hf_name
from trioserve.models.inspect import inspect
from trioserve.models.llama_tensors import expected_tensors
from trioserve.models.source import fetch, parse_source
from trioserve.models.spec import ModelSpec, ResolvedModel, RopeScaling
from trioserve.models.spec_from_gguf import llama3_divisor

TOKENS = ["<unk>", "<s>", "</s>", *(f"t{number}" for number in range(61))]
Edit = Callable[[gguf.GGUFWriter], None]


def llama_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template("{{ messages }}")


SHAPES = expected_tensors(
    ModelSpec(
        architecture="llama",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=len(TOKENS),
        max_position=64,
        tie_embeddings=True,
    )
)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    keys: Edit = llama_keys,
    more: Edit = lambda writer: None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """A sound tiny model of zeros, less and more what is asked for."""
    writer = gguf.GGUFWriter(path, architecture)
    keys(writer)
    for name, shape in SHAPES.items():
        if (called := gguf_name(name)) not in leave_out:
            writer.add_tensor(called, np.zeros(shape, np.float32))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def look(path: Path, **settings: Any) -> ResolvedModel:
    return inspect(path, ModelConfig(source=str(path), **settings))


def check_against_package(path: Path) -> None:
    """Every value and every tensor, as the gguf package reads them."""
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if "GGUF." not in name}
    assert ours.metadata.keys() == fields.keys()
    for name, value in ours.metadata.items():
        if isinstance(value, GGUFArray):
            assert len(value) == len(fields[name].data)
            some = slice(0, None, len(value) // 1000 + 1)  # the package is slow with many
            assert list(value)[some] == fields[name].contents(some), name
        else:
            assert value == fields[name].contents(), name
    assert len(ours.tensors) == len(theirs.tensors)
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.name == other.name
        assert mine.dtype == other.tensor_type.name
        assert mine.shape == tuple(reversed(other.shape.tolist()))
        assert (mine.offset, mine.num_bytes) == (other.data_offset, other.n_bytes)


def test_all_kinds_of_value_and_tensor(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("x.u8", 200)
        writer.add_int8("x.i8", -100)
        writer.add_uint16("x.u16", 60000)
        writer.add_int16("x.i16", -30000)
        writer.add_uint32("x.u32", 4_000_000_000)
        writer.add_int32("x.i32", -2_000_000_000)
        writer.add_uint64("x.u64", 1 << 63)
        writer.add_int64("x.i64", -(1 << 62))
        writer.add_float32("x.f32", 0.5)
        writer.add_float64("x.f64", 0.1)
        writer.add_bool("x.bool", True)
        writer.add_string("x.text", "grüße 🙂")
        writer.add_array("x.ints", [1, -2, 3])
        writer.add_array("x.floats", [0.5, 1.5])
        writer.add_array("x.texts", ["a", "", "bc"])
        writer.add_array("x.flags", [True, False])
        writer.add_tensor("half", np.ones((3, 5), np.float16))
        for kind in ("Q8_0", "Q4_0", "Q4_1", "BF16"):
            quantized = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType[kind])
            writer.add_tensor(kind, quantized, raw_dtype=gguf.GGMLQuantizationType[kind])

    path = write_gguf(tmp_path / "m.gguf", more=more)
    check_against_package(path)
    values = read_header(path).metadata
    assert [values["x.texts"].at(index) for index in (-1, 0, 1, 2, 3)] == [
        None,
        "a",
        "",
        "bc",
        None,
    ]
    assert values["x.ints"].at(1) == -2
    assert len(values["x.floats"]) == 2


def test_another_alignment(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", more=lambda writer: writer.add_custom_alignment(256))
    check_against_package(path)
    assert all(tensor.offset % 256 == 0 for tensor in read_header(path).tensors)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(num_tensors: int = 0, num_keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def tensor(name: str, kind: int, offset: int = 0, *dimensions: int) -> bytes:
    dims = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


def test_nested_arrays(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2B", 0, 2, 7, 8)
    path = tmp_path / "m.gguf"
    path.write_bytes(header(0, 1, string("k") + struct.pack("<IIQ", 9, 9, 2) + inner + inner))
    (first, second) = read_header(path).metadata["k"]
    assert list(first) == list(second) == [7, 8]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF", "is truncated: 4 bytes, its header reads to 8"),
        (b"GGML" + bytes(40), "is not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
        (header(version=1), "has GGUF version 1, supported: 2, 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (header(1 << 60), "claims 1152921504606846976 tensors"),
        (header(0, 1, string("k") + struct.pack("<I", 77)), "value type 77"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 5, 1 << 62)), "is truncated"),
        (header(0, 1, string("k") + struct.pack("<IIQQ", 9, 8, 2, 1 << 40)), "is truncated"),
        (header(0, 1, struct.pack("<Q", 1 << 63)), "is truncated"),
        (header(0, 2, (string("k") + struct.pack("<IB", 0, 1)) * 2), "key k appears twice"),
        (
            header(0, 1, string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000),
            "nested too deeply",
        ),
        (
            header(0, 1, string("general.alignment") + struct.pack("<II", 4, 12)),
            "general.alignment is 12, no power of two",
        ),
        (
            header(0, 1, string("split.count") + struct.pack("<IH", 2, 3)),
            "one of 3 parts of a split GGUF",
        ),
        (
            header(1, 0, tensor("a", 14, 0, 256)),
            "tensor a has type Q6_K, unsupported; supported: F32, F16, Q4_0, Q4_1, Q8_0, BF16",
        ),
        (header(1, 0, tensor("a", 99, 0, 256)), "tensor a has type number 99, unsupported"),
        (header(1, 0, tensor("a", 8, 0, 33)), "rows of 33, no multiple of 32"),
        (header(1, 0, tensor("a", 0, 0, 1, 1, 1, 1, 1)), "tensor a of 5 dimensions"),
        (header(1, 0, tensor("a", 0, 7, 1)), "tensor a is not aligned to 32 bytes"),
        (header(1, 0, tensor("a", 0, 0, 8)), "is truncated: 57 bytes, its tensors end at 96"),
        (
            header(2, 0, tensor("a", 0, 0, 1) + tensor("a", 0, 32, 1)) + bytes(99),
            "a tensor name appears twice",
        ),
        (
            header(2, 0, tensor("a", 0, 0, 9) + tensor("b", 0, 32, 1)) + bytes(99),
            "tensor b overlaps the one before",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cut_anywhere_in_the_header_it_is_truncated(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    end = read_header(tmp_path / "m.gguf").tensors[0].offset
    for length in range(4, end, 37):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError, match=f"is truncated: {length} bytes"):
            read_header(tmp_path / "m.gguf")


def test_truncated_data_says_both_numbers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    words = rf"is truncated: {size // 2} bytes, its tensors end at \d+$"
    with pytest.raises(ModelError, match=words):
        look(path)


def test_names_there_and_back() -> None:
    for name in expected_tensors(
        ModelSpec(
            architecture="llama",
            num_layers=12,
            hidden_size=8,
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            intermediate_size=8,
            vocab_size=8,
            max_position=8,
            attention_bias=True,
            mlp_bias=True,
        )
    ):
        called = gguf_name(name)
        assert called is not None
        assert hf_name(called) == name
    assert hf_name("blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    assert hf_name("rope_freqs.weight") is None
    assert hf_name("blk.0.attn_q") is None
    assert gguf_name("model.layers.0.self_attn.rotary_emb.inv_freq") is None


def test_names_and_shapes_are_those_of_transformers() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=20,
        vocab_size=30,
        attention_bias=True,
        mlp_bias=True,
    )
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config).state_dict()
    ours = expected_tensors(
        ModelSpec(
            architecture="llama",
            num_layers=2,
            hidden_size=16,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            intermediate_size=20,
            vocab_size=30,
            max_position=64,
            attention_bias=True,
            mlp_bias=True,
        )
    )
    assert ours == {name: tuple(value.shape) for name, value in theirs.items()}


def test_a_sound_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Tiny.gguf")
    model = look(path)
    assert model.spec == ModelSpec(
        architecture="llama",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=64,
        max_position=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_embeddings=True,
        eos_token_ids=(2, 3),
        bos_token_id=1,
    )
    assert (model.name, model.format) == ("Tiny", "gguf")
    assert (model.bos_token, model.eos_token) == ("<s>", "</s>")
    assert model.chat_template == "{{ messages }}"
    assert model.tensors[0].name == "token_embd.weight"
    assert model.tokenizer_path == str(path)


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert look(tmp_path).format == "gguf"
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\); name one"):
        look(tmp_path)


def test_an_untied_output(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        more=lambda writer: writer.add_tensor("output.weight", np.zeros((64, 32), np.float32)),
    )
    model = look(path)
    assert not model.spec.tie_embeddings
    assert model.tensors[-1].name == "output.weight"


def test_missing_and_extra_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", leave_out=("blk.1.ffn_norm.weight",))
    words = r"1 of 20 tensors missing: blk\.1\.ffn_norm\.weight$"
    with pytest.raises(ModelError, match=words):
        look(path)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_rot_embd", np.zeros(4, np.float32))
        writer.add_tensor("odd.weight", np.zeros(4, np.float32))

    (warning,) = look(write_gguf(tmp_path / "m.gguf", more=more)).warnings
    assert warning.endswith("1 tensors unknown, ignored: odd.weight")


def llama3_factors(scaling: RopeScaling) -> np.ndarray[Any, Any]:
    """As transformers computes them: its own frequencies, divided by the scaled ones."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (np.arange(0, 8, 2) / 8)
    return (plain / scaled.numpy()).astype(np.float32)


def test_llama3_scaling_is_found_in_its_divisors(tmp_path: Path) -> None:
    scaling = RopeScaling(kind="llama3", factor=32.0)
    factors = llama3_factors(scaling)
    assert 1.0 < factors[2] < 32.0 or factors[2] == 32.0
    path = write_gguf(
        tmp_path / "m.gguf", more=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    model = look(path)
    assert model.spec.rope_scaling == scaling
    assert model.warnings == ()


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    odd = np.array([1, 2, 3, 4], np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", more=lambda writer: writer.add_tensor("rope_freqs.weight", odd)
    )
    with pytest.raises(ModelError, match=r"rope_freqs\.weight follows no known rule"):
        look(path)


def test_the_divisor_blends_between_its_ends() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0)
    assert llama3_divisor(100.0, scaling) == 1.0
    assert llama3_divisor(10_000.0, scaling) == 8.0
    assert math.isclose(llama3_divisor(8192 / 2.5, scaling), 1 / (0.5 + 0.5 / 8))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rope type yarn"),
        (lambda w: w.add_expert_count(8), "mixtures of experts are unsupported"),
        (lambda w: w.add_value_length(4), r"attention\.value_length is 4, other than the head"),
        (lambda w: w.add_key_length(10), "is 8, other than the head size 10"),
    ],
)
def test_features_that_are_not_supported(tmp_path: Path, edit: Edit, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        look(write_gguf(tmp_path / "m.gguf", more=edit))


def test_linear_scaling(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    model = look(write_gguf(tmp_path / "m.gguf", more=more))
    assert model.spec.rope_scaling == RopeScaling(kind="linear", factor=4.0)


def test_an_unknown_architecture_and_missing_keys(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ModelError, match="architecture mamba unsupported, supported: llama"):
        look(path)
    path = write_gguf(tmp_path / "m.gguf", keys=lambda writer: writer.add_block_count(2))
    words = r"missing fields llama\.embedding_length, llama\.feed_forward_length, "
    with pytest.raises(ModelError, match=words):
        look(path)

    def without_tokens(writer: gguf.GGUFWriter) -> None:
        llama_keys(writer)
        for keys in writer.kv_data:
            keys.pop("tokenizer.ggml.tokens")

    with pytest.raises(ModelError, match="has no tokenizer"):
        look(write_gguf(tmp_path / "m.gguf", keys=without_tokens))


async def test_the_real_model() -> None:
    path = await fetch(
        parse_source(DEFAULT_SOURCE), cache_dir=None, hf_token=None, progress=lambda *_: None
    )
    assert isinstance(path, Path)
    check_against_package(path)
    model = look(path)
    assert model.spec == ModelSpec(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    assert (model.bos_token, model.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.chat_template is not None
    assert len(model.tensors) == 272
