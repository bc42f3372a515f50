"""A server of our own, started for a measurement and stopped after it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lib.ending import with_parent


def trioserve() -> list[str]:
    """The command, as installed beside this interpreter."""
    script = Path(sys.executable).with_name("trioserve")
    return [str(script)] if script.exists() else [sys.executable, "-m", "trioserve"]


@contextlib.contextmanager
def server(
    arguments: list[str], env: dict[str, str], port: int, log: IO[str] | None = None
) -> Iterator[subprocess.Popen]:
    """A started server, stopped at the end; what it wrote goes to stderr if the block fails.

    It does not outlive this process either: to be called in its main thread. ``log`` is an opened
    file to write to; it stays the caller's.
    """
    with contextlib.ExitStack() as files:
        log = log or files.enter_context(tempfile.TemporaryFile("w+"))
        command = [*trioserve(), "run", *arguments, "--port", str(port)]
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=with_parent(),
        )
        try:
            yield process
        except BaseException:
            process.kill()
            log.seek(0)
            shutil.copyfileobj(log, sys.stderr)
            raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
