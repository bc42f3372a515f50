"""Where compiled kernels are kept from one start to the next.

A file holds one kernel's machine code and is named after what the code was made from: a digest of
the kernels' sources, the compiler, the processor that it is for and the options. Nothing in it
depends on where the sources lie or when they were written, so another checkout, an installation
anew or an image that was built elsewhere finds it, and machines of several kinds share a directory.
Files are replaced atomically and checked when they are read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger("trioserve.kernels")

MAGIC = b"trioserve kernel 1\n"
SUFFIX = ".kernel"
KEPT_FILES = 96
"""A server needs five; those of some versions, processors and options stay, last used first."""
KEPT_BYTES = 64 << 20
STALE_S = 3600.0  # what a process that was killed left half-written
WAIT_S = 180.0
"""Longer than compiling has taken anywhere: who holds the lock then is stopped, not slow."""
POLL_S = 0.05


def cache_directory() -> Path | None:
    """The directory, made if need be; one that cannot be written is still read.

    None, and a line in the log, where there is none and none can be made.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(root) / "trioserve" / "kernels"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
        return None
    return path


def file_of(directory: Path, name: str, digest: str) -> Path:
    """Where the kernel ``name`` with that digest is or would be."""
    return directory / f"{name}-{digest}{SUFFIX}"


def load(path: Path) -> bytes | None:
    """The code; None where there is none, and with a line in the log where it is not whole."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("compiled kernel cannot be read, it is compiled anew: %s", error)
        return None
    code = content[len(MAGIC) + 32 :]
    if content[: len(MAGIC) + 32] != MAGIC + hashlib.sha256(code).digest():
        log.warning("compiled kernel %s is damaged, it is compiled anew", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return code


def store(path: Path, code: bytes) -> None:
    """Keep the code, and of all others those used last; a line in the log where that fails."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            try:
                file.write(MAGIC + hashlib.sha256(code).digest() + code)
                file.flush()
                os.chmod(file.name, 0o644)  # what is in it is no secret, and a home may be shared
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
        return
    _remove_oldest(path.parent)


@contextlib.contextmanager
def turn(
    directory: Path, waiting: Callable[[], None] = lambda: None, wait_s: float = WAIT_S
) -> Iterator[None]:
    """One process at a time compiles what goes to ``directory``; the others wait for it.

    The system gives the lock back when its owner ends, however it ends. Without it go on: where the
    directory cannot be written, where the file system has no locks, and after ``wait_s`` seconds,
    for what two processes compile at once is only compiled twice.

    Args:
        waiting: called now and then while another has the lock.
    """
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + wait_s
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                log.warning("another process has compiled kernels for %.0f s; not waiting", wait_s)
                break
            waiting()
            time.sleep(POLL_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    """Whether there is nothing to wait for."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True


def _remove_oldest(directory: Path) -> None:
    """A server that uses one of them has it in its memory; at worst another compiles it anew."""
    kept = 0
    now = time.time()
    try:
        entries = [(path.stat(), path) for path in directory.iterdir() if path.is_file()]
    except OSError:
        return
    entries.sort(key=lambda entry: entry[0].st_mtime, reverse=True)
    kernels = [entry for entry in entries if entry[1].suffix == SUFFIX]
    stale = [path for stat, path in entries if path.name.startswith(".new-")
             and now - stat.st_mtime > STALE_S]  # fmt: skip
    for number, (stat, path) in enumerate(kernels):
        kept += stat.st_size
        if number >= KEPT_FILES or kept > KEPT_BYTES:
            stale.append(path)
    for path in stale:
        with contextlib.suppress(OSError):
            path.unlink()
