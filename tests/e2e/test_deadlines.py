"""Deadlines against the real scheduler: what waits is cut, what has begun is not; all is freed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .server import Server, running


def config(**http: float) -> dict[str, dict[str, Any]]:
    return {
        "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
        "device": {"kind": "simulated", "simulated_step_s": 0.02},
        "scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": 16},
        "http": dict(http),
    }


LONG = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}


def metrics(server: Server) -> dict[str, float]:
    lines = [line for line in server.get("/metrics").text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def is_free(server: Server) -> bool:
    now = metrics(server)
    return now["trioserve_requests_open"] == 0 == now["trioserve_kv_cache_usage_ratio"]


def test_what_waits_is_cut_and_what_runs_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, **config(queue_timeout_s=1.0)) as server:
        with server.stream("/v1/completions", **LONG) as events:
            next(events)
            for body in (LONG, LONG | {"stream": True}):
                answer = server.post("/v1/completions", **body)
                assert answer.status_code == 504
                assert answer.json()["error"]["code"] == "deadline_exceeded"
            assert json.loads(next(events))["choices"][0]["finish_reason"] is None
            assert metrics(server)["trioserve_requests_open"] == 1
        server.wait_until(lambda: is_free(server), "free", 5.0)


def test_a_prefill_longer_than_the_queues_limit_is_not_cut(tmp_path: Path) -> None:
    with running(tmp_path, **config(queue_timeout_s=1.0)) as server:
        # 1600 tokens at 16 a step of 20 ms: two seconds, and more on a busy machine.
        answer = server.post("/v1/completions", prompt=[5] * 1600, max_tokens=2)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 2


def test_total_time_ends_whole_answers_and_streams_and_frees_their_blocks(tmp_path: Path) -> None:
    with running(tmp_path, **config(request_timeout_s=60.0)) as server:
        answer = server.post("/v1/completions", **LONG, timeout_s=0.5)
        assert answer.status_code == 504
        assert "0.5 s" in answer.json()["error"]["message"]
        server.wait_until(lambda: is_free(server), "free", 5.0)
        with server.stream("/v1/completions", **LONG, timeout_s=0.5) as events:
            got = list(events)
        assert json.loads(got[-1])["error"]["type"] == "timeout_error"
        assert len(got) > 1
        server.wait_until(lambda: is_free(server), "free", 5.0)
        assert metrics(server)['trioserve_choices_finished_total{reason="timeout"}'] == 2
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
