"""No server of a bench script outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .test_bench import BENCH

SCRIPT = """
import os, sys, time
from lib.server import free_port, server
arguments = ["--device", "simulated", "--model", "random:llama?num_layers=1&hidden_size=32"]
with server(arguments, dict(os.environ), free_port()) as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""


def wait_for(found: Callable[[], object], what: str) -> None:
    for _ in range(1000):
        if found():
            return
        time.sleep(0.02)
    raise AssertionError(what)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_sd_a_script_that_is_killed_takes_its_server_and_its_worker_along(
    number: signal.Signals, tmp_path: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": str(BENCH)}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as script:
        assert script.stdout is not None
        server = psutil.Process(int(script.stdout.readline()))
        wait_for(server.children, "no worker came")
        tree = [server, *server.children(recursive=True)]
        script.send_signal(number)
        script.wait(10)
    gone, alive = psutil.wait_procs(tree, timeout=10)
    assert not alive
    assert len(gone) >= 2
