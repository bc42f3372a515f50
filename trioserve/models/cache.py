"""Files that are made or fetched once per machine, shared by all servers on it.

A cached file counts only with its seal beside it: ``name.seal``, a JSON object of the file's
SHA-256, size and modification time. The seal is written last-but-one and the file renamed into
place last, so a crash at any point leaves a file that does not count, never a wrong one that does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import trio

from trioserve.errors import ModelError

POLL_S = 0.1
CHUNK_BYTES = 1 << 20


def cache_root(cache_dir: str | None = None) -> Path:
    """``cache_dir``, else ``$XDG_CACHE_HOME/trioserve``, else ``~/.cache/trioserve``."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path there is to be ignored.
    base = Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()
    return base / "trioserve"


def write_error(root: Path, error: OSError) -> ModelError:
    """The one line for a cache that cannot be written."""
    reason = error.strerror or str(error)
    return ModelError(f"cannot write the cache {root}: {reason}; set model.cache_dir")


@contextlib.asynccontextmanager
async def locked(target: Path, waiting: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    """Hold the lock of ``target`` against other processes and other tasks.

    ``waiting`` is called once if somebody else holds it. Cancellation while waiting takes nothing;
    the lock of a process that dies is free at once. The lock file stays: removing it would let two
    holders lock two different files of one name.

    Raises:
        OSError: the cache cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        told = False
        while not _try_lock(fd):
            if not told:
                waiting()
                told = True
            await trio.sleep(POLL_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def seal_path(path: Path) -> Path:
    """Where the seal of ``path`` lies."""
    return path.with_name(path.name + ".seal")


def publish(temporary: Path, path: Path, sha256: str | None = None) -> None:
    """Seal ``temporary`` and rename it to ``path``; both lie on the same file system.

    ``sha256`` is the digest where the writer knows it already. Blocking.
    """
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    stat = temporary.stat()
    digest = sha256 or file_digest(temporary)
    _write_seal(path, digest, stat)
    temporary.replace(path)


def is_intact(path: Path) -> bool:
    """Whether ``path`` is what was published there. Blocking; reads all of it only when in doubt.

    Equal size and modification time are believed. A file whose time alone differs (copied, or
    touched by a backup) is hashed once and sealed anew.
    """
    try:
        stat = path.stat()
        seal = json.loads(seal_path(path).read_text())
        if seal["size"] != stat.st_size:
            return False
        if seal["mtime_ns"] == stat.st_mtime_ns:
            return True
        if seal["sha256"] != file_digest(path):
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    with contextlib.suppress(OSError):  # a read-only cache is hashed again each time
        _write_seal(path, seal["sha256"], stat)
    return True


def _write_seal(path: Path, sha256: str, stat: os.stat_result) -> None:
    seal = {"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    temporary = path.with_name(f".{path.name}.seal.{os.getpid()}")
    temporary.write_text(json.dumps(seal) + "\n")
    temporary.replace(seal_path(path))


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal text. Blocking."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
