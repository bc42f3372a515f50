"""Careless surroundings, on the real program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .server import free_port, write_config

RUN = [sys.executable, "-P", "-m", "trioserve", "run"]


def start(directory: Path, before: Callable[[], object]) -> tuple[subprocess.Popen[bytes], int]:
    """A simulated server; ``before`` runs in the new process ahead of the program."""
    port = free_port()
    config = write_config(
        directory,
        model={"source": "random:llama?num_layers=1&hidden_size=32"},
        device={"kind": "simulated"},
        http={"port": port},
    )
    return subprocess.Popen([*RUN, str(config)], preexec_fn=before), port


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(20)
    finally:
        process.kill()


@pytest.mark.parametrize("fds", [(2,), (0, 1, 2)], ids=str)
def test_closed_standard_streams_are_no_obstacle(tmp_path: Path, fds: tuple[int, ...]) -> None:
    process, port = start(tmp_path, lambda: [os.close(fd) for fd in fds])
    try:
        wait_ready(process, port)
        # Whatever is said goes nowhere; above all not into a socket that got the number.
        for fd in fds:
            assert os.readlink(f"/proc/{process.pid}/fd/{fd}") == os.devnull
        assert end(process) == 0
    finally:
        process.kill()


def test_signals_blocked_by_whoever_started_it_are_heard(tmp_path: Path) -> None:
    blocked = (signal.SIGTERM, signal.SIGINT)
    process, port = start(tmp_path, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, blocked))
    try:
        wait_ready(process, port)
        assert end(process) == 0
    finally:
        process.kill()


def test_a_configuration_that_cannot_be_printed_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*RUN, "--print-config"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert result.returncode == 1
    assert result.stderr == (
        "trioserve: the configuration cannot be printed: No space left on device\n"
    )
