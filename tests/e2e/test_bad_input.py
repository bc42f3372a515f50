"""Everything an operator can get wrong: one line with cause and remedy, before a worker exists."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from .server import Server, running, start

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tensors() -> dict[str, torch.Tensor]:
    from trioserve.models.llama_tensors import expected_tensors
    from trioserve.models.spec_from_config import spec_from_config

    spec = spec_from_config(CONFIG, {}, Path("config.json"))
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*shape, generator=generator) * 0.02
        for name, shape in expected_tensors(spec).items()
        if name != "lm_head.weight"
    }


def make_model(directory: Path) -> Path:
    """A tiny model that works; the cases below break it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), directory / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def edit_config(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


def truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pointer(model: Path) -> None:
    (model / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
    )


def pickle_only(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def without_norm(model: Path) -> None:
    kept = {name: tensor for name, tensor in tensors().items() if name != "model.norm.weight"}
    save_file(kept, model / "model.safetensors")


def wrong_shape(model: Path) -> None:
    save_file(tensors() | {"model.norm.weight": torch.zeros(33)}, model / "model.safetensors")


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "config-missing": (lambda m: (m / "config.json").unlink(), "config.json"),
    "config-not-json": (lambda m: (m / "config.json").write_text("{,"), "config.json"),
    "config-empty-object": (lambda m: (m / "config.json").write_text("{}"), "config.json"),
    "architecture": (
        lambda m: edit_config(m, architectures=["MambaForCausalLM"], model_type="mamba"),
        "supported: LlamaForCausalLM",
    ),
    "shard-truncated": (truncate, "model.safetensors"),
    "shard-pointer": (pointer, "lfs"),
    "pickle": (pickle_only, "pickle"),
    "tokenizer-missing": (lambda m: (m / "tokenizer.json").unlink(), "tokenizer"),
    "tokenizer-broken": (lambda m: (m / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    "st-06-tensor-missing": (without_norm, "model.norm.weight"),
    "tensor-shape": (wrong_shape, "model.norm.weight"),
    "template-broken": (
        lambda m: (m / "chat_template.jinja").write_text("{% for %}"),
        "template",
    ),
    "directory-empty": (lambda m: [path.unlink() for path in m.iterdir()], "empty"),
}


def refused(tmp_path: Path, source: str, named: str) -> Server:
    """A server that ended because of its model, with one line that says ``named``."""
    server = start(tmp_path, model={"source": source})
    try:
        assert server.wait(20) == 5, server.log
    finally:
        server.process.kill()
        server.process.wait()
    assert named in server.last_line, server.log
    assert "Traceback" not in server.log
    return server


@pytest.mark.parametrize("case", CASES)
def test_st_04_a_broken_model_is_named_before_a_worker_takes_memory_for_it(
    tmp_path: Path, case: str
) -> None:
    breaks, named = CASES[case]
    model = make_model(tmp_path / "model")
    breaks(model)
    server = refused(tmp_path, str(model), named)
    for stage in ("device", "weights", "profile"):  # those that a worker comes to with a model
        assert f"{stage}: " not in server.log


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("/no/such/directory", "no such"),
        ("./nowhere", "no such"),
        ("{tmp}/model/config.json", "config.json"),
        ("random:mamba", "llama"),
        ("random:llama?num_layer=2", "num_layers"),
        ("wheel:nothing", "wheel:"),
        ("ftp:something", "ftp:something"),
    ],
)
def test_st_04_a_wrong_source_is_named(tmp_path: Path, source: str, named: str) -> None:
    make_model(tmp_path / "model")
    refused(tmp_path, source.replace("{tmp}", str(tmp_path)), named)


def test_the_tiny_model_works_when_nobody_breaks_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "unrelated.bin.txt").write_text("not a checkpoint")
    with running(tmp_path, model={"source": str(model)}) as server:
        answer = server.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 4
        refused = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
        assert refused.status_code == 400
        assert "chat template" in refused.json()["error"]["message"]
        too_long = server.post("/v1/completions", prompt="x" * 200)
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        assert "128" in too_long.json()["error"]["message"]
        assert "200" in too_long.json()["error"]["message"]


def test_st_09_a_cache_too_small_says_what_would_start(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    server = start(
        tmp_path, model={"source": str(model), "max_model_len": 128}, cache={"memory": "10kB"}
    )
    try:
        assert server.wait(60) == 5, server.log
    finally:
        server.process.kill()
        server.process.wait()
    assert "kv-cache" in server.last_line
    assert "128" in server.last_line
    assert "max_model_len" in server.last_line
    assert "Traceback" not in server.log
    server.assert_nothing_left()


def test_the_command_line_speaks_plainly(tmp_path: Path) -> None:
    def trioserve(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trioserve", *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    for arguments, named in (
        (("run", str(tmp_path / "missing.toml")), "missing.toml"),
        (("run", str(tmp_path)), str(tmp_path)),
        (("run", "--set", "scheduler.max_num_sqs=3"), "max_num_seqs"),
        (("run", "--port", "99999"), "port"),
        (("run", "--set", "http.port=abc"), "http.port"),
    ):
        result = trioserve(*arguments)
        assert result.returncode == 2, result.stderr
        assert named in result.stderr
        assert "Traceback" not in result.stderr
