"""Small checkpoints made by hand, so that each fault can be put in on purpose."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trioserve.models.llama_tensors import expected_tensors
from trioserve.models.random_model import make_tokenizer
from trioserve.models.spec import ModelSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
SPEC = ModelSpec(
    architecture="llama",
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=12,
    vocab_size=512,
    max_position=64,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    eos_token_ids=(2,),
    bos_token_id=0,
)


def safetensors_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F16") -> bytes:
    """A whole file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * 2
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return raw_safetensors(header, end)


def raw_safetensors(header: Any, num_bytes: int) -> bytes:
    """A file of this header and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


@pytest.fixture
def tensors() -> dict[str, tuple[int, ...]]:
    """Name → shape of a sound checkpoint, to be spoilt and written."""
    return expected_tensors(SPEC)


@pytest.fixture
def safetensors() -> Callable[..., bytes]:
    return safetensors_bytes


@pytest.fixture
def raw() -> Callable[[Any, int], bytes]:
    return raw_safetensors


@pytest.fixture
def spec() -> ModelSpec:
    return SPEC


@pytest.fixture
def config_values() -> dict[str, Any]:
    return dict(CONFIG)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sound directory: config, weights in one file, tokenizer, settings with a template."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(expected_tensors(SPEC)))
    (directory / "tokenizer.json").write_text(json.dumps(make_tokenizer(512)))
    settings = {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": "{{ messages }}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
