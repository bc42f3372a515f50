"""Spans and series of the whole server; its end sends what is left, or drops it in time."""

from __future__ import annotations

import http.server
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from .server import Server, running

SIMULATED: dict[str, Any] = {
    "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
    "device": {"kind": "simulated", "simulated_step_s": 0.02},
}
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 10, "ignore_eos": True}


@contextmanager
def collector() -> Iterator[tuple[int, list[bytes]]]:
    """Port and bodies of a collector that takes everything."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield served.server_address[1], bodies
        finally:
            served.shutdown()
            thread.join()


def test_the_last_spans_are_sent_as_the_server_ends(tmp_path: Path) -> None:
    with collector() as (port, bodies):
        trace = {"endpoint": f"http://127.0.0.1:{port}", "interval_s": 3600.0}
        with running(tmp_path, **SIMULATED, trace=trace) as server:
            server.wait_ready()
            assert server.post("/v1/completions", **BODY).status_code == 200
            assert not bodies
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            server.assert_nothing_left()
    (body,) = bodies
    spans = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    lasted = {s.name: (s.end_time_unix_nano - s.start_time_unix_nano) / 1e9 for s in spans}
    assert set(lasted) == {"text_completion random-llama", "queue", "prefill", "decode"}
    assert lasted["prefill"] >= 0.02
    assert lasted["decode"] >= 9 * 0.02
    assert lasted["text_completion random-llama"] >= lasted["prefill"] + lasted["decode"]


def test_a_collector_that_is_not_there_keeps_nobody(tmp_path: Path) -> None:
    trace = {"endpoint": "http://127.0.0.1:9", "interval_s": 0.05, "timeout_s": 60.0}
    with running(tmp_path, **SIMULATED, trace=trace) as server:
        server.wait_ready()
        for _ in range(3):
            assert server.post("/v1/completions", **BODY).status_code == 200
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 14
        server.assert_nothing_left()
        assert "were not sent" in server.log or "did not take them" in server.log


def figures(server: Server) -> dict[str, float]:
    return {
        sample.name.removeprefix("trioserve_") + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_series_of_a_real_request(tmp_path: Path) -> None:
    with running(tmp_path, **SIMULATED) as server:
        server.wait_ready()
        assert server.post("/v1/completions", **BODY).status_code == 200
        found = figures(server)
        assert found["request_prefill_seconds_sum"] >= 0.02
        assert 0 <= found["request_queue_seconds_sum"] < 10
        assert found["request_decode_seconds_sum"] >= 9 * 0.02
        assert found["time_per_output_token_seconds_sum"] >= 0.02
        assert found["step_seconds_count"] == 10
        assert found["step_tokens_count"] == found["step_tokens_sum"] == 9
        for name, pid in (("server", server.process.pid), ("worker", server.worker().pid)):
            process = psutil.Process(pid)
            memory = found[f"process_resident_memory_bytes{name}"]
            assert abs(memory - process.memory_info().rss) < 16 << 20
            assert found[f"process_open_fds{name}"] >= 3
            assert (
                0 < found[f"process_cpu_seconds_total{name}"] <= sum(process.cpu_times()[:2]) + 0.1
            )
