"""How long from the command to the first token, stage by stage, and how much memory is then held?

Also what `trioserve --version`, `--help` and `import trioserve` take, next to a bare interpreter.
A cold start has a cache directory of its own that holds the fetched model files and nothing else,
so kernels are compiled and tokenizers converted; a warm start follows on the same directory. The
user's cache is not touched. Files are in the system's page cache in both cases.

`--imports` adds what the parent and its worker import, package by package, from one more start
under `python -X importtime`, which is slower than the others; its times are for comparing packages
with each other.

    python bench/startup.py [--cold 2] [--warm 5] [--imports] [-- MODEL.toml ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio
from lib import imports
from lib.answers import read_answer
from lib.client import Target, Workload, closed_loop, exchange, get_json
from lib.output import add_output_options, conditions, read_baseline, write_result
from lib.proc import memory_of_tree
from lib.server import free_port, server, trioserve
from lib.stats import median_of

PORT_POLL_S = 0.002
READY_POLL_S = 0.02  # each poll costs the starting server a little
REQUEST_TIMEOUT_S = 120.0
LOAD_STREAMS = 8
# Of the cache only these survive into a cold start: they are fetched, not made.
FETCHED = ("wheels",)


def short_commands(repeat: int) -> dict[str, dict[str, float]]:
    """Wall milliseconds of commands that do nothing heavy; the fastest and the median."""
    commands = {
        "bare python": [sys.executable, "-c", "pass"],
        "import trioserve": [sys.executable, "-c", "import trioserve"],
        "trioserve --version": [*trioserve(), "--version"],
        "trioserve --help": [*trioserve(), "--help"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeat + 1):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if turn:  # the first has files to read
                times[name].append((time.perf_counter() - began) * 1e3)
    return {
        name: {"median_ms": round(statistics.median(found), 2), "min_ms": round(min(found), 2)}
        for name, found in times.items()
    }


@contextlib.contextmanager
def cache_with_model() -> Iterator[dict[str, str]]:
    """An environment whose cache holds the user's fetched files, by link, and nothing made."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with tempfile.TemporaryDirectory(prefix="trioserve-bench-") as directory:
        ours = Path(directory) / "trioserve"
        ours.mkdir()
        for name in FETCHED:
            source = user / "trioserve" / name
            source.mkdir(parents=True, exist_ok=True)  # what is fetched now is there next time
            (ours / name).symlink_to(source)
        hub = os.environ.get("HF_HOME") or str(user / "huggingface")
        env = {**os.environ, "XDG_CACHE_HOME": directory, "HF_HOME": hub}
        # An installation has its byte code; a checkout gets it by the first start, if it may.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        yield env


async def start_once(
    arguments: list[str], env: dict[str, str], deadline_s: float, num_requests: int
) -> dict[str, Any]:
    """Start, take the times from the command on, load, stop.

    Raises:
        SystemExit: the server ended, gave no token, or was not ready in time.
    """
    port = free_port()
    target = Target.of(f"http://127.0.0.1:{port}")
    began = time.perf_counter()
    with server(arguments, env, port) as process, fail_after(deadline_s):
        while not await is_open(target):
            check_runs(process)
            await trio.sleep(PORT_POLL_S)
        port_open_s = time.perf_counter() - began
        while (await get_json(target, "/health/ready"))[0] != 200:
            check_runs(process)
            await trio.sleep(READY_POLL_S)
        ready_s = time.perf_counter() - began
        startup = (await get_json(target, "/startup"))[1]
        workload = workload_for(startup)
        first = read_answer(
            await exchange(target, workload.request(target, "first"), REQUEST_TIMEOUT_S)
        )
        if first.failure is not None:
            raise SystemExit(f"startup: the first request failed: {first.failure}")
        result = {
            "port_open_s": round(port_open_s, 4),
            "ready_s": round(ready_s, 4),
            "first_token_s": round(first.chunk_times[0] - began, 4),
            "ready_by_own_account_s": round(startup["ready_after_s"], 4),
            "stages_s": {
                stage["name"]: round(stage["seconds"], 4)
                for stage in startup["stages"]
                if stage["seconds"] is not None
            },
            "memory_ready": memory_of_tree(process.pid),
        }
        if num_requests:
            requests = workload.requests(target, "load", num_requests)
            await closed_loop(target, requests, LOAD_STREAMS, REQUEST_TIMEOUT_S)
            result["memory_after_load"] = memory_of_tree(process.pid)
        result["stop_s"] = round(stop(process), 4)
    return result


async def import_times(
    arguments: list[str], env: dict[str, str], deadline_s: float
) -> dict[str, Any]:
    """Milliseconds and modules by package, of the parent and of its worker up to Ready."""
    with tempfile.NamedTemporaryFile("w+") as log:
        # The worker's lines come on the parent's stderr, marked as its log lines are.
        env = {**env, "PYTHONPROFILEIMPORTTIME": "1"}
        port = free_port()
        target = Target.of(f"http://127.0.0.1:{port}")
        with server(arguments, env, port, log=log) as process, fail_after(deadline_s):
            while not await is_open(target) or (await get_json(target, "/health/ready"))[0] != 200:
                check_runs(process)
                await trio.sleep(READY_POLL_S)
            stop(process)
        log.seek(0)
        lines = log.read().splitlines()
    ours = [line for line in lines if line.startswith("import time:")]
    workers = [line for line in lines if " worker: import time:" in line]
    return {"parent": imports.by_package(ours), "worker": imports.by_package(workers)}


def workload_for(startup: dict[str, Any]) -> Workload:
    """Short prompts and answers for the model that is served."""
    vocab_size = startup["info"]["vocab_size"]
    return Workload(
        model=startup["model"],
        kind="ids",
        size=64,
        max_tokens=32,
        vocabulary=range(min(300, vocab_size // 2), vocab_size),
        extra={},
    )


@contextlib.contextmanager
def fail_after(seconds: float) -> Iterator[None]:
    """As trio's, with an error that says what it is about."""
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError:
        raise SystemExit(f"startup: not done after {seconds:g} s; see --deadline") from None


def stop(process: subprocess.Popen) -> float:
    """Seconds from the signal to the end of the server, without open requests."""
    began = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    return time.perf_counter() - began


def check_runs(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        raise SystemExit(f"startup: the server ended with exit code {process.returncode}")


async def is_open(target: Target) -> bool:
    """Whether something accepts connections there."""
    with trio.socket.socket(target.family, socket.SOCK_STREAM) as sock:
        try:
            await sock.connect(target.address)
        except OSError:
            return False
        return True


async def measure_starts(args: argparse.Namespace) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Cold starts, each with a cache of its own; warm starts, and imports, after the last."""
    cold, warm, imported = [], [], {}
    for turn in range(max(args.cold, 1)):
        with cache_with_model() as env:
            found = await start_once(args.arguments, env, args.deadline, 0)
            if args.cold:
                cold.append(found)
            if turn < max(args.cold, 1) - 1:
                continue
            for _ in range(args.warm):
                found = await start_once(args.arguments, env, args.deadline, args.load_requests)
                warm.append(found)
            if args.imports:
                imported = await import_times(args.arguments, env, args.deadline)
    return cold, warm, imported


async def main(args: argparse.Namespace) -> dict[str, Any]:
    commands = short_commands(args.commands) if args.commands else {}
    cold, warm, imported = await measure_starts(args)
    median = {
        "commands": commands,
        "cold": median_of(cold),
        "warm": median_of(warm),
        "imports": imported,
    }
    return {
        "bench": "startup",
        "conditions": conditions(),
        "settings": {"run_arguments": args.arguments, "load_requests": args.load_requests},
        "median": {name: value for name, value in median.items() if value},
        "runs": {"cold": cold, "warm": warm},
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = {"type": int, "metavar": "N"}
    parser.add_argument("arguments", nargs="*", help="of trioserve run, after --")
    parser.add_argument("--commands", default=10, help="runs of each short command", **count)
    parser.add_argument("--cold", default=2, help="cold starts", **count)
    parser.add_argument("--warm", default=5, help="warm starts", **count)
    parser.add_argument("--load-requests", default=32, help="before memory is read again", **count)
    parser.add_argument("--deadline", type=float, default=600.0, metavar="S", help="of each start")
    parser.add_argument("--imports", action="store_true", help="also what is imported, by package")
    add_output_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    baseline = read_baseline(options)
    write_result(trio.run(main, options), options, baseline)
