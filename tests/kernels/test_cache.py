"""Compiled kernels on disk: what they are found by, damage, locks, and what is removed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trioserve.kernels import cache
from trioserve.kernels.cpu import compiler

from .test_runtime import START

COMPILED, LOADED = "ready\n1 1 0 7\n", "ready\n1 0 1 7\n"


def start(directory: Path, **environment: str) -> tuple[str, str]:
    """A process that compiles or loads one kernel: what it prints, and its log."""
    script = directory / "start.py"
    if not script.exists():
        script.write_text("import logging; logging.basicConfig()\n" + START)
    done = subprocess.run(
        [sys.executable, "-P", str(script)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(directory), **environment},
        input="go\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout, done.stderr


def test_another_processor_has_kernels_of_its_own_in_the_same_directory(tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    other = {**home, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert start(tmp_path, **home)[0] == COMPILED
    assert start(tmp_path, **other)[0] == COMPILED
    assert start(tmp_path, **home)[0] == LOADED
    assert start(tmp_path, **other)[0] == LOADED


def test_another_checkout_finds_the_same_kernels(tmp_path: Path) -> None:
    """Neither the place of the sources nor their time matters, but every byte of them does."""
    root = Path(cache.__file__).resolve().parent.parent
    homes = []
    for name in ("first", "second"):
        home = tmp_path / name
        shutil.copytree(root / "trioserve", home / "trioserve", symlinks=True)
        shutil.copytree(root / "kernels", home / "kernels", copy_function=shutil.copyfile)
        homes.append({"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(home)})
    assert start(tmp_path / "first", **homes[0])[0] == COMPILED
    assert start(tmp_path / "second", **homes[1])[0] == LOADED
    with (tmp_path / "second/kernels/cpu/simd.py").open("a") as source:
        source.write("# another\n")
    assert start(tmp_path / "second", **homes[1])[0] == COMPILED


def kernel(params):
    pass


def test_parameters_are_part_of_what_a_kernel_is_made_from() -> None:
    class Params(ctypes.Structure):
        _fields_ = [("out", ctypes.c_int64)]

    class Others(ctypes.Structure):
        _fields_ = [("out", ctypes.c_int64), ("more", ctypes.c_int64)]

    digests = {compiler.digest(kernel, params) for params in (Params, Params, Others)}
    assert len(digests) == 2


def test_a_kernel_whose_source_is_not_known_is_not_kept() -> None:
    scope: dict = {}
    exec("def nowhere(params):\n    pass", scope)
    assert compiler.digest(scope["nowhere"], ctypes.Structure) is None


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache.cache_directory()
    assert path is not None
    return path


def test_what_is_stored_is_loaded(directory: Path) -> None:
    path = cache.file_of(directory, "name", "digest")
    assert cache.load(path) is None
    cache.store(path, b"code")
    assert cache.load(path) == b"code"
    cache.store(path, b"other")
    assert cache.load(path) == b"other"
    assert [entry.name for entry in directory.iterdir()] == ["name-digest.kernel"]


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "longer", "foreign"])
def test_a_damaged_file_is_one_line_and_none(
    directory: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.file_of(directory, "name", "digest")
    cache.store(path, b"machine code")
    whole = path.read_bytes()
    path.write_bytes({
        "cut": whole[:-1],
        "empty": b"",
        "changed": whole[:-1] + b"!",
        "longer": whole + b"!",
        "foreign": b"something else that is long enough to have all the parts of a kernel's file",
    }[damage])  # fmt: skip
    assert cache.load(path) is None
    [line] = caplog.messages
    assert "damaged, it is compiled anew" in line


def test_a_file_that_cannot_be_read_is_one_line_and_none(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.file_of(directory, "name", "digest")
    path.mkdir()
    assert cache.load(path) is None
    [line] = caplog.messages
    assert "cannot be read" in line


def test_a_directory_that_is_read_only_is_read(
    monkeypatch: pytest.MonkeyPatch, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who runs the tests may be root, for whom nothing is read only: so it is refused here."""
    path = cache.file_of(directory, "name", "digest")
    cache.store(path, b"code")

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(30, "Read-only file system")

    for name in ("open", "utime"):
        monkeypatch.setattr(cache.os, name, refuse)
    monkeypatch.setattr(cache.tempfile, "NamedTemporaryFile", refuse)
    assert cache.load(path) == b"code"
    with cache.turn(directory):
        pass
    assert not caplog.messages
    cache.store(cache.file_of(directory, "other", "digest"), b"code")
    [line] = caplog.messages
    assert "compiled kernels are not kept" in line


def test_no_directory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.cache_directory() is None
    [line] = caplog.messages
    assert "compiled kernels are not kept" in line


def test_what_was_used_long_ago_is_removed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    monkeypatch.setattr(cache, "KEPT_FILES", 4)
    paths = [cache.file_of(directory, str(number), "digest") for number in range(4)]
    for number, path in enumerate(paths):
        cache.store(path, b"code")
        os.utime(path, (1e9 + number, 1e9 + number))
    foreign, half, fresh = (directory / name for name in ("notes", ".new-old", ".new-now"))
    for path in (foreign, half, fresh):
        path.write_text("")
    os.utime(half, (1e9, 1e9))
    os.utime(foreign, (1e9, 1e9))
    cache.load(paths[0])  # used again: not the oldest any more
    added = cache.file_of(directory, "added", "digest")
    cache.store(added, b"code")
    assert set(directory.iterdir()) == {paths[0], *paths[2:], added, foreign, fresh}


def test_all_together_are_bounded_in_size(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(cache, "KEPT_BYTES", 3000)
    for number in range(5):
        path = cache.file_of(directory, str(number), "digest")
        cache.store(path, bytes(900))
        os.utime(path, (1e9 + number, 1e9 + number))
    assert len(list(directory.iterdir())) == 3


HOLDER = """
import sys
from pathlib import Path
from trioserve.kernels import cache
with cache.turn(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_process_waits_for_another_and_one_that_is_killed_blocks_nobody(directory: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting, entered = threading.Event(), threading.Event()

        def enter() -> None:
            with cache.turn(directory, waiting.set):
                entered.set()

        other = threading.Thread(target=enter)
        other.start()
        assert waiting.wait(10)
        assert not entered.is_set()
        holder.kill()
        assert entered.wait(10)
        other.join()


def test_waiting_has_a_bound(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cache.turn(directory), cache.turn(directory, wait_s=0.0):
        [line] = caplog.messages
        assert "not waiting" in line


def test_a_file_system_without_locks_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    with cache.turn(directory):
        pass
