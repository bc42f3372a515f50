"""PF-04 and PF-05 on real processes: quiet when idle, never silent while it starts."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from .server import Server, running, start

TINY: dict[str, Any] = {"source": "random:llama?num_layers=1&hidden_size=32"}
WINDOW_S = 10.0


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(p.cpu_times().user + p.cpu_times().system for p in processes)


def used_in_window(server: Server) -> float:
    processes = [psutil.Process(server.process.pid), *server.tree()]
    assert len(processes) == 2
    before = cpu_s(processes)
    time.sleep(WINDOW_S)
    return cpu_s(processes) - before


def stalled_reader(port: int) -> socket.socket:
    """A stream of more than the buffers take, of which nothing is read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    body = {
        "prompt": "x",
        "max_tokens": 1500,
        "ignore_eos": True,
        "n": 4,
        "logprobs": 5,
        "stream": True,
    }
    data = json.dumps(body).encode()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        % (len(data), data)
    )
    return client


@pytest.mark.parametrize("reader", ["none", "stalled"])
def test_pf_04_under_one_percent_of_a_core(tmp_path: Path, reader: str) -> None:
    device = {"kind": "simulated"}
    with running(tmp_path, model=TINY, device=device, http={"send_timeout_s": 300.0}) as server:
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        if reader == "stalled":
            client = stalled_reader(server.port)
            server.wait_until(
                lambda: "requests_open 0.0" in server.get("/metrics").text, "computed"
            )
            assert sent_and_unread(server.port) > 0, "all of it fits the buffers"
        time.sleep(0.5)  # the last request's end
        used_s = used_in_window(server)
        if reader == "stalled":
            assert "http_connections 2.0" in server.get("/metrics").text, "it was cut meanwhile"
            client.close()
    assert used_s < 0.01 * WINDOW_S, f"{used_s / WINDOW_S:.1%} of one core"


def sent_and_unread(port: int) -> int:
    """Bytes in the send buffers of a server's connections."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        int(row[4].partition(":")[0], 16)
        for row in rows
        if int(row[1].rpartition(":")[2], 16) == port
    )


def test_pf_05_a_long_start_says_what_it_does(tmp_path: Path) -> None:
    """A line at least every two seconds with stage and share, at the end one with all times."""
    server = start(
        tmp_path,
        model=TINY,
        device={"kind": "simulated", "simulated_load_s": 6.5},
        log={"format": "json"},
    )
    try:
        server.wait_ready()
        lines = [json.loads(line) for line in server.log.splitlines()]
        stages = [line["stage"] for line in lines if "stage" in line]
        assert stages.index("resolve") < stages.index("spawn") < stages.index("weights")
        running_lines = [
            line for line in lines if line.get("stage") == "weights" and line["state"] == "running"
        ]
        assert len(running_lines) >= 3
        assert all("%" in line["message"] for line in running_lines)
        [last] = [line["message"] for line in lines if line["message"].startswith("stages in s:")]
        assert "weights 6.5" in last
        [ready] = [line["message"] for line in lines if line["message"].startswith("ready after")]
        assert str(server.port) in ready
        metrics = server.get("/metrics").text
        [seconds] = [
            x.split()[1] for x in metrics.splitlines() if x.startswith("trioserve_ready_s")
        ]
        assert float(seconds) > 6.5
        assert 'trioserve_startup_stage_seconds{stage="weights"}' in metrics
    finally:
        server.process.kill()
        server.process.wait()
