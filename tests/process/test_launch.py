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

# `trioserve run` up to the launch; then what stands for the server gets the worker.
PROGRAM = """
import os, sys, time, types
fake = types.ModuleType("trioserve.main")
def run(loaded, launched):
    print(launched.popen.pid, flush=True)
    {body}
fake.run = run
sys.modules["trioserve.main"] = fake
from trioserve.cli import main
main(["run", *sys.argv[1:]])
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


def test_a_server_that_does_not_come_to_serve_leaves_no_worker(tmp_path: Path) -> None:
    """Another holds the address: exit 3, and the worker that was started ahead is gone."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        body = "del sys.modules['trioserve.main']; import trioserve.main as real; "
        body += "return real.run(loaded, launched)"
        with run_cli(body, tmp_path, "--port", port) as process:
            assert process.stdout is not None
            worker = int(process.stdout.readline())
            assert process.wait(60) == 3
    assert process_state(worker) is None


@pytest.mark.parametrize("how", ["killed", "interrupted", "bug"])
def test_a_parent_that_ends_before_its_loop_leaves_no_worker(how: str, tmp_path: Path) -> None:
    body = "raise ZeroDivisionError" if how == "bug" else "time.sleep(60)"
    with run_cli(body, tmp_path) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        if how != "bug":
            process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
        code = {"killed": -9, "interrupted": 130, "bug": 1}[how]
        assert process.wait(60) == code
    assert is_gone_soon(worker)


def test_it_gets_no_secrets(tmp_path: Path) -> None:
    body = "environment = open(f'/proc/{launched.popen.pid}/environ')\n"
    body += "    while not (found := environment.read()): pass\n"  # at first its exec goes on
    body += "    print(found); launched.close(); return 0"
    with run_cli(
        body,
        tmp_path,
        TRIOSERVE_HTTP__API_KEYS="key-of-ours",
        PATH_LIKE="kept",
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        environment = process.stdout.read()
        assert process.wait(60) == 0
    assert "PATH_LIKE=kept" in environment
    assert "key-of-ours" not in environment


def test_faults_on_purpose_are_left_to_the_server(tmp_path: Path) -> None:
    body = "return 0"
    program = PROGRAM.replace("launched.popen.pid", "launched").format(body=body)
    done = subprocess.run(
        [sys.executable, "-c", program, "--set", "test.allow_faults=true",
         "--set", 'test.faults=["hello:exit:3"]'],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )  # fmt: skip
    assert done.stdout == "None\n"
