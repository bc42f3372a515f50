"""``[model] source``: what is a path, what is not, and what is said of a wrong one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trioserve.config.schema import DEFAULT_SOURCE
from trioserve.errors import ModelError
from trioserve.models.source import (
    HfSource,
    PathSource,
    RandomSource,
    WheelSource,
    check_path,
    fetch,
    parse_source,
)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **keywords: object) -> None:
        raise AssertionError("a path led to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("trio.run_process", refuse)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/models/x", PathSource("/models/x")),
        ("./x", PathSource("./x")),
        ("~/x", PathSource("~/x")),
        ("org/name", PathSource("org/name")),
        ("hff:org/name", PathSource("hff:org/name")),
        ("./hf:org/name", PathSource("./hf:org/name")),
        ("hf:org/na.me-1", HfSource("org/na.me-1", None)),
        ("hf:org/name@v1.0", HfSource("org/name", "v1.0")),
        ("hf:org/name@refs/pr/3", HfSource("org/name", "refs/pr/3")),
        ("wheel:a-b==1.0.post1#d/f.gguf", WheelSource("a-b", "1.0.post1", "d/f.gguf")),
        ("random:llama", RandomSource("llama", "")),
        ("random:llama?seed=3", RandomSource("llama", "seed=3")),
    ],
)
def test_kinds_of_source(text: str, expected: object) -> None:
    assert parse_source(text) == expected


def test_the_default_source_is_a_wheel() -> None:
    source = parse_source(DEFAULT_SOURCE)
    assert isinstance(source, WheelSource)
    assert source.name == "SmolLM2-135M-Instruct.Q4_1"


def test_a_file_that_exists_is_a_path_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:org").mkdir()
    (tmp_path / "hf:org" / "name").mkdir()
    assert parse_source("hf:org/name") == PathSource("hf:org/name")


def test_names() -> None:
    assert parse_source("/models/Tiny.gguf").name == "Tiny"
    assert parse_source("/models/tiny/").name == "tiny"
    assert parse_source("hf:org/name@main").name == "org/name"
    assert parse_source("random:llama").name == "random-llama"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("  ", "empty"),
        ("hf:name", "organisation/name"),
        ("hf:org/name@", "organisation/name"),
        ("wheel:dist#x", "distribution==version"),
        ("wheel:dist==1", "distribution==version"),
        ("wheel:dist==1#../../etc/passwd", "no path inside a wheel"),
        ("wheel:dist==1#/etc/passwd", "no path inside a wheel"),
        ("random:mamba", "architecture mamba unsupported, supported: llama"),
    ],
)
def test_wrong_forms_are_refused(text: str, word: str) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        parse_source(text)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/no/such/model", "^no such directory: /no/such/model$"),
        ("org/name", "for a repository of the hub write hf:org/name"),
        ("HF:org/name", r"did you mean hf:org/name\?"),
        ("hug:org/name", "known prefixes are hf:, wheel:, random:"),
    ],
)
async def test_a_path_that_is_not_there(text: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        await fetch(parse_source(text), cache_dir=None, hf_token=None, progress=lambda *_: None)


@pytest.mark.usefixtures("no_network")
async def test_a_path_is_only_looked_at(checkpoint: Path) -> None:
    found = await fetch(
        parse_source(str(checkpoint)), cache_dir=None, hf_token=None, progress=lambda *_: None
    )
    assert found == checkpoint


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"^{tmp_path} is empty"):
        check_path(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("notes.txt", b"hello", "neither GGUF nor safetensors"),
        ("empty", b"", "is empty"),
        ("pytorch_model.bin", b"PK\x03\x04", "pickle checkpoints are refused.*convert"),
        ("m.gguf", b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=words):
        check_path(str(tmp_path / name))


def test_a_directory_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ModelError, match=f"^cannot read {tmp_path}: permission denied$"):
        check_path(str(tmp_path))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"^cannot read .*m\.gguf: permission denied$"):
        check_path(str(tmp_path / "m.gguf"))
