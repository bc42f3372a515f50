"""The scripts of bench/, run for a moment each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ..e2e.server import running
from .test_bench import BENCH, FULL, SIMULATED, WHOLE, Peer, serving

sys.path.insert(0, str(BENCH))
try:
    import compare
    from lib import answers, peers, stats
finally:
    sys.path.remove(str(BENCH))


def call(name: str, *arguments: str, timeout_s: float = 60) -> tuple[int, Any, str]:
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), "--json", "-", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running(tmp_path_factory.mktemp("server"), **SIMULATED) as started:
        yield started


@pytest.mark.parametrize("loop", [("--concurrency", "3"), ("--rate", "100")])
def test_serve_counts_what_a_server_did(server: Any, loop: tuple[str, str]) -> None:
    sizes = ("--requests", "6", "--prompt-tokens", "20", "--max-tokens", "9", "--repeat", "2")
    code, result, err = call(
        "serve",
        *("--base-url", server.url, "--seed", "1", "--pid", str(server.process.pid)),
        *(*loop, *sizes),
    )
    assert code == 0, err
    assert result["failures"] == {}
    assert [run["output_tokens"] for run in result["runs"]] == [54, 54]
    assert [run["prompt_tokens"] for run in result["runs"]] == [120, 120]
    median = result["median"]
    assert median["finish_reasons"] == {"length": 6}
    assert 0 < median["ttft_ms"]["median"] <= median["e2e_ms"]["median"]
    assert median["output_tokens_per_s"] > 0
    assert median["client"]["cpu_s"] > 0
    assert set(median["server"]["memory"]) == {"parent", "worker", "total"}
    memory = median["server"]["worker_memory"]
    assert memory["cache_mib"] > 0
    kept = memory["weights_mib"] + memory["cache_mib"]
    assert memory["beyond_mib"] == pytest.approx(memory["worker_mib"] - kept, abs=0.05)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert {"mean", "median", "p90", "p99", "count"} == set(median[name])
    assert "output_tokens_per_s" in err


def test_serve_tells_the_first_token_behind_a_prefix_that_was_seen(server: Any) -> None:
    load = ("--shared-prefix", "64", "--requests", "3", "--max-tokens", "2")
    code, result, err = call("serve", "--base-url", server.url, *load)
    assert code == 0, err
    [run] = result["runs"]
    assert (run["requests"], run["prompt_tokens"]) == (6, 6 * (64 + 16))
    assert run["cached_tokens"] == 3 * 64  # of the second of each pair, and of no first one
    assert run["prefix"]["cached_tokens"] == 64
    assert run["prefix"]["first_ttft_ms"]["count"] == run["prefix"]["second_ttft_ms"]["count"] == 3
    assert result["median"]["prefix"]["ratio"] > 0


def test_serve_tells_the_first_token_after_a_pause(server: Any) -> None:
    load = ("--idle", "0.05", "--requests", "2", "--max-tokens", "2", "--prompt-tokens", "8")
    code, result, err = call("serve", "--base-url", server.url, *load)
    assert code == 0, err
    [run] = result["runs"]
    assert run["requests"] == 2 * 4
    idle = run["idle"]
    assert idle["warm_ttft_ms"]["count"] == idle["idle_ttft_ms"]["count"] == 2
    slower = idle["idle_ttft_ms"]["median"] - idle["warm_ttft_ms"]["median"]
    assert idle["slower_ms"] == pytest.approx(slower, abs=0.01)


def test_serve_takes_one_load_at_a_time() -> None:
    code, result, err = call("serve", "--rate", "3", "--idle", "2")
    assert (code, result) == (2, None)
    assert "name one" in err


def test_serve_says_why_a_server_refuses(server: Any) -> None:
    code, result, err = call("serve", "--base-url", server.url, "--prompt-tokens", "99999")
    assert (code, result) == (1, None)
    assert "prompts as ids: HTTP 400 context_length_exceeded" in err


async def test_serve_counts_failures_of_all_runs_and_exits_with_1(tmp_path: Path) -> None:
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    num_posts = 0

    async def handle(stream: trio.SocketStream) -> None:
        nonlocal num_posts
        async with stream:
            request = await stream.receive_some()
            if b"GET /v1/models" in request:
                await stream.send_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + models)
            elif b"GET " in request:
                await stream.send_all(b"HTTP/1.1 404 No\r\nConnection: close\r\n\r\n")
            else:
                num_posts += 1
                busy = b"HTTP/1.1 429 Busy\r\nConnection: close\r\n\r\n" + FULL
                whole = b"".join(data for _, data in WHOLE)
                await stream.send_all(whole if num_posts % 2 else busy)

    peer = Peer()
    peer.handle = handle  # type: ignore[method-assign]
    out = str(tmp_path / "out.json")
    async with serving(peer) as target:
        url = f"http://127.0.0.1:{target.port}"
        arguments = ["--base-url", url, "--requests", "4", "--repeat", "2", "--json", out]
        command = [sys.executable, str(BENCH / "serve.py"), *arguments]
        done = await trio.run_process(command, check=False, capture_stdout=True)
    assert done.returncode == 1
    assert done.stdout.decode().splitlines()[-1] == "failed 4 times: HTTP 429 queue_full"
    result = json.loads(await trio.Path(out).read_text())
    assert result["failures"] == {"HTTP 429 queue_full": 4}
    assert result["settings"]["prompts"] == "ids"
    assert result["median"]["completed"] == 2


def test_serve_without_a_server() -> None:
    code, _, err = call("serve", "--base-url", "http://127.0.0.1:1")
    assert code == 1
    assert err == (
        "serve: http://127.0.0.1:1: /v1/models gives no answer, "
        "/health/ready no answer; see --wait\n"
    )


def test_startup_tells_times_stages_and_memory() -> None:
    source = str(SIMULATED["model"]["source"])
    counts = ("--commands", "1", "--cold", "1", "--warm", "1", "--load-requests", "2")
    code, result, err = call("startup", *counts, "--", "--device", "simulated", "--model", source)
    assert code == 0, err
    assert set(result["median"]) == {"commands", "cold", "warm"}
    warm = result["median"]["warm"]
    assert 0 < warm["port_open_s"] < warm["ready_s"] < warm["first_token_s"]
    assert {"inspect", "spawn", "self-test"} <= set(warm["stages_s"])
    assert warm["memory_after_load"]["worker"]["rss_anon_mib"] > 0
    assert "memory_after_load" not in result["median"]["cold"]
    commands = result["median"]["commands"]
    assert commands["bare python"]["min_ms"] < commands["trioserve --help"]["min_ms"]


def test_startup_shows_why_a_server_did_not_start() -> None:
    code, result, err = call("startup", "--commands", "0", "--", "--model", "nowhere/at/all")
    assert (code, result) == (1, None)
    assert "nowhere/at/all" in err
    assert "startup: the server ended with exit code" in err


# ------------------------------------------------------------------------- soak and overload


def test_slope_is_that_of_a_steady_growth_and_passes_over_a_jump() -> None:
    assert stats.slope([(x, 5.0 + 3 * x) for x in range(10)]) == 3
    assert stats.slope([(x, 7.0) for x in range(10)]) == 0
    assert stats.slope([(x, 0.0 if x < 30 else 1e6) for x in range(60)]) == 0
    assert stats.slope([(1.0, 2.0)]) == 0


def test_a_short_soak_finds_nothing_left(tmp_path: Path) -> None:
    """No verdict on memory over so few requests: its limit is out of reach."""
    counts = [f"--{kind}=40" for kind in ("tiny", "aborted", "erroneous", "warm-up", "round")]
    path = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, BENCH / "soak.py", *counts, "--limit=1e9", "--json", path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["verdict"] == "flat"
    assert found["phases"]["all"]["requests"] == 120
    assert found["outcomes"]["tiny: ok"] == 40
    assert len(found["samples"]) == 4
    assert found["first"]["worker_bytes"] > 1_000_000


def test_a_short_overload_sees_streams_and_probes(tmp_path: Path) -> None:
    path = tmp_path / "overload.json"
    limits = ["--seconds=1", "--gap-ms=1e6", "--probe-ms=1e6", "--only=half-closed"]
    done = subprocess.run(
        [sys.executable, BENCH / "overload.py", *limits, "--json", path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [case] = json.loads(path.read_text())["median"].values()
    assert case["gaps"] > 10
    assert case["probes"] > 1
    assert 0 < case["gap_median_ms"] <= case["gap_worst_ms"]


# ------------------------------------------------------------------------------- compare


def test_figures_of_a_comparison() -> None:
    one = [0.5 + 0.01 * i for i in range(64)]
    decode = compare.figures("one stream", compare.LOADS["one stream"], [one])
    assert decode == {"decode_tokens_per_s": pytest.approx(100.0)}
    prefill = compare.figures("long prompt", compare.LOADS["long prompt"], [[2.0]])
    assert prefill == {"prefill_tokens_per_s": 512.0}
    many = [[1.0] * 63 + [4.0]] * 31 + [[1.0] * 63 + [8.0]]
    total = compare.figures("many streams", compare.LOADS["many streams"], many)
    assert total == {"output_tokens_per_s": 32 * 64 / 8.0}
    with pytest.raises(AssertionError, match="cut short"):
        compare.figures("one stream", compare.LOADS["one stream"], [one[:-1]])


def test_tokens_that_share_a_chunk_come_with_it() -> None:
    outcome = answers.Outcome(sent_at=1.0, chunk_times=[1.5, 2.0], completion_tokens=4)
    assert compare._spread(outcome, 1.0) == [0.5, 1.0, 1.0, 1.0]


def test_a_batch_has_all_that_decode_and_then_prompts_as_far_as_it_goes() -> None:
    streams = [peers.Stream([1, 2, 3]), peers.Stream([4, 5]), peers.Stream([6, 7, 8])]
    assert peers.next_batch(streams, 2, 4) == [
        (0, 0, 1, False),
        (0, 1, 2, False),
        (0, 2, 3, True),
        (1, 0, 4, False),
    ]
    streams[0] = peers.Stream([1, 2, 3, 9], num_done=3, times=[0.1])
    streams[1].num_done = 1
    assert peers.next_batch(streams, 2, 4) == [
        (0, 3, 9, True),
        (1, 1, 5, True),
        (2, 0, 6, False),
        (2, 1, 7, False),
    ]
    for one in streams:
        one.times = [0.1, 0.2]
    assert peers.next_batch(streams, 2, 4) == []


def test_a_peer_that_is_unknown_is_refused() -> None:
    code, result, errors = call("compare", "--peer", "lama-cpp")
    assert (code, result) == (2, None)
    assert "no engine lama-cpp; there are openvino-genai, llama-cpp" in errors


def test_a_short_comparison_leaves_out_what_is_not_installed() -> None:
    model = "random:llama?num_layers=1&hidden_size=32&max_position=8192"
    options = [f"model.source={model}", "device.kind=simulated"]
    code, result, errors = call(
        "compare",
        *("--rounds", "1", "--peer", f"llama-cpp={sys.executable}", "--peer", "openvino-genai"),
        *("--python", sys.executable, "--"),
        *(part for option in options for part in ("--set", option)),
    )
    assert code == 0, errors
    assert "llama-cpp is left out: No module named 'llama_cpp'" in errors
    assert "openvino-genai is left out: No module named 'openvino_genai'" in errors
    assert set(result["median"]) == {"trioserve"}
    assert result["conditions"]["processors"] > 0
    assert all(value > 0 for value in result["median"]["trioserve"].values())
    assert result["ready_s"]["trioserve"] > 0


FAKE_ENGINE = """
import time


class SchedulerConfig: pass


class GenerationConfig: pass


class Output:
    generated_ids = [1]


class Handle:
    def __init__(self, wanted): self.left, self.ready = wanted.max_new_tokens, False
    def can_read(self): return self.ready
    def read(self):
        self.ready = False
        return {0: Output}


class ContinuousBatchingPipeline:
    def __init__(self, path, settings, device): self.handles = []
    def add_request(self, number, prompt, wanted):
        self.handles.append(Handle(wanted))
        return self.handles[-1]
    def has_non_finished_requests(self): return any(one.left for one in self.handles)
    def step(self):
        time.sleep(0.0005)
        for one in self.handles:
            if one.left: one.left, one.ready = one.left - 1, True
"""


def test_a_peer_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "openvino_genai.py").write_text(FAKE_ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with compare.peer("openvino-genai", sys.executable, "no.gguf") as found:
        assert found is not None
        ask, told = found
        assert told["load_s"] >= 0
        first, second = ask(["a", "b"], 3)
    assert len(first) == len(second) == 3
    assert 0 < first[0] < first[1] < first[2]


def test_llama_cpp_is_tried_before_it_is_measured(tmp_path: Path, monkeypatch: Any) -> None:
    module = tmp_path / "llama_cpp.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    assert peers.try_llama_cpp("no.gguf") == {"own_layouts": False}
    module.write_text("raise ImportError('no such library')\n")
    assert peers.try_llama_cpp("no.gguf") == {"own_layouts": True}
