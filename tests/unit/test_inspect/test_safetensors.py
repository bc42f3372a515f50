"""Headers of safetensors files: what is damaged is said, with numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from trioserve.errors import ModelError
from trioserve.models.safetensors_header import read_checkpoint, read_file

Shapes = dict[str, tuple[int, ...]]


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_the_library_writes(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "m.safetensors"
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(4, dtype=np.float16),
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 3), dtype=np.uint8),
    }
    save_file(arrays, path, metadata={"format": "pt"})
    tensors = {tensor.name: tensor for tensor in read_file(path)}
    assert tensors.keys() == arrays.keys()
    raw = path.read_bytes()
    for name, array in arrays.items():
        tensor = tensors[name]
        assert tensor.shape == array.shape
        assert raw[tensor.offset : tensor.offset + tensor.num_bytes] == array.tobytes()
    assert [tensors[name].dtype for name in arrays] == ["F32", "F16", "I64", "U8"]


@pytest.mark.parametrize(
    ("header", "num_bytes", "words"),
    [
        (b"{", 0, "header is not valid JSON"),
        (b'"text"', 0, "header is not a JSON object"),
        (b'{"a": 1, "a": 2}', 0, "a name appears twice"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "tensor a has a malformed header entry"),
        ({"a": entry("F32", [-1], 0, 4)}, 4, "tensor a has a malformed header entry"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "tensor a has a malformed header entry"),
        ({"a": entry("F32", [1], 4, 0)}, 4, "tensor a has a malformed header entry"),
        ({"a": "text"}, 4, "tensor a has a malformed header entry"),
        ({"a": entry("X9", [1], 0, 4)}, 4, "tensor a has unknown dtype X9"),
        ({"a": entry("F32", [2], 0, 4)}, 4, "needs 8 bytes, its range has 4"),
        ({"a": entry("F32", [2], 0, 8)}, 5, r"is truncated: \d+ bytes, its tensors end at \d+"),
        ({"a": entry("F32", [2], 0, 8)}, 9, "has 1 bytes after its last tensor"),
        ({"a": entry("F32", [2], 4, 12)}, 12, "tensor a leaves a hole before it"),
        (
            {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)},
            12,
            "tensor b overlaps the one before",
        ),
    ],
)
def test_damaged_headers(
    tmp_path: Path, raw: Callable[[Any, int], bytes], header: Any, num_bytes: int, words: str
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw(header, num_bytes))
    with pytest.raises(ModelError, match=words) as caught:
        read_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated: 0 bytes"),
        (b"1234567", "truncated: 7 bytes"),
        (struct.pack("<Q", 50) + b"{}", "truncated: 10 bytes, its header alone needs 58"),
        (struct.pack("<Q", 1 << 62), "header of 4611686018427387904 bytes, at most 100000000"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run `git lfs pull`"),
    ],
)
def test_files_without_a_header(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        read_file(path)


def test_a_directory_where_a_file_should_be(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"^cannot read .*model\.safetensors: is a directory$"):
        read_checkpoint(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path, tensors: Shapes, safetensors: Callable[..., bytes]) -> Path:
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:9], names[9:]), 1):
        shard = f"model-{number:05}-of-00003.safetensors"
        (tmp_path / shard).write_bytes(safetensors({name: tensors[name] for name in part}))
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_shards(sharded: Path, tensors: Shapes) -> None:
    found = read_checkpoint(sharded)
    assert {tensor.name: tensor.shape for tensor in found} == tensors
    assert len({tensor.path for tensor in found}) == 3


def test_missing_shards_are_listed(sharded: Path) -> None:
    (sharded / "model-00001-of-00003.safetensors").unlink()
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"^2 of 3 shards missing .*00001-of-.*00003-of-00003"):
        read_checkpoint(sharded)


def test_a_truncated_shard(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(
        ModelError, match=f"00002.* is truncated: {size - 3} bytes, .*end at {size}"
    ):
        read_checkpoint(sharded)


@pytest.mark.parametrize("name", ["ghost.weight", "model.embed_tokens.weight"])
def test_a_tensor_that_is_not_in_its_shard(sharded: Path, name: str) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = "model-00002-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"not in their shard: {name} \(model-00002"):
        read_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../up.safetensors"}])
def test_a_malformed_index(tmp_path: Path, weight_map: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="weight_map must map tensor names to file names"):
        read_checkpoint(tmp_path)


def test_one_tensor_in_two_files(tmp_path: Path, safetensors: Callable[..., bytes]) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors({"a": (1,)}))
    with pytest.raises(ModelError, match="tensor a is in two files"):
        read_checkpoint(tmp_path)


def test_safetensors_win_over_pickles(tmp_path: Path, safetensors: Callable[..., bytes]) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": (1,)}))
    assert [tensor.name for tensor in read_checkpoint(tmp_path)] == ["a"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(
        ModelError, match=f"{name}: pickle checkpoints are refused.*save_pretrained"
    ):
        read_checkpoint(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^no weights in .*: expected \*\.safetensors$"):
        read_checkpoint(tmp_path)
