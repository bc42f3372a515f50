"""How fast does a server answer under load: tokens per second, TTFT, ITL, TPOT, end to end?

Works with any server of the OpenAI API that is already running. Closed loop: --concurrency streams
at once. Open loop: --rate requests per second on average, at random times (Poisson). Every prompt
is different and made of random token ids, so that no cache helps; servers that refuse ids get
words, fitted to the same number of tokens. Temperature 0, and no stop before --max-tokens.

Two other loads tell times to the first token, one request after another: --shared-prefix P sends
pairs that begin with the same P tokens, --idle S waits so long before a request.

    python bench/serve.py [--base-url http://127.0.0.1:8000] [--concurrency 8] [--rate 2.5]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from typing import Any

import trio
from attrs import frozen
from lib.answers import read_answer, summarize
from lib.client import (
    Request,
    ServerError,
    Target,
    Workload,
    closed_loop,
    describe_server,
    get_json,
    open_loop,
    poisson_offsets,
    settle,
)
from lib.moments import Kinds, after_idle, compared, shared_prefix
from lib.output import add_output_options, conditions, read_baseline, write_result
from lib.proc import beyond_weights_and_cache, cpu_s_of_tree, memory_of_tree
from lib.stats import median_of

KINDS = ("ids", "text", "chat")
SPECIAL_IDS = 300  # ids under this may be control tokens or single bytes
TAIL = 16  # tokens that a prompt has after a shared prefix
PREFIX, IDLE = ("first", "second"), ("warm", "idle")
COMMON_VOCABULARY = 30_000  # nearly every vocabulary has so many


@frozen
class Load:
    """How requests are sent: as prefixes or pauses want it, else at a ``rate``, else closed."""

    num_streams: int
    rate: float | None
    num_requests: int
    timeout_s: float
    shares_prefix: bool = False
    idle_s: float | None = None


async def run_load(
    target: Target, workload: Workload, load: Load, seed: str, pid: int | None = None
) -> dict[str, Any]:
    """Send the load once and summarize it, with the processor time that it took.

    Cancellation closes all connections.
    """
    one_by_one = load.shares_prefix or load.idle_s is not None
    count = 0 if one_by_one else load.num_requests
    requests = list(workload.requests(target, seed, count))
    gc.collect()
    gc.disable()  # what is received is kept to the end: there is nothing to find
    server_cpu_s = cpu_s_of_tree(pid) if pid is not None else 0.0
    cpu_s, began = time.process_time(), time.perf_counter()
    try:
        sent = await send(target, workload, load, seed, requests)
    finally:
        gc.enable()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began
    kinds, outcomes = [kind for kind, _ in sent], [read_answer(exchange) for _, exchange in sent]
    result = summarize(outcomes)
    if one_by_one:
        name, pair = ("prefix", PREFIX) if load.shares_prefix else ("idle", IDLE)
        result[name] = compared(kinds, outcomes, pair)
    result["client"] = {
        "cpu_s": round(cpu_s, 3),
        "cpu_share": round(cpu_s / wall_s, 4),  # of one processor
        "worst_lag_ms": round(max(exchange.lag_s for _, exchange in sent) * 1e3, 3),
    }
    if pid is not None:
        used = round(cpu_s_of_tree(pid) - server_cpu_s, 2)
        memory = memory_of_tree(pid)
        result["server"] = {"cpu_s": used, "memory": memory}
        _, startup = await get_json(target, "/startup")
        if "worker" in memory and startup and startup.get("info"):
            of_worker = beyond_weights_and_cache(memory["worker"], startup["info"])
            result["server"]["worker_memory"] = of_worker
    return result


async def send(
    target: Target, workload: Workload, load: Load, seed: str, requests: list[Request]
) -> Kinds:
    """All exchanges, each with what kind of request it was; "" where all are the same."""
    if load.shares_prefix:
        return await shared_prefix(target, workload, seed, load.num_requests, load.timeout_s)
    if load.idle_s is not None:
        return await after_idle(
            target, workload, seed, load.num_requests, load.idle_s, load.timeout_s
        )
    if load.rate is None:
        exchanges = await closed_loop(target, requests, load.num_streams, load.timeout_s)
    else:
        offsets = poisson_offsets(load.rate, load.num_requests, seed)
        exchanges = await open_loop(target, requests, offsets, load.timeout_s)
    return [("", exchange) for exchange in exchanges]


def add_up(runs: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, int]]:
    """Medians over the runs, and all failures by kind, which medians would hide."""
    failures: dict[str, int] = {}
    for run in runs:
        for kind, count in run["failures"].items():
            failures[kind] = failures.get(kind, 0) + count
    without = [{key: run[key] for key in run if key != "failures"} for run in runs]
    return median_of(without), failures


async def main(args: argparse.Namespace) -> dict[str, Any]:
    told, target = conditions(), Target.of(args.base_url)
    model, vocab_size = await describe_server(target, args.wait)
    high = args.vocab_size or vocab_size or COMMON_VOCABULARY
    workload = Workload(
        model=args.model or model,
        kind="ids",
        size=args.prompt_tokens if args.shared_prefix is None else args.shared_prefix + TAIL,
        tail=TAIL,
        max_tokens=args.max_tokens,
        vocabulary=range(min(SPECIAL_IDS, high // 2), high),
        extra=args.extra,
    )
    kinds = list(KINDS) if args.prompt == "auto" else [args.prompt]
    workload, refused = await settle(target, workload, kinds, f"{args.seed}/try", args.timeout)
    for line in refused:
        print(f"refused {line}", file=sys.stderr)
    load = Load(
        args.concurrency,
        args.rate,
        args.requests,
        args.timeout,
        shares_prefix=args.shared_prefix is not None,
        idle_s=args.idle,
    )
    warm_up = list(workload.requests(target, f"{args.seed}/warm", args.warm_up))
    await closed_loop(target, warm_up, args.concurrency, args.timeout)
    runs = [
        await run_load(target, workload, load, f"{args.seed}/{turn}", args.pid)
        for turn in range(args.repeat)
    ]
    median, failures = add_up(runs)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "baseline")}
    return {
        "bench": "serve",
        "conditions": told,
        "settings": settings | {"model": workload.model, "prompts": workload.kind},
        "failures": failures,
        "median": median,
        "runs": runs,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--concurrency", type=positive, default=1, metavar="N", help="closed loop")
    parser.add_argument("--rate", type=float, metavar="PER_S", help="open loop instead")
    parser.add_argument(
        "--shared-prefix", type=positive, metavar="P", help="pairs that begin with the same tokens"
    )
    parser.add_argument("--idle", type=float, metavar="S", help="pauses before requests")
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="default: 4 per stream, or 32; pairs, pauses: 5",
    )
    parser.add_argument("--prompt-tokens", type=positive, default=128, metavar="P")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="M")
    parser.add_argument(
        "--prompt", choices=("auto", *KINDS), default="auto", help="as what to send it"
    )
    parser.add_argument(
        "--vocab-size", type=positive, help=f"default: asked, else {COMMON_VOCABULARY}"
    )
    parser.add_argument(
        *("--extra", "-e"), type=json.loads, default={}, metavar="JSON",
        help="fields to add to each request; null takes one out",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", type=int, metavar="N", help="not counted; default: one per stream"
    )
    parser.add_argument(
        "--repeat", type=positive, default=1, metavar="K", help="runs; gives medians"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request")
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="for readiness")
    parser.add_argument("--pid", type=positive, help="the server's: adds its memory and CPU time")
    parser.add_argument("--seed", default=None, help="default: another each time")
    add_output_options(parser)
    args = parser.parse_args(arguments)
    if args.rate is not None and args.rate <= 0:
        parser.error("--rate must be over 0")
    if not isinstance(args.extra, dict):
        parser.error("--extra must be a JSON object")
    # A server may remember the prompts of an earlier call, so the same seed is not the default.
    args.seed = args.seed or os.urandom(4).hex()
    one_by_one = args.shared_prefix is not None or args.idle is not None
    if sum(map(bool, (args.rate, args.shared_prefix, args.idle))) > 1:
        parser.error("--rate, --shared-prefix and --idle are loads of their own: name one")
    if args.requests is None and one_by_one:
        args.requests = 5
    if args.requests is None:
        args.requests = 32 if args.rate is not None else 4 * args.concurrency
    if args.warm_up is None:
        args.warm_up = args.concurrency
    return args


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    options = parse()
    baseline = read_baseline(options)
    try:
        result = trio.run(main, options)
    except ServerError as error:
        sys.exit(f"serve: {error}")
    lines = [f"failed {count} times: {kind}" for kind, count in result["failures"].items()]
    write_result(result, options, baseline, lines)
    sys.exit(1 if result["failures"] else 0)
