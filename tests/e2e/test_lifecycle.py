"""Up, down, and everything between that can go wrong, on real processes with a simulated device."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from .server import Server, free_port, running, start, write_config
from .terminal import until_interrupted

SIMULATED: dict[str, dict[str, Any]] = {
    "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
    "device": {"kind": "simulated"},
}


def simulated(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    merged = {name: dict(values) for name, values in SIMULATED.items()}
    for name, values in sections.items():
        merged.setdefault(name, {}).update(values)
    return merged


SLOW = simulated(device={"simulated_step_s": 0.05})
LONG = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}


def load(server: Server) -> tuple[float, float]:
    """(sequences running, share of KV blocks in use) as /metrics shows them."""
    from prometheus_client.parser import text_string_to_metric_families

    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }
    return values["trioserve_requests_running"], values["trioserve_kv_cache_usage_ratio"]


# ------------------------------------------------------------------------------- start-up


def test_st_01_a_port_in_use_is_an_error_within_seconds_and_names_it(tmp_path: Path) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        began = time.monotonic()
        server = start(tmp_path, **simulated(http={"port": port}))
        assert server.wait() == 3
        assert time.monotonic() - began < 5
        assert f"127.0.0.1:{port}" in server.last_line
        assert not server.seen
        assert "spawn" not in server.log


def test_st_01_two_servers_never_share_a_port(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with running(tmp_path, **simulated()) as first:
        second = start(tmp_path / "b", **simulated(http={"port": first.port}))
        assert second.wait() == 3
        assert str(first.process.pid) in second.last_line


def test_st_10_probes_tell_the_truth_while_loading(tmp_path: Path) -> None:
    server = start(tmp_path, **simulated(device={"simulated_load_s": 3.0}))
    statuses: list[int] = []
    details: list[str] = []
    try:
        server.wait_until(lambda: "listening" in server.log, "listening")
        refused = server.post("/v1/completions", prompt="x")
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        while not statuses or statuses[-1] != 200:
            assert server.get("/health/live").status_code == 200
            answer = server.get("/health/ready")
            statuses.append(answer.status_code)
            details.append(answer.text)
        assert 503 in statuses
        assert any('"weights"' in text for text in details)
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        stages = {stage["name"]: stage for stage in server.get("/startup").json()["stages"]}
        assert stages["weights"]["seconds"] >= 3.0
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        server.assert_nothing_left()
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay_s", [0.0, 0.5, 1.0, 1.5])
def test_sd_07_a_signal_while_loading_ends_it_at_once(
    tmp_path: Path, number: signal.Signals, delay_s: float
) -> None:
    server = start(tmp_path, **simulated(device={"simulated_load_s": 60.0}))
    server.wait_until(lambda: "listening" in server.log, "listening")
    time.sleep(delay_s)  # hit import, spawn and load: the point is that no moment is special
    server.signal(number)
    assert server.wait(3.0) == 0, server.log
    assert "Traceback" not in server.log
    server.assert_nothing_left()


def test_a_bad_configuration_is_refused_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text("[scheduler]\nmax_num_seq = 3\n[htpp]\nport = 1\n")
    result = subprocess.run(
        [sys.executable, "-m", "trioserve", "run", str(path)],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert result.returncode == 2
    assert "model.toml:2" in result.stderr
    assert "max_num_seqs" in result.stderr
    assert "http" in result.stderr
    assert "Traceback" not in result.stderr


# ------------------------------------------------------------------------------ three ways down


def test_sd_05_drain_finishes_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        with server.stream("/v1/completions", prompt="hi", max_tokens=40) as events:
            first = next(events)
            server.signal(signal.SIGTERM)
            server.wait_until(lambda: "SIGTERM" in server.log, "draining")
            with pytest.raises((httpx.TransportError, AssertionError)):
                assert server.post("/v1/completions", prompt="x").status_code != 503
                raise AssertionError("refused with 503")
            rest = list(events)
        assert first
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_sd_05_past_the_deadline_streams_get_an_error_event(tmp_path: Path) -> None:
    config = simulated(device={"simulated_step_s": 0.05}, engine={"drain_timeout_s": 0.5})
    with running(tmp_path, **config) as server:
        with server.stream("/v1/completions", **LONG) as events:
            next(events)
            server.signal(signal.SIGTERM)
            rest = list(events)
        assert "error" in json.loads(rest[-1])
        assert "shut" in json.loads(rest[-1])["error"]["message"]
        assert server.wait() == 7, server.log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_stops_at_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with running(tmp_path, **SLOW) as server:
        with server.stream("/v1/completions", **LONG) as events:
            next(events)
            server.signal(number)
            server.wait_until(lambda: number.name in server.log, "draining")
            began = time.monotonic()
            server.signal(number)
            assert server.wait(2.0) == code
            assert time.monotonic() - began < 2.0


def test_sd_07_signals_after_the_end_is_decided_change_nothing(tmp_path: Path) -> None:
    """Until the very end of the process, of which Python's own shutdown is the longest part."""
    config = simulated(test={"allow_faults": True, "faults": ["weights:exit:3"]})
    server = start(tmp_path, **config)
    try:
        server.wait_until(lambda: "start-up failed" in server.log, "failed")
        deadline = time.monotonic() + 10
        while server.process.poll() is None and time.monotonic() < deadline:
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 5
        assert "Traceback" not in server.log
        assert "KeyboardInterrupt" not in server.log
    finally:
        server.process.kill()
        server.process.wait()


def test_a_closed_terminal_drains_and_a_slip_of_log_rotation_does_nothing(tmp_path: Path) -> None:
    with running(tmp_path, **simulated()) as server:
        server.signal(signal.SIGUSR1)
        server.wait_until(lambda: "Current thread" in server.log, "showing its stacks")
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        server.signal(signal.SIGHUP)
        assert server.wait() == 0
        assert "SIGHUP" in server.log


def test_sd_02_kill_9_of_the_worker_ends_requests_and_server(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        with server.stream("/v1/completions", **LONG) as events:
            next(events)
            server.worker().kill()
            rest = list(events)
        assert "[DONE]" not in rest
        assert "error" in json.loads(rest[-1])
        assert server.wait(3.0) == 6
        assert "signal 9" in server.last_line
        assert "memory" in server.last_line


def test_restart_keeps_the_listeners_open(tmp_path: Path) -> None:
    config = simulated(engine={"on_death": "restart", "restart_backoff_s": 0.2})
    with running(tmp_path, **config) as server:
        before = server.worker().pid
        server.worker().kill()
        server.wait_until(lambda: "restart 1" in server.log, "restarting")
        assert server.get("/health/live").status_code == 200
        server.wait_ready()
        assert server.worker().pid != before
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


def test_sd_01_kill_9_of_the_parent_takes_the_worker_along(tmp_path: Path) -> None:
    server = start(tmp_path, **SLOW)
    try:
        server.wait_ready()
        with (
            pytest.raises(httpx.TransportError),
            server.stream("/v1/completions", **LONG) as events,
        ):
            next(events)
            server.tree()
            server.process.kill()
            list(events)
        server.process.wait()
        server.assert_nothing_left(within_s=2.0)
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("device", ["simulated", "real"])
def test_sd_01_d_kill_9_of_the_parent_while_the_worker_holds_the_gil_for_ever(
    tmp_path: Path, device: str
) -> None:
    config = {name: dict(values) for name, values in SLOW.items()}
    if device == "real":
        from .test_bad_input import make_model

        config = {"model": {"source": str(make_model(tmp_path / "model"))}}
    config["test"] = {"allow_faults": True, "faults": ["decode@3:gil"]}
    server = start(tmp_path, **config)
    try:
        server.wait_ready()
        with (
            pytest.raises(httpx.TransportError),
            server.stream("/v1/completions", **(LONG | {"max_tokens": 50})) as events,
        ):
            next(events)
            server.wait_until(lambda: "fault hook decode@3:gil" in server.log, "held")
            worker = server.worker()
            server.process.kill()
            list(events)
        server.process.wait()
        server.assert_nothing_left(within_s=2.0)
        assert not worker.is_running()
    finally:
        server.process.kill()
        server.process.wait()


def test_a_stuck_worker_is_found_and_its_stacks_are_logged(tmp_path: Path) -> None:
    config = simulated(
        device={"simulated_step_s": 0.05}, watchdog={"interval_s": 0.2, "step_budget_s": 1.0}
    )
    with running(tmp_path, **config) as server:
        with server.stream("/v1/completions", **LONG) as events:
            next(events)
            server.worker().suspend()
            rest = list(events)
        assert "error" in json.loads(rest[-1])
        assert server.wait(5.0) == 6
        assert "stuck" in server.last_line


# ---------------------------------------------------------------------------- client gone


@pytest.mark.parametrize("stream", [True, False])
def test_api_01_a_client_that_leaves_takes_its_work_along(tmp_path: Path, stream: bool) -> None:
    with running(tmp_path, **SLOW) as server:
        body = json.dumps({**LONG, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            server.wait_until(lambda: load(server)[0] == 1, "running")
        began = time.monotonic()
        server.wait_until(lambda: load(server) == (0, 0), "aborted", 2.0)
        assert time.monotonic() - began < 2.0


# ------------------------------------------------------------------------------- listeners


def test_unix_socket_is_served_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    server = start(tmp_path, **simulated(http={"uds": str(path)}))
    try:
        server.wait_until(path.exists, "listening")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            server.wait_until(
                lambda: client.get("http://x/health/ready").status_code == 200, "ready"
            )
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not path.exists()
        server.assert_nothing_left()
    finally:
        server.process.kill()
        server.process.wait()


def test_an_inherited_descriptor_is_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = write_config(tmp_path, **simulated(http={"fd": listener.fileno()}))
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trioserve", "run", str(config)],
                pass_fds=[listener.fileno()],
                stderr=log,
            )
    server = Server(process, tmp_path / "log", port)
    try:
        server.wait_ready()
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        server.assert_nothing_left()
    finally:
        process.kill()
        process.wait()


# -------------------------------------------------------------------------------- terminal


def test_on_a_terminal_ctrl_c_ends_it_and_leaves_the_cursor(tmp_path: Path) -> None:
    config = write_config(tmp_path, **simulated(http={"port": free_port()}))
    run = ("-m", "trioserve", "run", str(config))
    screen = until_interrupted(run, lambda screen: b"ready after" in screen)
    assert "▸".encode() in screen  # the live tree was drawn
    assert b"Traceback" not in screen
    assert screen.rfind(b"\x1b[?25h") >= screen.rfind(b"\x1b[?25l")
