"""Compiled kernels on disk: another processor, a home that cannot be written, old versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trioserve.kernels import cache

from .test_runtime import START


def start(tmp_path: Path, **environment: str) -> tuple[str, str]:
    """A process that compiles or loads one kernel: what it prints, and its log."""
    script = tmp_path / "start.py"
    if not script.exists():
        script.write_text("import logging; logging.basicConfig()\n" + START)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environment},
        input="go\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout, done.stderr


COMPILED, LOADED = "ready\n1 1 0 7\n", "ready\n1 0 1 7\n"


def test_another_processor_has_kernels_of_its_own_in_the_same_directory(tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    other = {**home, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert start(tmp_path, **home)[0] == COMPILED
    assert start(tmp_path, **other)[0] == COMPILED
    assert start(tmp_path, **home)[0] == LOADED
    assert start(tmp_path, **other)[0] == LOADED


def test_kernels_in_a_home_that_is_read_only_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who runs the tests may be root, for whom nothing is read only: so writing is refused here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache.cache_directory("a compiler")
    assert path is not None
    (path / "package").mkdir()
    (path / "package/kernel.nbi").write_bytes(b"index")
    refuse_in(monkeypatch, tmp_path)
    copy = cache.cache_directory("a compiler")
    assert copy is not None
    assert not copy.is_relative_to(tmp_path)
    assert (copy / "package/kernel.nbi").read_bytes() == b"index"
    assert not caplog.messages


def test_an_empty_home_that_is_read_only_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_directory("a compiler") is not None
    refuse_in(monkeypatch, tmp_path)
    assert cache.cache_directory("a compiler") is None
    [line] = caplog.messages
    assert "compiled kernels are not kept" in line


def refuse_in(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    write = cache.tempfile.TemporaryFile

    def refuse(*args: object, **kwargs: object) -> object:
        if str(kwargs.get("dir", "")).startswith(str(root)):
            raise PermissionError(13, "Permission denied")
        return write(*args, **kwargs)

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", refuse)


def test_versions_used_long_ago_are_removed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = []
    for number in range(cache.KEPT):
        path = cache.cache_directory(f"compiler {number}")
        assert path is not None
        os.utime(path, (1e9 + number, 1e9 + number))
        paths.append(path)
    strange = paths[0].parent / "notes"
    strange.mkdir()
    assert cache.cache_directory("compiler 0") == paths[0]  # used again: not the oldest any more
    added = cache.cache_directory("another compiler")
    assert added is not None
    left = {path for path in [*paths, added, strange] if path.exists()}
    assert left == {*paths, added, strange} - {paths[1]}


def test_the_directory_is_another_when_a_kernel_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = cache.cache_directory("a compiler")
    sources = tmp_path / "kernels"
    (sources / "cpu").mkdir(parents=True)
    (sources / "cpu/other.py").write_text("")
    monkeypatch.setattr(cache, "__file__", str(sources / "cache.py"))
    assert cache.cache_directory("a compiler") != before
