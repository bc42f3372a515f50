"""`trioserve run` as a real process, with real clients; used by all tests here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_S = 120.0


class Server:
    """A running server. ``stop`` and the end of the block prove that nothing is left of it."""

    def __init__(self, process: subprocess.Popen[str], log: Path, port: int) -> None:
        self.process = process
        self.port = port
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self.seen: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def last_line(self) -> str:
        return self.log.rstrip().splitlines()[-1]

    def tree(self) -> list[psutil.Process]:
        """All processes under the server now; remembered, so that orphans are found later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid] = child
        return [child for child in self.seen.values() if child.is_running()]

    def worker(self) -> psutil.Process:
        [worker] = [p for p in self.tree() if "trioserve.core" in " ".join(p.cmdline())]
        return worker

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def post(self, path: str, timeout: float = 60, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    @contextlib.contextmanager
    def stream(self, path: str, timeout: float = 60, **body: Any) -> Iterator[Iterator[str]]:
        """The ``data:`` payloads of an SSE answer."""
        with (
            httpx.Client(timeout=timeout) as client,
            client.stream("POST", self.url + path, json={"stream": True, **body}) as response,
        ):
            assert response.status_code == 200, response.read()
            yield (line[6:] for line in response.iter_lines() if line.startswith("data: "))

    def wait_until(self, condition: Any, what: str, timeout_s: float = READY_S) -> None:
        """Poll until true; the process ending, or the deadline, fails the test with the log."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            assert time.monotonic() < deadline, f"not {what} in {timeout_s} s:\n{self.log}"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.wait_until(self._is_ready, "ready")
        self.tree()

    def _is_ready(self) -> bool:
        try:
            return self.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: int) -> None:
        self.tree()
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 15.0) -> int:
        """The exit code; fails if the process is still there after ``timeout_s``."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log}") from None

    def assert_nothing_left(self, within_s: float = 2.0) -> None:
        """No process of the tree is alive, and the port is free."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=within_s)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], alive
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_config(directory: Path, **sections: dict[str, Any]) -> Path:
    """A model.toml; JSON's values are TOML's for what is used here."""
    path = directory / "model.toml"
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def start(
    directory: Path, *arguments: str, env: dict[str, str] | None = None, **sections: dict[str, Any]
) -> Server:
    """Start a server; does not wait for anything. ``env`` is added to ours."""
    port = free_port()
    sections.setdefault("http", {}).setdefault("port", port)
    config = write_config(directory, **sections)
    log = directory / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trioserve", "run", str(config), *arguments],
            stdout=stderr,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
        )
    return Server(process, log, sections["http"]["port"])


@contextlib.contextmanager
def running(
    directory: Path, *arguments: str, env: dict[str, str] | None = None, **sections: dict[str, Any]
) -> Iterator[Server]:
    """A server that is ready; stopped at the end if the test has not done it."""
    server = start(directory, *arguments, env=env, **sections)
    try:
        server.wait_ready()
        yield server
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
            assert server.wait() in (0, 7), server.log
        server.assert_nothing_left()
    finally:
        if server.process.poll() is None:
            server.tree()
            server.process.kill()
            server.process.wait()
