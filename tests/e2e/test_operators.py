"""What operators rely on: what a service manager is told, a quiet idle server, a watched loop."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .server import Server, free_port, running, start, write_config

SIMULATED: dict[str, dict[str, Any]] = {
    "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
}


def simulated(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    device = {"kind": "simulated", **sections.pop("device", {})}
    return {**SIMULATED, "device": device, **sections}


class Manager:
    """systemd's side of its protocol: a datagram socket, and what came over it."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)
        self.lines: list[str] = []

    def read(self) -> list[str]:
        """All lines so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.lines += self.socket.recv(65536).decode().split("\n")
        return self.lines


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Manager, str]]:
    name = tmp_path / "notify"
    address = str(name) if request.param == "path" else f"@trioserve-test-{os.getpid()}"
    manager = Manager(address)
    with manager.socket:
        yield manager, address


def test_a_manager_is_told_of_start_up_readiness_and_stop(
    tmp_path: Path, manager: tuple[Manager, str]
) -> None:
    systemd, address = manager
    env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000"}
    config = simulated(device={"simulated_load_s": 1.5, "simulated_step_s": 0.05})
    server = start(tmp_path, env=env, **config)
    try:
        server.wait_until(lambda: "STATUS=loading: weights" in systemd.read(), "loading")
        assert "READY=1" not in systemd.lines
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=330000000") for line in systemd.lines)
        server.wait_until(lambda: "READY=1" in systemd.read(), "told")
        assert server.get("/health/ready").status_code == 200
        assert f"MAINPID={server.process.pid}" in systemd.lines
        pings = systemd.lines.count("WATCHDOG=1")
        server.wait_until(lambda: systemd.read().count("WATCHDOG=1") >= pings + 3, "pinging")
        assert "STOPPING=1" not in systemd.lines
        with server.stream(
            "/v1/completions", prompt="hi", max_tokens=30, ignore_eos=True
        ) as events:
            next(events)
            server.signal(signal.SIGTERM)
            server.wait_until(lambda: "STOPPING=1" in systemd.read(), "stopping")
            pings = systemd.lines.count("WATCHDOG=1")
            assert list(events)[-1] == "[DONE]"
            assert systemd.read().count("WATCHDOG=1") > pings, "a drain is pinged through"
        assert server.wait() == 0
        server.assert_nothing_left()
        assert systemd.read().count("READY=1") == 1
        assert systemd.lines.index("READY=1") < systemd.lines.index("STOPPING=1")
    finally:
        server.process.kill()
        server.process.wait()


def test_a_stopped_server_is_not_pinged_for(tmp_path: Path) -> None:
    systemd = Manager(address := str(tmp_path / "notify"))
    env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
    with systemd.socket, running(tmp_path, env=env, **simulated()) as server:
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)  # what was under way has come
        pings = systemd.read().count("WATCHDOG=1")
        time.sleep(0.5)  # five pings
        assert systemd.read().count("WATCHDOG=1") == pings
        server.process.send_signal(signal.SIGCONT)
        server.wait_until(lambda: systemd.read().count("WATCHDOG=1") > pings, "pinging")


def test_a_manager_that_is_gone_hurts_nobody(tmp_path: Path) -> None:
    env = {"NOTIFY_SOCKET": str(tmp_path / "none"), "WATCHDOG_USEC": "200000"}
    with running(tmp_path, env=env, **simulated()) as server:
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
    assert server.process.returncode == 0
    assert "notify" not in server.log


def test_the_watchdogs_signal_leaves_the_stacks_in_the_log(tmp_path: Path) -> None:
    server = start(tmp_path, **simulated())
    try:
        server.wait_ready()
        server.tree()
        server.process.send_signal(signal.SIGABRT)
        assert server.wait() == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in server.log
        assert "trioserve/main.py" in server.log
        server.assert_nothing_left()
    finally:
        server.process.kill()
        server.process.wait()


def test_a_socket_of_systemd_is_served_and_keeps_early_clients(tmp_path: Path) -> None:
    """systemd passes the first socket as descriptor 3, and clients may connect before we start."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        early = socket.create_connection(("127.0.0.1", port))
        early.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        config = write_config(tmp_path, **simulated())
        program = (
            "import os, sys\n"
            f"os.dup2({listener.fileno()}, 3)\n"
            "os.environ |= {'LISTEN_FDS': '1', 'LISTEN_PID': str(os.getpid())}\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'trioserve', *sys.argv[1:]])\n"
        )
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program, "run", str(config), "--set", "http.fd=3"],
                pass_fds=[listener.fileno()],
                stderr=log,
            )
        server = Server(process, tmp_path / "log", port)
        try:
            with early:
                early.settimeout(30)
                assert early.recv(100).startswith(b"HTTP/1.1 200")
            server.wait_ready()
            assert f"http://127.0.0.1:{port}" in server.log
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            # The socket is the manager's: it goes on listening for the next server.
            socket.create_connection(("127.0.0.1", port)).close()
        finally:
            process.kill()
            process.wait()


def test_pf_04_an_idle_server_is_quiet(tmp_path: Path) -> None:
    """Everything that ticks is on; parent and worker together take under 1 % of one core."""
    systemd = Manager(address := str(tmp_path / "notify"))
    env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "10000000"}
    with systemd.socket, running(tmp_path, env=env, **simulated()) as server:
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        processes = [psutil.Process(server.process.pid), *server.tree()]
        time.sleep(0.5)  # the last request's end

        def cpu_s() -> float:
            return sum(p.cpu_times().user + p.cpu_times().system for p in processes)

        before = cpu_s()
        time.sleep(4.0)
        used_s = cpu_s() - before
    assert len(processes) == 2
    assert used_s < 0.04, f"{used_s / 4:.1%} of one core"


BLOCKED = """
import sys, time
import trio
import trioserve.main

async def block_the_loop(engine, interval_s):
    await engine.wait_ready()
    while True:  # a line shortly before, from a slow machine, would keep the first one from the log
        time.sleep(0.4)
        await trio.sleep(2)

trioserve.main.log_rates = block_the_loop
from trioserve.cli import main
main(sys.argv[1:])
"""


def test_a_blocked_loop_is_in_the_log_and_in_the_metrics(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, **simulated(http={"port": port}))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", BLOCKED, "run", str(config)], stderr=log)
    server = Server(process, tmp_path / "log", port)
    try:
        server.wait_ready()
        server.wait_until(lambda: "in block_the_loop" in server.log, "logged")
        text = server.get("/metrics").text
        [count] = re.findall(r"^trioserve_event_loop_blocked_total (\S+)$", text, re.M)
        assert float(count) >= 1
        assert 'trioserve_event_loop_lag_seconds_bucket{le="0.25"}' in text
        assert "_find_and_load" not in server.log, "the loop waited for an import"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        server.assert_nothing_left()
    finally:
        process.kill()
        process.wait()
