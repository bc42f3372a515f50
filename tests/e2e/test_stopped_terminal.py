"""`trioserve run` on a terminal that nobody reads, or that was stopped with Ctrl-S."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

DEADLINE_S = 60.0


@pytest.fixture
def port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    yield master, slave
    os.close(slave)
    os.close(master)


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("never ready: the server waits for its terminal")


@pytest.mark.parametrize("how", ["stopped", "not read"])
def test_st_a_terminal_that_takes_nothing_holds_nothing_up(
    how: str, terminal: tuple[int, int], port: int, tmp_path: Path
) -> None:
    """It becomes ready, answers, and leaves at the first SIGTERM with exit 0."""
    _, slave = terminal
    if how == "stopped":
        termios.tcflow(slave, termios.TCOOFF)
    else:
        os.set_blocking(slave, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(slave, b"x" * 1024)  # until it takes no more
        os.set_blocking(slave, True)
    with subprocess.Popen(
        [sys.executable, "-m", "trioserve", "run", "--device", "simulated", "--port", str(port),
         "--model", "random:llama?num_layers=1&hidden_size=32"],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    ) as process:  # fmt: skip
        try:
            wait_ready(port, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
