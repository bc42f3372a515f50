"""The cache: a file counts only with a seal that fits it, and one process writes at a time."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from trioserve.models import cache


@pytest.fixture
def published(tmp_path: Path) -> Path:
    temporary = tmp_path / "new"
    temporary.write_bytes(b"weights")
    cache.publish(temporary, tmp_path / "file")
    return tmp_path / "file"


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/x")
    assert cache.cache_root("/given") == Path("/given")
    assert cache.cache_root() == Path("/var/cache/x/trioserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_root() == Path("/home/someone/.cache/trioserve")
    assert cache.cache_root("~/c") == Path("/home/someone/c")


def test_published_file_is_intact(published: Path) -> None:
    assert cache.is_intact(published)
    assert published.read_bytes() == b"weights"
    assert sorted(p.name for p in published.parent.iterdir()) == ["file", "file.seal"]


def test_no_file_and_no_seal_do_not_count(published: Path) -> None:
    assert not cache.is_intact(published.with_name("other"))
    cache.seal_path(published).unlink()
    assert not cache.is_intact(published)


@pytest.mark.parametrize("seal", ["", "{", "[]", '{"size": 7}'])
def test_a_broken_seal_does_not_count(published: Path, seal: str) -> None:
    cache.seal_path(published).write_text(seal)
    assert not cache.is_intact(published)


def test_a_truncated_file_does_not_count(published: Path) -> None:
    written = published.stat().st_mtime_ns
    published.write_bytes(b"weight")
    os.utime(published, ns=(written, written))
    assert not cache.is_intact(published)


def test_other_content_of_the_same_size_does_not_count(published: Path) -> None:
    published.write_bytes(b"WEIGHTS")
    os.utime(published, ns=(1, 1))
    assert not cache.is_intact(published)


def test_a_touched_file_is_hashed_once_and_sealed_anew(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(published, ns=(5, 5))
    assert cache.is_intact(published)
    assert json.loads(cache.seal_path(published).read_text())["mtime_ns"] == 5

    def refuse(path: Path) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(cache, "file_digest", refuse)
    assert cache.is_intact(published)


async def test_the_lock_waits_for_another_process_without_blocking(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    # flock counts per open file, so one opened here stands for another process.
    target = tmp_path / "deep" / "file"
    target.parent.mkdir()
    fd = os.open(tmp_path / "deep" / ".file.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    told: list[str] = []
    entered = trio.Event()

    async def take() -> None:
        async with cache.locked(target, lambda: told.append("waiting")):
            entered.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.sleep(3)
        assert not entered.is_set()
        os.close(fd)
        await entered.wait()
    assert told == ["waiting"]


async def test_cancelled_while_waiting_takes_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    target = tmp_path / "file"
    async with cache.locked(target):
        with trio.move_on_after(1) as scope:
            async with cache.locked(target):
                raise AssertionError("two holders")
        assert scope.cancelled_caught
    async with cache.locked(target, lambda: pytest.fail("the lock was not given back")):
        pass
