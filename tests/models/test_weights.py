"""Tensors that are missing, too many or misshapen (field failure ST-06)."""

from __future__ import annotations

import logging
import math
import threading

import pytest
import torch

from trioserve.errors import ModelError
from trioserve.models.llama import Llama
from trioserve.models.llama_tensors import expected_tensors
from trioserve.models.loader import RandomTensors
from trioserve.models.spec import ModelSpec
from trioserve.models.weights import Weights, make_pieces


def spec(**changes) -> ModelSpec:
    values = {
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 96,
        "max_position": 128,
        "tie_embeddings": True,
    }
    return ModelSpec(**(values | changes))


def tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return dict(RandomTensors(expected_tensors(spec), seed=3))


@pytest.mark.parametrize("layout", ["fp32", "fp16"])
def test_missing_norm_is_named(layout):
    found = tensors(spec())
    del found["model.layers.1.input_layernorm.weight"]
    with pytest.raises(ModelError, match=r"lacks 1 tensor: model\.layers\.1\.input_layernorm"):
        Llama(spec(), found, layout)


def test_many_missing_are_counted():
    found = {"model.norm.weight": torch.ones(32)}
    with pytest.raises(ModelError, match=r"lacks 19 tensors: model\.embed_tokens.* and 11 more"):
        Llama(spec(), found, "fp32")


def test_untied_head_is_needed():
    found = tensors(spec())
    with pytest.raises(ModelError, match=r"lacks 1 tensor: lm_head\.weight"):
        Llama(spec(tie_embeddings=False), found, "fp32")


def test_missing_bias_is_named():
    with pytest.raises(ModelError, match=r"lacks 8 tensors: .*q_proj\.bias"):
        Llama(spec(attention_bias=True), tensors(spec()), "fp32")


def test_extra_tensor_is_warned_about(caplog):
    found = tensors(spec()) | {"model.layers.0.mystery.weight": torch.zeros(1)}
    with caplog.at_level(logging.WARNING):
        Llama(spec(), found, "fp32")
    assert "1 tensor: model.layers.0.mystery.weight" in caplog.text


def test_tied_head_and_rotary_tables_may_be_stored(caplog):
    found = tensors(spec()) | {
        "lm_head.weight": torch.zeros(96, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "rope_freqs.weight": torch.ones(4),
    }
    with caplog.at_level(logging.WARNING):
        Llama(spec(), found, "fp32")
    assert not caplog.records


def test_wrong_shape_is_named():
    found = tensors(spec())
    found["model.layers.1.mlp.up_proj.weight"] = torch.zeros(32, 48)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.*\[32, 48\].*\[48, 32\]"):
        Llama(spec(), found, "fp32")


def test_nothing_is_read_before_all_is_there():
    class Counting(dict):
        reads = 0

        def __getitem__(self, name):
            self.reads += 1
            return super().__getitem__(name)

    found = Counting(tensors(spec()))
    del found["model.norm.weight"]
    with pytest.raises(ModelError):
        Llama(spec(), found, "fp32")
    assert found.reads == 0


def test_each_tensor_is_read_once():
    reads: list[str] = []

    class Listing(dict):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    Llama(spec(), Listing(tensors(spec())), "fp16")
    assert sorted(reads) == sorted(expected_tensors(spec()))


def test_join():
    parts = {"a": torch.ones(2, 3), "b": torch.zeros(1, 3, dtype=torch.float16)}
    weights = Weights(parts, {"a": (2, 3), "b": (1, 3)})
    joined = weights.take_joined(["a", "b"])
    assert joined.dtype == torch.float32
    assert joined.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]


def test_pieces_keep_their_order_and_threads_are_given_back():
    before = torch.get_num_threads()
    assert make_pieces([lambda n=n: n * n for n in range(20)]) == [n * n for n in range(20)]
    assert torch.get_num_threads() == before


def test_pieces_compute_on_one_thread_each():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert make_pieces([torch.get_num_threads] * 4) == [1] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_failing_piece_ends_the_load():
    before = torch.get_num_threads()

    def fail():
        raise ModelError("tensor x is torn")

    with pytest.raises(ModelError, match="torn"):
        make_pieces([lambda: 1, fail, *[lambda: 2] * 50])
    assert torch.get_num_threads() == before


def test_a_failing_report_ends_the_load():
    made = []

    def fail():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        make_pieces([lambda n=n: made.append(n) for n in range(500)], fail)
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("weights")]


def test_weight_bytes():
    """Tied: one table in fp32; float16 rows and a packed head in fp16."""
    expected = expected_tensors(spec())
    values = sum(math.prod(shape) for shape in expected.values())
    model = Llama(spec(), tensors(spec()), "fp32")
    assert model.num_parameters == values
    assert model.weight_bytes == values * 4
    packed = Llama(spec(), tensors(spec()), "fp16")
    rows = 96 + 2 * (64 + 32 + 96 + 32)  # of head, qkv, output, gate_up, down; 512 columns each
    assert packed.weight_bytes == rows * 512 * 2 + 96 * 32 * 2 + 5 * 32 * 4
