"""SD-05 on real processes: a drain is over by its deadline, whatever it finds open."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .server import Server, running, start

DRAIN_S = 1.0
FLUSH_S = 2.0
# After the flush the worker ends its step and leaves, and two interpreters shut down.
SLACK_S = 3.0


def config(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {
        "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
        "device": {"kind": "simulated", "simulated_step_s": 0.05},
        "engine": {"drain_timeout_s": DRAIN_S},
    }
    for name, values in sections.items():
        merged.setdefault(name, {}).update(values)
    return merged


LONG = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}


class Raw:
    """A request on a plain socket, answered when the test likes."""

    def __init__(self, server: Server, small_buffer: bool = False, **body: Any) -> None:
        self.socket = socket.socket()
        if small_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", server.port))
        self.socket.settimeout(30)
        data = json.dumps(body).encode()
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
        )

    def rest(self) -> bytes:
        """All that still comes; a reset ends it like an end."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(65536):
                data += piece
        return data

    def until(self, text: bytes) -> None:
        data = b""
        while text not in data:
            piece = self.socket.recv(65536)
            assert piece, data
            data += piece


@contextlib.contextmanager
def raw(server: Server, **body: Any) -> Iterator[Raw]:
    client = Raw(server, **body)
    with client.socket:
        yield client


def metric(server: Server, name: str) -> float:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"trioserve_{name} "):
            return float(line.split()[1])
    raise AssertionError(name)


def drain(server: Server, code: int) -> float:
    """SIGTERM, and the seconds to the exit, which is within the deadline and the flush."""
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == code, server.log
    took_s = time.monotonic() - began
    assert took_s < DRAIN_S + FLUSH_S + SLACK_S, server.log
    server.assert_nothing_left()
    assert "Traceback" not in server.log
    return took_s


def test_sd_05_every_kind_of_open_request_is_ended_with_the_reason(tmp_path: Path) -> None:
    """Streams, whole answers, queued ones, one that is being uploaded, one that never reads."""
    limits = config(scheduler={"max_num_seqs": 4})
    with running(tmp_path, **limits) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(raw(server, **LONG, stream=True)) for _ in range(2)]
        for client in streams:
            client.until(b"data: ")
        plain = stack.enter_context(raw(server, **LONG))
        several = stack.enter_context(raw(server, **LONG, n=3, stream=True))
        several.until(b"data: ")
        server.wait_until(lambda: metric(server, "requests_open") == 6, "full")
        queued = stack.enter_context(raw(server, **LONG, stream=True))
        queued_plain = stack.enter_context(raw(server, **LONG))
        server.wait_until(lambda: metric(server, "requests_open") == 8, "queued")
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        upload = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        upload.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{")
        answers: dict[str, bytes] = {}

        def read(name: str, client: Raw) -> None:
            answers[name] = client.rest()

        clients = {"queued": queued, "queued plain": queued_plain, "plain": plain, "n": several}
        clients |= {f"stream {i}": client for i, client in enumerate(streams)}
        readers = [threading.Thread(target=read, args=item) for item in clients.items()]
        for reader in readers:
            reader.start()
        drain(server, 7)
        for reader in readers:
            reader.join(10)
        for name, answer in answers.items():
            assert b"shutting down" in answer, name
            assert b"[DONE]" not in answer, name
            if "plain" in name or "queued" in name:
                assert answer.startswith(b"HTTP/1.1 503 "), name
        assert len(answers) == len(clients)
        assert idle.recv(10) == b""


def test_sd_05_readers_that_never_read_do_not_hold_it_up(tmp_path: Path) -> None:
    fast = config(
        device={"simulated_step_s": 0.002}, http={"send_timeout_s": 600.0, "heartbeat_s": 0.2}
    )
    with running(tmp_path, **fast) as server, contextlib.ExitStack() as stack:
        body = LONG | {"n": 8, "logprobs": 5, "stream": True}
        for _ in range(4):
            client = Raw(server, small_buffer=True, **body)
            stack.enter_context(client.socket)
        with server.stream("/v1/completions", **LONG) as events:
            next(events)
            stalled = stuck_bytes(server)
            server.wait_until(lambda: stuck_bytes(server) > 4 * 16_000, f"stalled ({stalled})")
            began = time.monotonic()
            server.signal(signal.SIGTERM)
            rest = list(events)
        assert "shutting down" in rest[-1] or rest[-1] == "[DONE]"
        assert server.wait() == 7, server.log
        assert time.monotonic() - began < DRAIN_S + FLUSH_S + SLACK_S
        server.assert_nothing_left()


def stuck_bytes(server: Server) -> int:
    """What lies in the send buffers of the server's connections."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues = line.split()[:5]
        if int(local.rpartition(":")[2], 16) == server.port:
            total += int(queues.partition(":")[0], 16)
    return total


def test_sd_05_queued_requests_finish_inside_the_limit(tmp_path: Path) -> None:
    roomy = config(engine={"drain_timeout_s": 30.0}, scheduler={"max_num_seqs": 1})
    with running(tmp_path, **roomy) as server, contextlib.ExitStack() as stack:
        short = {"prompt": "x", "max_tokens": 10, "ignore_eos": True, "stream": True}
        clients = [stack.enter_context(raw(server, **short)) for _ in range(4)]
        server.wait_until(lambda: metric(server, "requests_open") == 4, "queued")
        server.signal(signal.SIGTERM)
        for client in clients:
            answer = client.rest()
            assert answer.count(b"data: ") >= 2
            assert b"[DONE]" in answer
        assert server.wait() == 0, server.log


@pytest.mark.parametrize("stage", ["spawn", "weights"])
def test_sd_05_during_start_up_it_is_over_at_once(tmp_path: Path, stage: str) -> None:
    server = start(tmp_path, **config(device={"simulated_load_s": 60.0}))
    try:
        server.wait_until(lambda: "listening" in server.log, "listening")
        if stage == "weights":
            server.wait_until(lambda: '"weights"' in server.get("/health/ready").text, "loading")
        else:
            server.wait_until(lambda: server.tree(), "spawned")
        drain(server, 0)
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("resubmit", [False, True])
def test_sd_05_during_a_restart(tmp_path: Path, resubmit: bool) -> None:
    """In the pause before the next worker; a request that waits for it is cut at the deadline."""
    restarting = config(
        engine={"on_death": "restart", "restart_backoff_s": 60.0, "resubmit": resubmit},
        scheduler={"max_num_seqs": 1},
    )
    with running(tmp_path, **restarting) as server:
        with raw(server, **LONG, stream=True) as first, raw(server, **LONG, stream=True) as queued:
            first.until(b"data: ")
            server.wait_until(lambda: metric(server, "requests_open") == 2, "queued")
            server.worker().kill()
            server.wait_until(lambda: "restart 1" in server.log, "restarting")
            first.until(b"the engine died")
            drain(server, 7 if resubmit else 0)
            assert (b"shutting down" if resubmit else b"the engine died") in queued.rest()


def test_sd_05_while_the_next_worker_loads(tmp_path: Path) -> None:
    """The second worker is told to start slowly; what waits for it is cut, and it is not."""
    slow_second = config(
        engine={"on_death": "restart", "restart_backoff_s": 0.05, "resubmit": True},
        scheduler={"max_num_seqs": 1},
        test={"allow_faults": True, "faults": ["weights#2:sleep"]},
    )
    with running(tmp_path, **slow_second) as server:
        with raw(server, **LONG, stream=True) as first, raw(server, **LONG, stream=True) as queued:
            first.until(b"data: ")
            server.wait_until(lambda: metric(server, "requests_open") == 2, "queued")
            server.worker().kill()
            server.wait_until(
                lambda: '"weights"' in server.get("/health/ready").text, "loading again"
            )
            first.until(b"the engine died")
            drain(server, 7)
            assert b"shutting down" in queued.rest()


def test_sd_05_a_worker_that_dies_in_the_drain_ends_it(tmp_path: Path) -> None:
    patient = config(engine={"drain_timeout_s": 60.0, "on_death": "restart"})
    with running(tmp_path, **patient) as server:
        with raw(server, **LONG, stream=True) as client:
            client.until(b"data: ")
            server.signal(signal.SIGTERM)
            server.wait_until(lambda: "SIGTERM" in server.log, "draining")
            server.worker().kill()
            assert b"the engine died" in client.rest()
        assert server.wait(5.0) == 6, server.log
