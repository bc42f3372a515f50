"""The three stages together, as the supervisor runs them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from trioserve.config.schema import ModelConfig
from trioserve.errors import ModelError
from trioserve.ipc.messages import Stage
from trioserve.models.resolve import resolve_model
from trioserve.models.spec import ResolvedModel


async def run(**settings: Any) -> tuple[ResolvedModel, list[Stage]]:
    events: list[Stage] = []
    model = await resolve_model(ModelConfig(**settings), report=events.append)
    return model, events


def steps(events: list[Stage]) -> list[tuple[str, str]]:
    return [(event.name, event.state) for event in events if event.state != "progress"]


STAGES = [(name, state) for name in ("resolve", "fetch", "inspect") for state in ("start", "end")]


async def test_a_directory(checkpoint: Path) -> None:
    model, events = await run(source=str(checkpoint))
    assert steps(events) == STAGES
    last = events[-1]
    assert last.detail == "llama, 2 layers, 64 positions, safetensors"
    assert (last.fraction, last.num_bytes) == (1.0, model.weight_bytes)
    assert last.seconds is not None
    assert model.tokenizer_path == str(checkpoint / "tokenizer.json")


async def test_a_random_model(tmp_path: Path) -> None:
    model, events = await run(source="random:llama?num_layers=1", cache_dir=str(tmp_path))
    assert steps(events) == STAGES
    assert model.format == "random"
    assert Tokenizer.from_file(model.tokenizer_path).get_vocab_size() == 512


async def test_the_default_model() -> None:
    await run()  # fills the cache
    began = time.perf_counter()
    model, events = await run()
    assert time.perf_counter() - began < 3.0
    assert steps(events) == STAGES
    assert not [event for event in events if event.state == "progress"]
    tokenizer = Tokenizer.from_file(model.tokenizer_path)
    assert tokenizer.token_to_id(model.bos_token) == model.spec.bos_token_id
    assert tokenizer.token_to_id(model.eos_token) == model.spec.eos_token_ids[0]
    assert model.chat_template is not None


@pytest.mark.parametrize(
    ("spoil", "stage", "words"),
    [
        ("source", "resolve", "expected wheel:distribution"),
        ("path", "fetch", "no such directory"),
        ("config", "inspect", r"no config\.json in"),
        ("pickle", "inspect", "pickle checkpoints are refused"),
        ("pointer", "inspect", "git-lfs pointer"),
        ("architecture", "inspect", "architecture Nope unsupported"),
        ("tokenizer", "inspect", "no tokenizer in"),
    ],
)
async def test_a_fault_names_its_stage(
    checkpoint: Path, spoil: str, stage: str, words: str
) -> None:
    source = str(checkpoint)
    match spoil:
        case "source":
            source = "wheel:x"
        case "path":
            source += "-not"
        case "config":
            (checkpoint / "config.json").unlink()
        case "pickle":
            (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
        case "pointer":
            (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/")
        case "architecture":
            (checkpoint / "config.json").write_text('{"architectures": ["Nope"]}')
        case "tokenizer":
            (checkpoint / "tokenizer.json").unlink()
    events: list[Stage] = []
    began = time.perf_counter()
    with pytest.raises(ModelError, match=words) as caught:
        await resolve_model(ModelConfig(source=source), report=events.append)
    assert time.perf_counter() - began < 2.0
    assert "\n" not in str(caught.value)
    assert (events[-1].name, events[-1].state) == (stage, "start")


async def test_a_sentencepiece_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """Made by the child, then checked against the embedding like any other."""
    (checkpoint / "tokenizer.json").unlink()
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁a", 1), ("a", 1), ("▁", 1)]
    raw = bytearray()
    for text, kind in pieces:
        encoded = text.encode()
        piece = bytes([0x0A, len(encoded)]) + encoded + bytes([0x18, kind])
        raw += bytes([0x0A, len(piece)]) + piece
    (checkpoint / "tokenizer.model").write_bytes(bytes(raw) + bytes([0x12, 2, 0x18, 2]))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": 0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    model, events = await run(source=str(checkpoint), cache_dir=str(tmp_path / "cache"))
    assert "making tokenizer.json from tokenizer.model" in [event.detail for event in events]
    assert Tokenizer.from_file(model.tokenizer_path).encode("a").tokens == ["<s>", "▁a"]
    assert model.spec.eos_token_ids == (0, 2)

    (checkpoint / "added_tokens.json").write_text('{"far": 512}')
    with pytest.raises(ModelError, match="token ids up to 512, the model has 512 embeddings"):
        await run(source=str(checkpoint), cache_dir=str(tmp_path / "cache"))
