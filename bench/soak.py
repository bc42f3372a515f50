"""Does the server's memory grow with the requests it has answered, or anything else stay behind?

Starts a server and makes thousands of tiny requests, of requests that are left at a random moment
(while sending, queued, prefilling, at the first token, decoding), and of requests in error. After
each round it waits until nothing is open and reads, of parent and worker, the memory that is theirs
alone (RssAnon + VmSwap) and what is still held: tasks, descriptors, connections, registry entries,
sequences, blocks. Exit status 1 if memory grows, a count stays up, or an answer was wrong.

    python bench/soak.py [--tiny 8000] [--aborted 8000] [--erroneous 4000] [-- MODEL.toml ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import trio
from attrs import asdict, define
from lib.client import Target, get_json, until_ready
from lib.misuse import KINDS, UNEXPECTED, Client, Limits, make_requests
from lib.output import add_output_options, conditions, write_result
from lib.proc import num_descriptors, own_bytes, tree_of
from lib.server import free_port, server
from lib.stats import slope

SIMULATED = [
    *("--set", "model.source=random:llama?num_layers=1&hidden_size=32"),
    *("--set", "device.kind=simulated"),
    *("--set", "cache.memory=4MiB"),  # 4096 tokens: sequences are preempted
    *("--set", "scheduler.max_num_seqs=16"),  # fewer than streams: requests wait
    *("--set", "scheduler.max_num_batched_tokens=128"),  # prompts take several steps
]
METRICS = {
    "tasks": "trioserve_tasks",
    "connections": "trioserve_http_connections",
    "requests_open": "trioserve_requests_open",
    "requests_running": "trioserve_requests_running",
    "requests_waiting": "trioserve_requests_waiting",
    "kv_cache_used": "trioserve_kv_cache_usage_ratio",
}
SETTLE_S = 30.0
CALM_S = 3.0
MIN_GROWTH_BYTES = 512 * 1024  # allocators move by that much and no request is to blame


@define
class Sample:
    """What is held after ``num_requests``, when nothing is open. ``counts`` must not change."""

    num_requests: int
    parent_bytes: int
    worker_bytes: int
    counts: dict[str, float]


async def counts_of(client: Client, pid: int) -> dict[str, float]:
    """The server's own counts, and what /proc counts of its processes."""
    _, body = await client.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    values = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if line)
    counts = {name: float(values[metric]) for name, metric in METRICS.items()}
    processes = tree_of(pid)
    counts["processes"] = len(processes)
    counts["parent_descriptors"] = num_descriptors(pid)
    counts["worker_descriptors"] = sum(num_descriptors(process) for process in processes[1:])
    return counts


async def sample(
    client: Client, pid: int, num_requests: int, base: dict[str, float] | None
) -> Sample:
    """Read everything once the counts are those of ``base``, or after SETTLE_S as they are.

    Without a base, once they have been the same for CALM_S: connections may close that late.
    """
    deadline = trio.current_time() + SETTLE_S
    counts = await counts_of(client, pid)
    while counts != base and trio.current_time() < deadline:
        await trio.sleep(0.1 if base is not None else CALM_S)
        before, counts = counts, await counts_of(client, pid)
        if base is None and counts == before:
            break
    processes = tree_of(pid)
    worker = sum(map(own_bytes, processes[1:]))
    return Sample(num_requests, own_bytes(pid), worker, counts)


def growth(samples: list[Sample]) -> dict[str, float]:
    """Bytes per request of both processes."""
    return {
        name: round(slope([(s.num_requests, getattr(s, name)) for s in samples]), 2)
        for name in ("parent_bytes", "worker_bytes")
    }


def faults_of(
    samples: list[Sample], phases: dict[str, Any], outcomes: dict[str, int], limit: float
) -> list[str]:
    """What is wrong, in sentences; empty for a server that leaves nothing behind."""
    faults = []
    for name, phase in phases.items():
        for process, per_request in phase["bytes_per_request"].items():
            total = per_request * phase["requests"]
            if per_request > limit and total > MIN_GROWTH_BYTES:
                faults.append(f"{process} grows by {per_request:g} bytes per request: {name}")
    base = samples[0].counts
    for name, value in samples[-1].counts.items():
        if value != base[name]:
            faults.append(f"{name}: {base[name]:g} before, {value:g} after")
    faults += [f"{count} times {what}" for what, count in outcomes.items() if UNEXPECTED in what]
    return faults


async def soak(target: Target, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """All phases against a server that is ready. Cancellation closes all connections."""
    _, startup = await get_json(target, "/startup")
    limits = Limits(startup["info"]["vocab_size"], startup["info"]["max_model_len"])
    client = Client(target)
    done = 0
    for kind in KINDS:
        await make_requests(target, kind, limits, args.warm_up, args.streams, f"{args.seed}/warm")
    samples = [await sample(client, pid, 0, None)]
    base = samples[0].counts
    outcomes: dict[str, int] = {}
    phases: dict[str, Any] = {}
    for kind in KINDS:
        began, first = time.perf_counter(), len(samples) - 1
        left = getattr(args, kind)
        while left > 0:
            num = min(args.round, left)
            seed = f"{args.seed}/{done}"
            found = await make_requests(target, kind, limits, num, args.streams, seed)
            for what, count in found.items():
                outcomes[f"{kind}: {what}"] = outcomes.get(f"{kind}: {what}", 0) + count
            left, done = left - num, done + num
            samples.append(await sample(client, pid, done, base))
        phases[kind] = {
            "requests": getattr(args, kind),
            "requests_per_s": round(getattr(args, kind) / (time.perf_counter() - began), 1),
            "bytes_per_request": growth(samples[first:]),
        }
    client.close()
    phases["all"] = {"requests": done, "bytes_per_request": growth(samples)}
    return {
        "faults": faults_of(samples, phases, outcomes, args.limit),
        "phases": phases,
        "first": asdict(samples[0]),
        "last": asdict(samples[-1]),
        "outcomes": dict(sorted(outcomes.items())),
        "samples": [[s.num_requests, s.parent_bytes, s.worker_bytes] for s in samples],
    }


async def main(args: argparse.Namespace) -> dict[str, Any]:
    told, port = conditions(), free_port()
    target = Target.of(f"http://127.0.0.1:{port}")
    arguments = args.arguments or SIMULATED
    with server(arguments, None, port) as process, trio.fail_after(args.deadline):
        await until_ready(target, process, args.deadline)
        result = await soak(target, process.pid, args)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "baseline")}
    found = {"bench": "soak", "conditions": told, "settings": settings}
    return found | {"verdict": "grows" if result["faults"] else "flat"} | result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = {"type": int, "metavar": "N"}
    parser.add_argument("arguments", nargs="*", help="of trioserve run, after --")
    parser.add_argument("--tiny", default=8000, help="requests for one token", **count)
    parser.add_argument("--aborted", default=8000, help="requests that are left", **count)
    parser.add_argument("--erroneous", default=4000, help="requests in error", **count)
    parser.add_argument("--warm-up", default=1500, help="of each kind, not counted", **count)
    parser.add_argument("--streams", default=32, help="at a time", **count)
    parser.add_argument("--round", default=250, help="requests between two readings", **count)
    parser.add_argument(
        "--limit", type=float, default=50.0, metavar="BYTES", help="per request, of each process"
    )
    parser.add_argument("--deadline", type=float, default=1800.0, metavar="S", help="of all")
    parser.add_argument("--seed", default="soak")
    add_output_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    found = trio.run(main, options)
    lines = [f"verdict: {found['verdict']}", *found["faults"]]
    write_result(found | {"median": found["phases"]}, options, None, lines)
    sys.exit(1 if found["faults"] else 0)
