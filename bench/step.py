"""What does a step cost, and where does the time go?

Runs a worker's step loop without HTTP: scheduler, model, sampler, and a pipe that another process
reads. Decode by number of streams and length of context, prefill, and both in one step. Prints
milliseconds of a typical step by part, and for decode the keys and values that a step reads, in
GB/s beside a measured copy. ``tokens_per_s`` is what these steps alone allow.

    python bench/step.py [--streams 1,8,32] [--contexts 128,8192] [--source SOURCE] [--weights int8]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import trio
from attrs import asdict
from lib.machine import COPIED_BYTES, SIDE, measure_machine
from lib.output import conditions, table, write_lines
from lib.step_loop import PARTS, ROOM, Case, StepLoop, cache_bytes_per_token

from trioserve.config.schema import (
    DEFAULT_SOURCE,
    CacheConfig,
    Config,
    EngineConfig,
    KernelsConfig,
    ModelConfig,
    SchedulerConfig,
)
from trioserve.devices.cpu import detect, prepare_environment
from trioserve.devices.instructions import LEVELS
from trioserve.models.resolve import resolve_model
from trioserve.models.spec import ModelSpec

BLOCK_SIZE = 16
BUDGET = SchedulerConfig().max_num_batched_tokens
PREFILLS = (
    Case(prompts=1, tokens=128),
    Case(prompts=4, tokens=BUDGET // 4),
    Case(prompts=1, tokens=BUDGET),
    Case(streams=31, context=128, prompts=1, tokens=BUDGET // 2),
)


def cases_of(args: argparse.Namespace, spec: ModelSpec) -> list[Case]:
    """The kinds of step, contexts cut to what the model and ``--memory`` allow."""
    block_bytes = cache_bytes_per_token(spec) * BLOCK_SIZE
    num_blocks = int(args.memory * 2**30) // block_bytes
    cases = list(PREFILLS) if args.prefill and spec.max_position > BUDGET else []
    for streams in reversed(args.streams):
        fits = (num_blocks // streams - 2) * BLOCK_SIZE
        longest = min(fits, spec.max_position) - ROOM - 2
        contexts = {min(context, longest) for context in args.contexts}
        cases[:0] = [Case(streams, context) for context in sorted(contexts) if context > 1]
    return cases


def settings_of(args: argparse.Namespace, cases: list[Case], spec: ModelSpec) -> Config:
    """What the worker is told: a cache for the largest case, and no reuse of prefixes."""
    most = max(case.num_blocks(BLOCK_SIZE) for case in cases) + BUDGET // BLOCK_SIZE
    size = most * BLOCK_SIZE * cache_bytes_per_token(spec)
    return Config(
        model=ModelConfig(source=args.source, weights=args.weights),
        engine=EngineConfig(threads=args.threads, deterministic=args.deterministic),
        kernels=KernelsConfig(attention=args.attention, instructions=args.instructions),
        cache=CacheConfig(memory=size, block_size=BLOCK_SIZE, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max(32, *args.streams)),
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the machine and all cases.

    Raises:
        RuntimeError: a step did something else than it should.
        TrioserveError: the model cannot be served.
    """

    async def resolve() -> Any:
        return await resolve_model(ModelConfig(source=args.source), report=lambda stage: None)

    resolved = trio.run(resolve)
    cases = cases_of(args, resolved.spec)
    settings = settings_of(args, cases, resolved.spec)
    told = conditions()
    prepare_environment(settings)
    import torch

    torch.set_num_threads(args.threads)
    limits = {"num_bytes": args.copied_bytes, "side": args.side}
    if args.instructions != "auto":
        limits["used"] = LEVELS[args.instructions].needs
    machine = measure_machine(**limits)
    loop = StepLoop(resolved, settings)
    try:
        lines = [loop.measure(case, args.seconds) for case in cases]
        info, runner = loop.runner.info(), loop.runner
        again = measure_machine(**limits)
    finally:
        loop.close()
    machine = machine.or_better(again)
    for line in lines:
        if "kv_gb_per_s" in line:
            line["kv_share_of_copy"] = round(line["kv_gb_per_s"] / machine.copy_gb_per_s, 2)
    return {
        "bench": "step",
        "conditions": told | {"torch": torch.__version__, "device": detect(settings).describe()},
        "model": {
            "name": resolved.name,
            **info,
            "weight_bytes": runner.weight_bytes,
            "product_bytes": loop.product_bytes,
            "layer_weights": loop.layer_weights,
            "head_weights": loop.head_weights,
            "kv_bytes_per_token": runner.kv_bytes_per_token,
            "attention_width": resolved.spec.num_heads * resolved.spec.head_dim,
            "num_layers": resolved.spec.num_layers,
        },
        "machine": asdict(machine),
        "results": lines,
    }


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table."""
    rows: list[tuple[Any, ...]] = [("ms of a step", "total", *PARTS, "tokens/s", "KV MB", "GB/s")]
    for line in result["results"]:
        read = (f"{line.get('kv_mb', 0):,.0f}", line.get("kv_gb_per_s", "-"))
        parts = (f"{line['ms'][name]:.2f}" for name in ("total", *PARTS))
        rows.append((line["case"], *parts, line["tokens_per_s"], *read))
    copy = f"a copy moves {result['machine']['copy_gb_per_s']} GB/s, read and written"
    return [*table(rows), copy]


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that every script which measures steps takes."""
    parser.add_argument("--source", default=DEFAULT_SOURCE)
    parser.add_argument("--attention", choices=["auto", "numba", "torch"], default="auto")
    parser.add_argument("--weights", default="auto", help="as [model] weights")
    parser.add_argument(
        "--instructions",
        choices=["auto", *LEVELS],
        default="auto",
        help="as [kernels] instructions",
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=1.5, help="of each kind of step")
    parser.add_argument(
        "--memory", type=float, default=4.0, metavar="GIB",
        help="most for the cache; longer contexts are cut to it (default: 4)",
    )  # fmt: skip
    parser.add_argument("--copied-bytes", type=int, default=COPIED_BYTES, metavar="N")
    parser.add_argument("--side", type=int, default=SIDE, metavar="N", help="of square products")
    parser.add_argument("--json", metavar="FILE", help="write everything there; - for stdout")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32], metavar="N,…")
    parser.add_argument("--contexts", type=numbers, default=[128, 8192], metavar="N,…")
    parser.add_argument("--no-prefill", dest="prefill", action="store_false")
    add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    result = run(options)
    write_lines(result, options.json, lines_of(result))
