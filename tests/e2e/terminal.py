"""A command that runs on a terminal of its own, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence

BEGIN = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def until_interrupted(arguments: Sequence[str], is_enough: Callable[[bytes], bool]) -> bytes:
    """Run Python with ``arguments``, press Ctrl-C once ``is_enough(screen)``, and give all that
    was written. It must end by itself, with 0."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    screen = b""
    try:
        while not is_enough(screen):
            screen += os.read(ours, 65536)
        os.write(ours, b"\x03")  # the terminal sends SIGINT to the whole foreground group
        with contextlib.suppress(OSError):  # how a terminal says that everybody has left
            while data := os.read(ours, 65536):
                screen += data
        assert process.wait(10) == 0, screen.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return screen
