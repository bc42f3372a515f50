"""What does the front end cost: processor time per streamed token and per small request, and what
do probes notice?

Starts a server whose worker only makes tokens up, so that the parent is what is measured: HTTP,
registry, detokenizing, events. The server has one processor to itself, the worker and the clients
share the others. Cases: 64 streams with a token every 20 ms each (`steady`), 64 streams as fast as
they can be had (`behind`), each with readiness probes beside it; small requests one after another
on one connection (`small`); a stream and probes while four bodies of 27 MB are refused (`refused`).
Exit status 1 where a target is missed.

    python bench/http_overhead.py [--seconds 8] [--streams 64] [--repeat 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import trio
from attrs import define, field
from lib.client import Target, get_json
from lib.misuse import CHAT, COMPLETIONS, Client, post
from lib.output import add_output_options, conditions, read_baseline, table, write_result
from lib.proc import cpu_s_of, name_of, tree_of
from lib.server import free_port, server
from lib.stats import median_of, percentile

FLOOD = Path(__file__).parent / "lib" / "flood.py"
PROBE_EVERY_S = 0.02
SETTLE_S = 1.0
LARGE_BYTES = 27 * 2**20
NUM_LARGE = 4
STREAM_STEP_S = 0.02
SETTINGS = [
    *("--set", "model.source=random:llama?num_layers=1&hidden_size=32&max_position=32768"),
    *("--set", "device.kind=simulated"),
    *("--set", "cache.memory=1GiB"),
    *("--set", "log.stats_interval_s=0"),
]
# case and figure, the bound, whether it is the least
TARGETS = (
    ("steady", "us_per_token", 90.0, False),
    ("behind", "tokens_per_core_s", 30_000.0, True),
    ("steady", "probe_p99_ms", 50.0, False),
    ("behind", "probe_p99_ms", 50.0, False),
    ("small", "us_per_request", 1000.0, False),
    ("small", "us_per_scrape", 50_000.0, False),
    ("refused", "probe_worst_ms", 200.0, False),
    ("refused", "gap_worst_ms", 300.0, False),
)


@define
class Running:
    """A server that is ready."""

    target: Target
    pid: int
    probes_s: list[float] = field(factory=list)

    async def figure(self, name: str) -> float:
        """The value of a series without labels."""
        client = Client(self.target)
        _, body = await client.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        client.close()
        values = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if line)
        return float(values[f"trioserve_{name}"])

    async def probe(self) -> None:
        """Ask for readiness, each time on a new connection. Until cancelled."""
        while True:
            client = Client(self.target)
            began = trio.current_time()
            status, _ = await client.ask(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            self.probes_s.append(trio.current_time() - began)
            client.close()
            if status != 200:
                raise SystemExit(f"http_overhead: readiness answered {status}")
            await trio.sleep(PROBE_EVERY_S)

    def probes(self) -> dict[str, float]:
        return {
            "probe_p50_ms": round(percentile(self.probes_s, 0.5) * 1e3, 2),
            "probe_p99_ms": round(percentile(self.probes_s, 0.99) * 1e3, 2),
            "probe_worst_ms": round(max(self.probes_s) * 1e3, 2),
        }


@contextlib.asynccontextmanager
async def running(num_seqs: int, step_s: float) -> AsyncIterator[Running]:
    """A server with a processor of its own, if there are two."""
    port = free_port()
    target = Target.of(f"http://127.0.0.1:{port}")
    settings = [
        *("--set", f"scheduler.max_num_seqs={num_seqs}"),
        *("--set", f"device.simulated_step_s={step_s}"),
    ]
    mine, *others = sorted(os.sched_getaffinity(0))
    with server([*SETTINGS, *settings], None, port) as process:
        while (await get_json(target, "/health/ready"))[0] != 200:
            if process.poll() is not None:
                raise SystemExit(f"http_overhead: the server ended with {process.returncode}")
            await trio.sleep(0.1)
        if others:
            os.sched_setaffinity(process.pid, {mine})
            for pid in tree_of(process.pid)[1:]:
                if name_of(pid) == "worker":
                    os.sched_setaffinity(pid, others)
        yield Running(target, process.pid)


@contextlib.contextmanager
def flood(port: int, num_streams: int) -> Iterator[subprocess.Popen]:
    """Streams in a process of their own."""
    command = [sys.executable, str(FLOOD), str(port), str(num_streams), "12000"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def streams(args: argparse.Namespace, step_s: float) -> dict[str, Any]:
    """Many streams: what a token costs, and how probes fare beside them."""
    async with running(args.streams, step_s) as found, trio.open_nursery() as nursery:
        with flood(found.target.port, args.streams) as clients:
            nursery.start_soon(found.probe)
            while await found.figure("requests_running") < args.streams:  # noqa: ASYNC110
                await trio.sleep(0.05)
            await trio.sleep(SETTLE_S)
            found.probes_s.clear()
            tokens, began = await found.figure("generation_tokens_total"), trio.current_time()
            cpu_s = cpu_s_of(found.pid)
            await trio.sleep(args.seconds)
            cpu_s = cpu_s_of(found.pid) - cpu_s
            took_s = trio.current_time() - began
            tokens = await found.figure("generation_tokens_total") - tokens
            lifetime_tokens = await found.figure("generation_tokens_total")
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                out, _ = await trio.to_thread.run_sync(clients.communicate)
            told = json.loads(out)
    if told["refused"]:
        raise SystemExit(f"http_overhead: {told['refused']} streams were refused")
    return {
        "us_per_token": round(cpu_s / tokens * 1e6, 1),
        "tokens_per_core_s": round(tokens / cpu_s),
        "tokens_per_s": round(tokens / took_s),
        "tokens_per_event": round(lifetime_tokens / told["events"], 2),
        "server_cpu_share": round(cpu_s / took_s, 3),
        **found.probes(),
    }


async def small(args: argparse.Namespace) -> dict[str, Any]:
    """Requests for one token, one after another on one connection, and scrapes."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    async with running(8, 0.0) as found:
        client = Client(found.target)
        request = post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1})
        chat = post(CHAT, body)
        if (await client.ask(chat))[0] == 200:  # a model without a template has no chat
            request = chat
        for _ in range(50):
            await client.ask(request)
        cpu_s, began = cpu_s_of(found.pid), trio.current_time()
        for _ in range(args.requests):
            status, _ = await client.ask(request)
            if status != 200:
                raise SystemExit(f"http_overhead: a small request was answered with {status}")
        cpu_s, took_s = cpu_s_of(found.pid) - cpu_s, trio.current_time() - began
        scrapes_s = cpu_s_of(found.pid)
        for _ in range(args.requests // 5):
            await client.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        scrapes_s = cpu_s_of(found.pid) - scrapes_s
        client.close()
    return {
        "us_per_request": round(cpu_s / args.requests * 1e6, 1),
        "ms_per_answer": round(took_s / args.requests * 1e3, 2),
        "us_per_scrape": round(scrapes_s / (args.requests // 5) * 1e6, 1),
        "chat": float(request is chat),
    }


async def refused(args: argparse.Namespace) -> dict[str, Any]:
    """Large bodies that are refused, again and again, while a stream runs and probes come."""
    body = b'{"messages": [{"role": "user", "content": "' + b"x" * LARGE_BYTES + b'"}]}'
    raw = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % CHAT.encode()
    raw += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    gaps_s: list[float] = []
    answers: dict[int, int] = {}

    async def send_large(target: Target) -> None:
        while True:
            client = Client(target)
            status, _ = await client.ask(raw)
            client.close()
            answers[status] = answers.get(status, 0) + 1
            await trio.sleep(0.05)

    async def watch(target: Target) -> None:
        long = {"prompt": "hello", "max_tokens": 12000, "ignore_eos": True, "stream": True}
        stream = await Client(target).send(post(COMPLETIONS, long))
        last = math.nan
        while await stream.receive_some(65536):
            now = trio.current_time()
            if not math.isnan(last):
                gaps_s.append(now - last)
            last = now

    async with running(8, STREAM_STEP_S) as found, trio.open_nursery() as nursery:
        nursery.start_soon(watch, found.target)
        nursery.start_soon(found.probe)
        await trio.sleep(SETTLE_S)
        found.probes_s.clear()
        gaps_s.clear()
        for _ in range(NUM_LARGE):
            nursery.start_soon(send_large, found.target)
        cpu_s = cpu_s_of(found.pid)
        await trio.sleep(args.seconds)
        cpu_s = cpu_s_of(found.pid) - cpu_s
        nursery.cancel_scope.cancel()
    # A client that is still sending when it is refused may lose the answer to a reset: status 0.
    return {
        "refused": sum(answers.values()),
        "gap_worst_ms": round(max(gaps_s) * 1e3, 2),
        "gap_p50_ms": round(percentile(gaps_s, 0.5) * 1e3, 2),
        "server_cpu_share": round(cpu_s / args.seconds, 3),
        **found.probes(),
    }


async def main(args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for _ in range(args.repeat):
        run: dict[str, Any] = {}
        for name in args.only.split(",") if args.only else ("steady", "behind", "small", "refused"):
            match name:
                case "steady":
                    run[name] = await streams(args, STREAM_STEP_S)
                case "behind":
                    run[name] = await streams(args, 0.0)
                case "small":
                    run[name] = await small(args)
                case "refused":
                    run[name] = await refused(args)
                case _:
                    raise SystemExit(f"http_overhead: there is no case {name}")
            print(name, run[name], file=sys.stderr, flush=True)
        runs.append(run)
    median = median_of(runs)
    judged = [
        {"case": case, "figure": figure, "limit": limit, "found": median[case][figure]}
        | {"met": median[case][figure] >= limit if least else median[case][figure] <= limit}
        for case, figure, limit, least in TARGETS
        if case in median
    ]
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "baseline")}
    return {
        "bench": "http_overhead",
        "conditions": conditions() | {"scheduling": scheduling()},
        "settings": settings,
        "targets": judged,
        "runs": runs,
        "median": median,
    }


def scheduling() -> str:
    """Under which policy of the kernel this and all it started ran."""
    policies = {os.SCHED_OTHER: "normal", os.SCHED_RR: "real time (RR)", os.SCHED_FIFO: "FIFO"}
    return policies.get(os.sched_getscheduler(0), "other")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each case")
    parser.add_argument("--streams", type=int, default=64, metavar="N")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="small ones")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="medians are told")
    parser.add_argument("--only", metavar="CASES", help="names of cases, with commas")
    add_output_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    baseline = read_baseline(options)
    result = trio.run(main, options)
    told = [
        (f"{t['case']} {t['figure']}", t["found"], t["limit"], "met" if t["met"] else "MISSED")
        for t in result["targets"]
    ]
    write_result(result, options, baseline, ["", *table([("target", "found", "limit", ""), *told])])
    sys.exit(0 if all(target["met"] for target in result["targets"]) else 1)
