"""``trioserve top`` beside a real server."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .server import Server, free_port, running, start
from .terminal import until_interrupted

TOP = [sys.executable, "-P", "-m", "trioserve", "top"]
SIMULATED: dict[str, dict[str, Any]] = {
    "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
    "device": {"kind": "simulated", "simulated_step_s": 0.02},
}


def once(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, "--once", *args], capture_output=True, text=True, timeout=30, check=False
    )


class Lines:
    """A ``top`` whose stdout is a pipe; its lines as they come."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [*TOP, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.seen: list[str] = []

    def wait_for(self, pattern: str) -> str:
        """The next line with this in it; the test's own time limit ends a wait in vain."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"ended without {pattern}: {self.seen}")


@contextlib.contextmanager
def watching(*args: str) -> Iterator[Lines]:
    top = Lines(*args)
    try:
        yield top
    finally:
        top.process.kill()
        top.process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("top"), **SIMULATED) as server:
        yield server


def test_once_prints_what_the_server_is_at(server: Server) -> None:
    answer = server.post("/v1/completions", prompt="hello", max_tokens=5, ignore_eos=True)
    assert answer.status_code == 200
    done = once(server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"random-llama: ready, up [\d:.]+( s)?\n", done.stdout)
    assert "0 running, 0 waiting, 0 open" in done.stdout
    assert re.search(r"answered +-/s; 2xx \d", done.stdout)
    assert re.search(r"ended by +length \d", done.stdout)
    assert re.search(r"KV cache +[\d.]+% of \d{3,} tokens", done.stdout)
    assert re.search(r"first token +p50 [\d.]+ m?s, p90 [\d.]+ m?s", done.stdout)
    assert re.search(r"p99 of a loop's pass [\d.]+ ms", done.stdout)
    assert "\x1b" not in done.stdout


def test_a_pipe_gets_a_line_each_time_with_rates(server: Server) -> None:
    with watching(server.url, "--interval", "0.2") as top:
        top.wait_for("running 0")
        with server.stream(
            "/v1/completions", prompt="hello", max_tokens=2000, ignore_eos=True
        ) as events:
            next(events)
            line = top.wait_for(r"running 1, .* output (?!0\.0)[\d.]+ tokens/s")
            assert re.search(r"next token [\d.]+ ms", line)
        top.wait_for("running 0")
        top.process.send_signal(signal.SIGINT)
        assert top.process.wait(10) == 0
        assert top.process.stderr is not None
        assert top.process.stderr.read() == ""


def test_sigterm_and_a_reader_that_leaves_end_it(server: Server) -> None:
    with watching(server.url, "--interval", "0.1") as top:
        top.wait_for("running")
        top.process.terminate()
        assert top.process.wait(10) == 128 + signal.SIGTERM
    with watching(server.url, "--interval", "0.1") as top:
        top.wait_for("running")
        assert top.process.stdout is not None
        top.process.stdout.close()
        assert top.process.wait(10) == 0
        assert top.process.stderr is not None
        assert top.process.stderr.read() == ""
        top.process.stdout = None


def test_over_a_unix_socket_from_loading_to_gone_and_back(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    sections = {
        **SIMULATED,
        "device": {"kind": "simulated", "simulated_load_s": 1.0},
        "http": {"uds": str(path)},
    }
    with watching("--uds", str(path), "--interval", "0.1") as top:
        top.wait_for(rf"^no answer from unix:{path}: No such file or directory; trying on$")
        for _ in range(2):
            server = start(tmp_path, **sections)
            try:
                top.wait_for(r"loading, .* stage weights \d+%$")
                top.wait_for("running 0, waiting 0")
                server.signal(signal.SIGTERM)
                assert server.wait() == 0
            finally:
                server.process.kill()
                server.process.wait()
            top.wait_for(r"^no answer from unix:")
        top.process.send_signal(signal.SIGINT)
        assert top.process.wait(10) == 0


def test_nobody_there() -> None:
    done = once(f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert re.fullmatch(
        r"trioserve: no answer from http://127\.0\.0\.1:\d+: Connection refused\n", done.stderr
    )
    assert done.stdout == ""


def test_once_can_be_interrupted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with watching("--once", f"http://127.0.0.1:{silent.getsockname()[1]}") as top:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(100).startswith(b"GET /startup")
                top.process.send_signal(signal.SIGINT)
                assert top.process.wait(10) == 130
                assert top.process.stderr is not None
                assert top.process.stderr.read() == ""


@pytest.mark.parametrize(
    "args", [("ftp://x",), ("http://x", "--uds", "y"), ("--interval", "0"), ("a", "b")]
)
def test_a_slip_ends_with_2(args: tuple[str, ...]) -> None:
    done = once(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_on_a_terminal_it_redraws_and_ctrl_c_leaves_the_cursor(server: Server) -> None:
    top = (*TOP[1:], server.url, "--interval", "0.2")
    screen = until_interrupted(top, lambda screen: screen.count(b"requests") >= 3)
    assert b"random-llama: ready" in screen
    assert b"\x1b[1A" in screen  # went back up to draw over it
    assert b"Traceback" not in screen
    assert screen.rfind(b"\x1b[?25h") > screen.rfind(b"\x1b[?25l") >= 0
