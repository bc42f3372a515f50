"""Series read at each scrape: the engine's state and counters, and the two processes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import trio
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import trioserve
from trioserve.config.schema import Config
from trioserve.engine.api import EngineApi, EngineStatus, Phase
from trioserve.engine.tally import StepTally
from trioserve.ipc.messages import STAGES, ReadyInfo, StepStats
from trioserve.ipc.status_page import process_cpu_seconds, rss_bytes
from trioserve.series import Histogram

PROCESSES = ("server", "worker")
_NO_STATS = StepStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
_NO_INFO = ReadyInfo("", 0, 0, "", "", "", 0, "", 0, 0, 0, 0, 0, 0)


class EngineCollector(Collector):
    """The engine's own figures. Counters of the worker begin anew with each worker."""

    def __init__(self, engine: EngineApi, config: Config) -> None:
        self._engine = engine
        self._config = config

    def collect(self) -> Iterator[Metric]:
        """All of them, of one moment."""
        status = self._engine.status
        yield from self._infos(status)
        yield from _life(status)
        yield from _load(status, status.stats or _NO_STATS)
        steps = status.steps or StepTally()
        yield _histogram("step_tokens", "Tokens computed in a step.", steps.tokens)
        yield _histogram("step_seconds", "Time a step took.", steps.seconds)

    def _infos(self, status: EngineStatus) -> Iterator[Metric]:
        info = status.info or _NO_INFO
        cache, scheduler = self._config.cache, self._config.scheduler
        yield InfoMetricFamily(
            "trioserve_build",
            "What serves.",
            value={
                "version": trioserve.__version__,
                "python": platform.python_version(),
                "trio": trio.__version__,
            },
        )
        yield InfoMetricFamily(
            "trioserve_model",
            "What is served; empty before it is ready.",
            value={
                "model_name": status.model_name,
                "architecture": info.architecture,
                "num_parameters": str(info.num_parameters),
                "weights": info.weights,
                "dtype": info.dtype,
                "device": info.device,
                "threads": str(info.threads),
                "attention": info.attention,
                "max_model_len": str(info.max_model_len),
            },
        )
        yield InfoMetricFamily(
            "trioserve_cache_config",
            "How the KV cache is laid out; sizes are 0 before the model is ready.",
            value={
                "block_size": str(cache.block_size),
                "num_blocks": str(info.num_blocks),
                "memory_bytes": str(info.kv_cache_bytes),
                "prefix_caching": str(cache.prefix_caching).lower(),
            },
        )
        yield InfoMetricFamily(
            "trioserve_scheduler_config",
            "Limits of what runs and waits.",
            value={
                "max_num_seqs": str(scheduler.max_num_seqs),
                "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
                "max_waiting": str(scheduler.max_waiting),
                "policy": scheduler.policy,
            },
        )


def _life(status: EngineStatus) -> Iterator[Metric]:
    """Start-up and restarts."""
    phase = GaugeMetricFamily(
        "trioserve_engine_phase", "1 for the phase the engine is in.", labels=["phase"]
    )
    for candidate in Phase:
        phase.add_metric([candidate.value], float(candidate is status.phase))
    yield phase
    seconds = GaugeMetricFamily(
        "trioserve_startup_stage_seconds", "Time each start-up stage took.", labels=["stage"]
    )
    took = {stage.name: stage.seconds or 0.0 for stage in status.stages}
    for name in STAGES:
        seconds.add_metric([name], took.get(name, 0.0))
    yield seconds
    yield _gauge("ready_seconds", "Start to ready; 0 before.", status.ready_after_s or 0.0)
    yield _gauge("engine_incarnation", "Worker incarnation.", status.incarnation)
    yield _gauge("engine_paused", "1 while steps are held back.", status.paused)
    yield _counter("engine_restarts", "Workers started after a death.", status.num_restarts)
    tasks = trio.lowlevel.current_statistics().tasks_living
    yield _gauge("tasks", "Tasks of the server's event loop.", tasks)


def _load(status: EngineStatus, stats: StepStats) -> Iterator[Metric]:
    """What runs, and what the worker has done."""
    info = status.info or _NO_INFO
    yield _gauge("requests_open", "Sequences submitted and not ended.", status.num_requests)
    yield _gauge("requests_running", "Sequences in the last step.", stats.num_running)
    yield _gauge("requests_waiting", "Sequences waiting for a step.", stats.num_waiting)
    share = stats.num_blocks_used / max(stats.num_blocks, 1)
    yield _gauge("kv_cache_usage_ratio", "Share of KV blocks in use.", share)
    yield _gauge("kv_cache_bytes", "Memory of the KV cache.", info.kv_cache_bytes)
    yield _gauge("model_weight_bytes", "Memory of the model's weights.", info.weight_bytes)
    for name, help, value in (
        ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
        ("preemptions", "Sequences preempted.", stats.num_preemptions),
        ("prefill_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        ("sampled_tokens", "Tokens sampled.", stats.output_tokens),
    ):
        yield _counter(name, help, value)


class ProcessCollector(Collector):
    """Memory, processor time and descriptors of the server and of its worker, from /proc."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Both processes; without a worker its figures are 0."""
        pids = dict(zip(PROCESSES, (os.getpid(), self._engine.status.worker_pid), strict=True))
        memory = GaugeMetricFamily(
            "trioserve_process_resident_memory_bytes", "Resident memory.", labels=["process"]
        )
        cpu = CounterMetricFamily(
            "trioserve_process_cpu_seconds", "Processor time, all threads.", labels=["process"]
        )
        files = GaugeMetricFamily(
            "trioserve_process_open_fds", "Open file descriptors.", labels=["process"]
        )
        for name, pid in pids.items():
            memory.add_metric([name], (pid and rss_bytes(pid)) or 0)
            cpu.add_metric([name], (pid and process_cpu_seconds(pid)) or 0.0)
            files.add_metric([name], num_open_files(pid) if pid else 0)
        yield from (memory, cpu, files)


def num_open_files(pid: int) -> int:
    """Open descriptors of a process of the same user; 0 where it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"trioserve_{name}", help, value=float(value))


def _counter(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"trioserve_{name}", help, value=float(value))


def _histogram(name: str, help: str, values: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"trioserve_{name}", help, values.buckets(), values.sum)
