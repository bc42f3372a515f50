"""Checkpoint directories: what is sound is taken, what is not is said before memory is taken."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trioserve.config.schema import ModelConfig
from trioserve.errors import ModelError
from trioserve.models.inspect import inspect
from trioserve.models.random_model import make_tokenizer
from trioserve.models.spec import ModelSpec, ResolvedModel

Shapes = dict[str, tuple[int, ...]]


def look(path: Path, **settings: Any) -> ResolvedModel:
    return inspect(path, ModelConfig(source=str(path), **settings))


def change(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None takes one away."""
    values = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))


def test_a_sound_directory(checkpoint: Path, spec: ModelSpec, tensors: Shapes) -> None:
    model = look(checkpoint)
    assert model.spec == spec
    assert (model.name, model.source, model.format) == ("tiny", str(checkpoint), "safetensors")
    assert {tensor.name: tensor.shape for tensor in model.tensors} == tensors
    assert model.weight_bytes == sum(tensor.num_bytes for tensor in model.tensors)
    assert model.tokenizer_path == str(checkpoint / "tokenizer.json")
    assert (model.bos_token, model.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert model.chat_template == "{{ messages }}"
    assert model.warnings == ()


def test_one_safetensors_file(checkpoint: Path, spec: ModelSpec) -> None:
    assert look(checkpoint / "model.safetensors").spec == spec


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelError, match=rf"^no config\.json in {checkpoint}: "):
        look(checkpoint)


def test_a_directory_of_pickles(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ModelError, match="pickle checkpoints are refused"):
        look(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", '{\n  "a": 1,\n}', r"not valid JSON: .* at line \d, column \d"),
        ("config.json", "[1]", "expected a JSON object, found list"),
        ("config.json", "version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
        ("config.json", "[" * 100_000, "nested too deeply|not valid JSON"),
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer.json", "{}", r"is no tokenizer\.json of the tokenizers library"),
        ("tokenizer.json", '{"model": {"vocab": 3}}', r"is no tokenizer\.json"),
        ("tokenizer_config.json", "x", "not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is neither"),
        ("generation_config.json", "x", "not valid JSON"),
        ("generation_config.json", '{"eos_token_id": "x"}', r"generation_config\.json: eos_token"),
    ],
)
def test_damaged_small_files(checkpoint: Path, name: str, content: str, words: str) -> None:
    (checkpoint / name).write_text(content)
    with pytest.raises(ModelError, match=words) as caught:
        look(checkpoint)
    assert str(checkpoint / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_text(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_bytes(b"{\xff}")
    with pytest.raises(ModelError, match=r"config\.json is not UTF-8 text \(byte 1\)"):
        look(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_an_unreadable_file(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    with pytest.raises(ModelError, match=f"^cannot read {checkpoint / name}: is a directory$"):
        look(checkpoint)


def test_a_file_without_permission(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        if self.name == "config.json":
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(ModelError, match=r"^cannot read .*config\.json: permission denied$"):
        look(checkpoint)


def test_no_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    words = r"^no tokenizer in .*: expected tokenizer\.json or tokenizer\.model; or set model\."
    with pytest.raises(ModelError, match=words):
        look(checkpoint)
    (checkpoint / "vocab.json").write_text("{}")
    with pytest.raises(ModelError, match="make one with transformers"):
        look(checkpoint)


def test_more_token_ids_than_embeddings(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text(json.dumps(make_tokenizer(513)))
    with pytest.raises(ModelError, match="token ids up to 512, the model has 512 embeddings"):
        look(checkpoint)


def test_overrides(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer, template = tmp_path / "t.json", tmp_path / "t.jinja"
    tokenizer.write_text(json.dumps(make_tokenizer(400)))
    template.write_text("other")
    model = look(checkpoint, tokenizer=str(tokenizer), chat_template=str(template))
    assert model.tokenizer_path == str(tokenizer)
    assert model.chat_template == "other"
    with pytest.raises(ModelError, match=r"no such file: /no/t \(model\.tokenizer\)"):
        look(checkpoint, tokenizer="/no/t")
    with pytest.raises(ModelError, match=r"no such file: /no/t \(model\.chat_template\)"):
        look(checkpoint, chat_template="/no/t")


def test_places_of_the_template(checkpoint: Path) -> None:
    settings = checkpoint / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(settings, chat_template=named)
    assert look(checkpoint).chat_template == "D"
    change(settings, chat_template=named[:1])
    assert look(checkpoint).chat_template == "T"
    (checkpoint / "chat_template.json").write_text('{"chat_template": "J"}')
    assert look(checkpoint).chat_template == "J"
    (checkpoint / "chat_template.jinja").write_text("N")
    assert look(checkpoint).chat_template == "N"


def test_a_base_model_has_no_template(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").unlink()
    model = look(checkpoint)
    assert model.chat_template is None
    # Without settings the token texts are found by their ids.
    assert (model.bos_token, model.eos_token) == ("<|endoftext|>", "<|im_end|>")


def test_the_tokenizers_end_token_stops_too(checkpoint: Path) -> None:
    change(checkpoint / "config.json", eos_token_id=0)
    assert look(checkpoint).spec.eos_token_ids == (0, 2)


def test_remote_code_is_noted_and_not_run(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(checkpoint / "config.json", auto_map={"AutoModel": "evil.Model"})
    (checkpoint / "evil.py").write_text("raise SystemExit")
    with caplog.at_level(logging.INFO):
        assert look(checkpoint).spec.architecture == "llama"
    assert "remote code" in caplog.text


def write(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)


def test_st_06_missing_tensors(
    checkpoint: Path, tensors: Shapes, safetensors: Callable[..., bytes]
) -> None:
    del tensors["model.layers.1.input_layernorm.weight"]
    write(checkpoint, safetensors(tensors))
    words = r"1 of 20 tensors missing: model\.layers\.1\.input_layernorm\.weight$"
    with pytest.raises(ModelError, match=words):
        look(checkpoint)
    gone = {name: shape for name, shape in tensors.items() if ".mlp." not in name}
    write(checkpoint, safetensors(gone))
    with pytest.raises(ModelError, match=r"7 of 20 tensors missing: .* and 2 more$"):
        look(checkpoint)


def test_a_wrong_shape(
    checkpoint: Path, tensors: Shapes, safetensors: Callable[..., bytes]
) -> None:
    tensors["model.layers.0.self_attn.k_proj.weight"] = (8, 8)
    write(checkpoint, safetensors(tensors))
    words = r"1 of 20 tensors of wrong shape: .*k_proj\.weight is \[8, 8\], expected \[4, 8\]"
    with pytest.raises(ModelError, match=words):
        look(checkpoint)


def test_unknown_tensors_are_a_warning(
    checkpoint: Path,
    tensors: Shapes,
    safetensors: Callable[..., bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(checkpoint, safetensors(tensors | {"model.extra.weight": (3,)}))
    model = look(checkpoint)
    (warning,) = model.warnings
    assert warning.endswith("1 tensors unknown, ignored: model.extra.weight")
    assert warning in caplog.text
    assert "model.extra.weight" not in {tensor.name for tensor in model.tensors}


def test_st_06_rotary_tables_and_a_stored_tied_head_are_passed_over(
    checkpoint: Path, tensors: Shapes, safetensors: Callable[..., bytes]
) -> None:
    more = {"lm_head.weight": (512, 8), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    write(checkpoint, safetensors(tensors | more))
    model = look(checkpoint)
    assert model.warnings == ()
    assert len(model.tensors) == len(tensors)


def test_an_untied_head_is_needed(
    checkpoint: Path, tensors: Shapes, safetensors: Callable[..., bytes]
) -> None:
    change(checkpoint / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"tensors missing: lm_head\.weight$"):
        look(checkpoint)
    write(checkpoint, safetensors(tensors | {"lm_head.weight": (512, 8)}))
    assert look(checkpoint).tensors[-1].name == "lm_head.weight"


def test_biases(checkpoint: Path) -> None:
    change(checkpoint / "config.json", attention_bias=True, mlp_bias=True)
    with pytest.raises(ModelError, match=r"14 of 34 tensors missing: .*q_proj\.bias"):
        look(checkpoint)


def test_a_dtype_that_cannot_be_loaded(
    checkpoint: Path, tensors: Shapes, safetensors: Callable[..., bytes]
) -> None:
    write(checkpoint, safetensors(tensors, "I16"))
    with pytest.raises(ModelError, match="has dtype I16, unsupported; supported: F32, F16, BF16"):
        look(checkpoint)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, trioserve.models.resolve; "
        "heavy = {'torch', 'numpy', 'transformers', 'gguf', 'huggingface_hub', 'tokenizers', "
        "'safetensors', 'jinja2'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
