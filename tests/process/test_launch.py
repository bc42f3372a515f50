"""A worker that is started before there is a loop: owned by somebody at every moment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from trioserve.ipc.framing import encode
from trioserve.ipc.launch import Launched
from trioserve.ipc.messages import Check, Checked
from trioserve.ipc.process import attach
from trioserve.ipc.spawn import endpoints_of
from trioserve.ipc.status_page import process_state

Env = Callable[..., dict[str, str]]
pytestmark = pytest.mark.usefixtures("nothing_left")

# `trioserve run` up to the launch; then what stands for the server's imports gets the worker.
PROGRAM = """
import os, sys, time
import trioserve.main as server
launch, workers = server.launch_worker, []
def launch_worker(loaded):
    workers.append(launch(loaded))
    print(workers[0].popen.pid if hasattr(workers[0], "popen") else None, flush=True)
    return workers[0]
def import_serve_http():
    {body}
server.launch_worker, server.import_serve_http = launch_worker, import_serve_http
from trioserve.cli import main
main(["run", "--port", "0", *sys.argv[1:]])
"""


def is_gone_soon(pid: int) -> bool:
    for _ in range(500):
        if process_state(pid) in (None, "Z"):
            return True
        time.sleep(0.01)
    return False


def run_cli(body: str, tmp_path: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body), *args],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **env},
    )


async def test_a_launched_worker_becomes_a_supervised_one_that_has_its_first_command(
    child_env: Env,
) -> None:
    launched = Launched("child", child_env(), first_frame=encode(Check(7)))
    async with attach(endpoints_of(launched)) as worker:
        assert worker.init_sent
        with trio.fail_after(10):
            answer = await anext(worker.events)
        assert isinstance(answer, Checked)
        assert answer.token == 7
    assert worker.returncode == 0
    launched.close()  # it is not its own any more
    with pytest.raises(AssertionError, match="another owner"):
        launched.take()


def test_one_that_nobody_takes_is_killed_and_collected(child_env: Env) -> None:
    with Launched("child", child_env()) as launched:
        pid = launched.popen.pid
        assert process_state(pid) is not None
    assert launched.popen.returncode == -signal.SIGKILL
    assert process_state(pid) is None


def test_a_first_frame_that_does_not_fit_starts_nothing(child_env: Env) -> None:
    with pytest.raises(OSError, match="larger than a pipe"):
        Launched("child", child_env(), first_frame=b"x" * 2**20)


def test_without_an_address_no_worker_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with run_cli("raise AssertionError", tmp_path, "--port", port) as process:
            assert process.stdout is not None
            assert process.stdout.read() == ""
            assert process.wait(60) == 3


@pytest.mark.parametrize("how", ["killed", "bug"])
def test_a_parent_that_ends_before_its_loop_leaves_no_worker(how: str, tmp_path: Path) -> None:
    body = "raise ZeroDivisionError" if how == "bug" else "time.sleep(60)"
    with run_cli(body, tmp_path) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        if how == "killed":
            process.kill()
        assert process.wait(60) == {"killed": -9, "bug": 70}[how]
    assert is_gone_soon(worker)


def test_it_gets_no_secrets(tmp_path: Path) -> None:
    body = "environment = open(f'/proc/{workers[0].popen.pid}/environ')\n"
    body += "    while not (found := environment.read()): pass\n"  # at first its exec goes on
    body += "    print(found); raise SystemExit(9)"
    with run_cli(
        body,
        tmp_path,
        TRIOSERVE_HTTP__API_KEYS="key-of-ours",
        PATH_LIKE="kept",
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        environment = process.stdout.read()
        assert process.wait(60) == 9
    assert "PATH_LIKE=kept" in environment
    assert "key-of-ours" not in environment


def test_faults_on_purpose_are_left_to_the_server(tmp_path: Path) -> None:
    faults = ("--set", "test.allow_faults=true", "--set", 'test.faults=["hello:exit:3"]')
    with run_cli("raise SystemExit(9)", tmp_path, *faults) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "None\n"
        assert process.wait(60) == 9
