"""Llama against transformers, on small random checkpoints that transformers itself saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trioserve.models.registry import load_model
from trioserve.models.safetensors_header import read_checkpoint
from trioserve.models.spec import ResolvedModel
from trioserve.models.spec_from_config import spec_from_config

from .causal import CausalAttention, greedy, logits_of

TOLERANCE = 2e-4
BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
CASES = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "one-kv-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "all-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "wide-head": {"head_dim": 26},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "eps": {"rms_norm_eps": 0.1},
    "one-layer": {"num_hidden_layers": 1},
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, transformers, tmp_path_factory):
    """transformers' model, and ours loaded from what it saved."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = make_reference(transformers, CASES[request.param])
    reference.save_pretrained(directory)
    return reference, load_model(resolved(directory), "fp32")


def make_reference(transformers, changes: dict):
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**(BASE | changes), attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases that do something
            torch.nn.init.normal_(parameter, 0.5 if "bias" not in name else 0.0, 0.3)
    return model


def resolved(directory: Path) -> ResolvedModel:
    path = directory / "config.json"
    spec = spec_from_config(json.loads(path.read_text()), {}, path)
    return ResolvedModel(
        name="random",
        source=str(directory),
        format="safetensors",
        spec=spec,
        tensors=tuple(read_checkpoint(directory)),
        tokenizer_path="",
    )


def reference_logits(model, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def prompt(length: int, seed: int = 0) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, BASE["vocab_size"], (length,), generator=source).tolist()


def test_logits(pair):
    reference, model = pair
    token_ids = prompt(150)
    expected = reference_logits(reference, token_ids)
    assert expected.std() > 0.5  # the comparison is of something
    torch.testing.assert_close(logits_of(model, token_ids), expected, atol=TOLERANCE, rtol=0)


def test_greedy_tokens(pair):
    reference, model = pair
    token_ids = prompt(9, seed=1)
    answer = greedy(model, token_ids, 24)
    for n, token in enumerate(answer):
        logits = reference_logits(reference, token_ids + answer[:n])[-1]
        assert logits.max() - logits[token] < TOLERANCE


def test_chunks_and_single_tokens_give_the_same(pair):
    _, model = pair
    token_ids = prompt(40, seed=2)
    whole = logits_of(model, token_ids)
    for chunk in (1, 7, 32):
        found = logits_of(model, token_ids, chunk)
        torch.testing.assert_close(found, whole, atol=2e-5, rtol=0)


def test_only_the_rows_asked_for(pair):
    _, model = pair
    token_ids = torch.tensor(prompt(20))
    positions = torch.arange(20)
    whole = logits_of(model, token_ids.tolist())
    for rows in ([19], [3, 19], []):
        attention = CausalAttention(model.spec.num_layers)
        found = model.forward(token_ids, positions, attention, None, torch.tensor(rows).long())
        assert found.shape == (len(rows), model.spec.vocab_size)
        torch.testing.assert_close(found, whole[rows], atol=2e-5, rtol=0)
        assert attention.length == 20  # the last layer's cache is written all the same


def test_sharded_checkpoint(transformers, tmp_path):
    reference = make_reference(transformers, {})
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load_model(resolved(tmp_path), "fp32")
    expected = reference_logits(reference, prompt(30))
    torch.testing.assert_close(logits_of(model, prompt(30)), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_are_widened(transformers, tmp_path, dtype):
    make_reference(transformers, {}).to(dtype).save_pretrained(tmp_path)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_model(resolved(tmp_path), "fp32")
    expected = reference_logits(reference, prompt(30))
    torch.testing.assert_close(logits_of(model, prompt(30)), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("changes", [{}, CASES["all-biases"]], ids=["plain", "all-biases"])
def test_packed_float16_weights(transformers, tmp_path, changes):
    """As good as float16 rounding of the weights allows, and no better: they are packed."""
    reference = make_reference(transformers, changes)
    reference.save_pretrained(tmp_path)
    model = load_model(resolved(tmp_path), "fp16")
    assert model.head.layout == model.layers[0].qkv.layout == "fp16"
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.half().float())
    found, expected = logits_of(model, prompt(60)), reference_logits(reference, prompt(60))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_a_matrix_that_overflows_float16(transformers, tmp_path, caplog):
    reference = make_reference(transformers, {})
    with torch.no_grad():
        reference.model.layers[1].mlp.down_proj.weight[2, 3] = 1e5
        reference.model.layers[1].mlp.up_proj.weight.mul_(1e-5)
    reference.save_pretrained(tmp_path)
    model = load_model(resolved(tmp_path), "fp16")
    assert model.layers[1].down.layout == "fp32"
    assert model.layers[0].down.layout == "fp16"
    assert "layers.1.mlp.down_proj" in caplog.text
    expected = reference_logits(reference, prompt(30))
    torch.testing.assert_close(logits_of(model, prompt(30)), expected, atol=0.05, rtol=0)
