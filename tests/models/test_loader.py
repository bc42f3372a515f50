"""Reading checkpoints: types, row order, progress, and files that are not what they were."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trioserve.errors import ModelError
from trioserve.kernels.cpu.blocks import HALF
from trioserve.kernels.cpu.codes import Q4
from trioserve.kernels.cpu.panel_product import PanelProduct
from trioserve.kernels.cpu.runtime import Team
from trioserve.models.gguf_header import read_header
from trioserve.models.llama_tensors import expected_tensors
from trioserve.models.loader import RandomTensors, open_weights
from trioserve.models.registry import load_model
from trioserve.models.safetensors_header import read_checkpoint
from trioserve.models.spec import ModelSpec, ResolvedModel, TensorInfo

from .causal import logits_of

SPEC = ModelSpec(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=128,
    max_position=128,
)


def model_of(tensors, format="safetensors", spec=SPEC, **changes) -> ResolvedModel:
    return ResolvedModel(
        name="m",
        source="here",
        format=format,
        spec=spec,
        tensors=tuple(tensors),
        tokenizer_path="",
        **changes,
    )


def random_tensors(spec: ModelSpec = SPEC) -> dict[str, torch.Tensor]:
    return dict(RandomTensors(expected_tensors(spec), seed=1))


@pytest.fixture
def checkpoint(tmp_path) -> ResolvedModel:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    return model_of(read_checkpoint(tmp_path))


# ---------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_types(tmp_path, dtype):
    stored = {name: tensor.to(dtype) for name, tensor in random_tensors().items()}
    save_file(stored, tmp_path / "model.safetensors")
    model = model_of(read_checkpoint(tmp_path))
    with open_weights(model, expected_tensors(SPEC)) as tensors:
        assert set(tensors) == set(stored)
        for name, tensor in stored.items():
            assert tensors[name].dtype == torch.float32
            assert torch.equal(tensors[name], tensor.float())


def test_tensor_at_an_odd_offset(tmp_path):
    values = torch.arange(6, dtype=torch.float32)
    path = tmp_path / "odd"
    path.write_bytes(b"abc" + values.numpy().tobytes())
    info = TensorInfo(name="w", path=str(path), dtype="F32", shape=(2, 3), offset=3, num_bytes=24)
    with open_weights(model_of([info]), {"w": (2, 3)}) as tensors:
        assert torch.equal(tensors["w"], values.view(2, 3))


def test_a_file_that_shrank_is_an_error(checkpoint):
    path = checkpoint.tensors[0].path
    os.truncate(path, os.path.getsize(path) - 1)
    with pytest.raises(ModelError, match=r"model\.safetensors ends in the middle of tensor"):
        load_model(checkpoint, "fp32")


def test_a_file_that_is_gone_is_an_error(checkpoint):
    os.unlink(checkpoint.tensors[0].path)
    with pytest.raises(ModelError, match=r"cannot open .*model\.safetensors: No such file"):
        load_model(checkpoint, "fp32")


def test_a_directory_in_place_of_the_file_is_an_error(checkpoint):
    path = Path(checkpoint.tensors[0].path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors: Is a directory"):
        load_model(checkpoint, "fp32")


def test_unsupported_type_is_named(checkpoint):
    first = attrs.evolve(checkpoint.tensors[0], dtype="F8_E4M3")
    model = model_of([first, *checkpoint.tensors[1:]])
    with pytest.raises(ModelError, match=rf"{first.name} is stored as F8_E4M3; supported: F32"):
        load_model(model, "fp32")


def test_bytes_that_do_not_make_the_shape(checkpoint):
    first = checkpoint.tensors[0]
    torn = attrs.evolve(first, num_bytes=first.num_bytes - 4)
    model = model_of([torn, *checkpoint.tensors[1:]])
    with pytest.raises(ModelError, match=rf"{first.name}: .* do not make the shape"):
        load_model(model, "fp32")


@pytest.mark.parametrize("fault", [False, True])
def test_files_are_closed(checkpoint, fault):
    before = os.listdir("/proc/self/fd")
    model = model_of(checkpoint.tensors[1:]) if fault else checkpoint
    if fault:
        with pytest.raises(ModelError):
            load_model(model, "fp32")
    else:
        load_model(model, "fp32")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_progress_comes_from_the_calling_thread(checkpoint):
    seen, threads = [], set()

    def progress(fraction, num_bytes):
        seen.append((fraction, num_bytes))
        threads.add(threading.current_thread())

    load_model(checkpoint, "fp16", progress)
    assert seen == sorted(seen)
    assert len(seen) == SPEC.num_layers + 1
    assert seen[-1] == (1.0, checkpoint.weight_bytes)
    assert threads == {threading.current_thread()}


def test_progress_ends_at_one_beside_an_unused_tied_head(tmp_path):
    spec = attrs.evolve(SPEC, tie_embeddings=True)
    save_file(random_tensors(), tmp_path / "model.safetensors")
    seen = []
    load_model(
        model_of(read_checkpoint(tmp_path), spec=spec), "fp32", lambda *now: seen.append(now)
    )
    assert seen[-1][0] == 1.0


def test_unknown_architecture(checkpoint):
    model = attrs.evolve(checkpoint, spec=attrs.evolve(SPEC, architecture="mamba"))
    with pytest.raises(ModelError, match=r"architecture mamba is not supported; supported: llama"):
        load_model(model, "fp32")


# --------------------------------------------------------------------------------- random


def test_random_is_made_of_its_seed():
    model = model_of([], "random", seed=7)
    again = logits_of(load_model(model, "fp32"), [1, 2, 3])
    assert torch.equal(logits_of(load_model(model, "fp32"), [1, 2, 3]), again)
    other = logits_of(load_model(attrs.evolve(model, seed=8), "fp32"), [1, 2, 3])
    assert not torch.equal(other, again)
    assert again.isfinite().all()


def test_random_tensors_do_not_depend_on_order():
    shapes = expected_tensors(attrs.evolve(SPEC, mlp_bias=True))
    ordered, turned = RandomTensors(shapes, 1), RandomTensors(shapes, 1)
    forward = {name: ordered[name] for name in shapes}
    backward = {name: turned[name] for name in reversed(shapes)}
    assert all(torch.equal(forward[name], backward[name]) for name in shapes)
    up = [forward[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1)]
    assert not torch.equal(*up)
    assert torch.equal(forward["model.norm.weight"], torch.ones(64))
    assert not forward["model.layers.0.mlp.up_proj.bias"].any()


# ----------------------------------------------------------------------------------- GGUF

NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SPEC.num_layers)
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


def write_gguf(path: Path, dtype: str, others: dict[str, str] | None = None) -> None:
    """A llama model of random values, every matrix in ``dtype`` but ``others`` (by last name)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SPEC.num_layers)
    writer.add_context_length(SPEC.max_position)
    writer.add_embedding_length(SPEC.hidden_size)
    writer.add_feed_forward_length(SPEC.intermediate_size)
    writer.add_head_count(SPEC.num_heads)
    writer.add_head_count_kv(SPEC.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(SPEC.head_dim)
    writer.add_vocab_size(SPEC.vocab_size)
    for name, tensor in random_tensors().items():
        stored = NAMES.get_name(name, try_suffixes=(".weight", ".bias"))
        wanted = (others or {}).get(stored.split(".")[-2], dtype)
        kind = gguf.GGMLQuantizationType[wanted if tensor.dim() == 2 else "F32"]
        writer.add_tensor(stored, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", TYPES)
def test_gguf_equals_transformers(transformers, tmp_path, dtype):
    """Names, values and the row order of q and k."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "model.gguf"
    write_gguf(path, dtype)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    reference = load_gguf_checkpoint(
        str(path), return_tensors=True, model_to_load=transformers.LlamaForCausalLM(config)
    )["tensors"]
    model = model_of(read_header(path).tensors, "gguf")
    with open_weights(model, expected_tensors(SPEC)) as tensors:
        assert set(tensors) == set(reference) == set(expected_tensors(SPEC))
        for name, expected in reference.items():
            assert np.array_equal(tensors[name].numpy(), expected.float().numpy()), name


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_codes_stand_for_the_same_values(tmp_path, dtype):
    """Row order of q and k included; norms, which have no codes, say so."""
    path = tmp_path / "model.gguf"
    write_gguf(path, dtype)
    model = model_of(read_header(path).tensors, "gguf")
    with open_weights(model, expected_tensors(SPEC)) as tensors:
        for name, shape in expected_tensors(SPEC).items():
            assert tensors.code_bits(name) == (None if len(shape) == 1 else int(dtype[1]))
            if len(shape) == 2:
                blocks = tensors.codes(name)
                assert blocks.bits == int(dtype[1])
                torch.testing.assert_close(
                    blocks.dequantized(), tensors[name], rtol=1e-6, atol=1e-7
                )


def test_codes_that_do_not_make_the_shape(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "Q4_1")
    tensors = [
        attrs.evolve(tensor, shape=(tensor.shape[0] + 1, *tensor.shape[1:]))
        for tensor in read_header(path).tensors
    ]
    with open_weights(model_of(tensors, "gguf"), expected_tensors(SPEC)) as opened:
        with pytest.raises(ModelError, match=r"do not make the shape \[65, 64\]"):
            opened.codes("model.layers.0.self_attn.o_proj.weight")


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_dequantized_one(tmp_path, dtype, tied):
    path = tmp_path / "model.gguf"
    write_gguf(path, dtype)
    spec = attrs.evolve(SPEC, tie_embeddings=tied)
    model = model_of(read_header(path).tensors, "gguf", spec=spec)
    packed = load_model(model, "packed")
    product = PanelProduct(Team(1, None))
    for layer in packed.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            projection = getattr(layer, name)
            assert projection.panels.kind == int(dtype[1])
            projection.product = product
    assert packed.head.panels.kind == int(dtype[1])
    packed.head.product = product
    expected = logits_of(load_model(model, "fp32"), [1, 2, 3, 4])
    torch.testing.assert_close(logits_of(packed, [1, 2, 3, 4]), expected, rtol=1e-3, atol=1e-4)


def test_what_a_file_holds_without_codes_becomes_float16(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "Q4_1", others={"attn_v": "F16", "output": "F32"})
    packed = load_model(model_of(read_header(path).tensors, "gguf"), "packed")
    layer = packed.layers[0]
    kinds = [getattr(layer, name).panels.kind for name in ("qkv", "output", "gate_up", "down")]
    assert kinds == [HALF, Q4, Q4, Q4]
    assert packed.head.panels.kind == HALF


# ----------------------------------------------------------------------- the worker's path


def test_loading_and_running_never_imports_transformers(checkpoint):
    """Nor what only the parent, or only tests, need. Seconds of every start would be lost."""
    program = f"""
import sys
from trioserve.models.linear import choose_layout
from trioserve.models.registry import load_model
from trioserve.models.spec import *
from pathlib import Path
from trioserve.models.safetensors_header import read_checkpoint
import torch
spec = {SPEC!r}
directory = Path({str(Path(checkpoint.tensors[0].path).parent)!r})
model = load_model(
    ResolvedModel(name="m", source="s", format="safetensors", spec=spec,
                  tensors=tuple(read_checkpoint(directory)), tokenizer_path=""),
    choose_layout("auto")[0],
)
class Attention:
    def forward(self, layer, query, key, value, context):
        return query.flatten(1)
tokens = torch.arange(4)
assert model.forward(tokens, tokens, Attention(), None, tokens).shape == (4, 128)
heavy = ("transformers", "gguf", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "quart")
print([name for name in heavy if name in sys.modules])
"""
    command = [sys.executable, "-P", "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
