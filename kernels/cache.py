"""Where compiled kernels are kept from one start to the next.

The directory's name holds a digest of all kernel sources and of the compiler, because numba's own
check sees only the file of the outermost function; what numba keeps in it is keyed by processor, so
machines may share a home. Files are replaced atomically, so servers may start at once.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger("trioserve.kernels")

KEPT = 8
"""Directories that are kept, of as many versions: those used last."""


def cache_directory(compiler: str) -> Path | None:
    """The directory of these kernels as ``compiler``, in words, compiles them; made if need be.

    One that cannot be written but holds kernels, as in an image that is read only, is copied to a
    temporary directory, which goes with the process. None, and a line in the log, where there is
    neither.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(root) / "trioserve" / "numba" / _digest(compiler)
    try:
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            os.utime(path)  # used now
    except OSError as error:
        copy = _copy_of(path)
        if copy is None:
            log.warning("compiled kernels are not kept: %s", error)
        return copy
    if is_new:
        _remove_oldest(path.parent)
    return path


def _digest(compiler: str) -> str:
    digest = hashlib.sha256(compiler.encode())
    for source in sorted((Path(__file__).parent / "cpu").glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _copy_of(path: Path) -> Path | None:
    """A copy of a directory of kernels for this process alone; None where it holds none."""
    try:
        if not any(path.rglob("*.nbi")):
            return None
        copy = Path(tempfile.mkdtemp(prefix="trioserve-numba-"))
    except OSError:
        return None
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    try:
        return Path(shutil.copytree(path, copy / "numba"))
    except (OSError, shutil.Error):
        return None


def _remove_oldest(parent: Path) -> None:
    """A server that has one of them open has loaded its kernels; at worst it compiles them anew."""
    try:
        ours = [entry for entry in parent.iterdir() if re.fullmatch("[0-9a-f]{16}", entry.name)]
        ours.sort(key=lambda entry: entry.stat().st_mtime)
    except OSError:
        return
    for old in ours[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
