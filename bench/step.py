"""What does a step cost, and where does the time go?

    python bench/step.py [--source SOURCE] [--weights int8] [--deterministic] [--seconds 1]

Runs the ModelRunner without HTTP, scheduler or pipes: decode steps by batch size and context, and
prefill. Prints one JSON object: milliseconds of the median step, split into layers (where they run
as one kernel), other matrix products, attention, the rest, and sampling (greedy). ``tokens_per_s``
is what these steps alone allow. The default source is the embedded SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import trio

from trioserve.config.schema import (
    DEFAULT_SOURCE,
    Config,
    EngineConfig,
    KernelsConfig,
    ModelConfig,
    SchedulerConfig,
)
from trioserve.core.batch import NewSequence, ScheduledBatch, ScheduledRow
from trioserve.core.stages import StageReporter
from trioserve.devices.cpu import detect, prepare_environment
from trioserve.models.resolve import resolve_model
from trioserve.sampling_params import SamplingParams

STEPS = {  # rows of (tokens in the cache, new tokens)
    "decode 1 at 160": [(160, 1)],
    "decode 1 at 2000": [(2000, 1)],
    "decode 8 at 160": [(160, 1)] * 8,
    "decode 32 at 160": [(160, 1)] * 32,
    "decode 32 at 1000": [(1000, 1)] * 32,
    "prefill 128": [(0, 128)],
    "prefill 4 x 128": [(0, 128)] * 4,
    "prefill 512": [(0, 512)],
    "mixed 31 + 256": [(160, 1)] * 31 + [(0, 256)],
}
BLOCK_SIZE = 16
PARTS = ("layers", "matrix products", "attention")


class Timed:
    """A callable whose time goes to one part."""

    def __init__(self, inner: Any, spent: dict[str, float], part: str) -> None:
        self._inner, self._spent, self._part = inner, spent, part

    def __call__(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = self._inner(*arguments)
        self._spent[self._part] += time.perf_counter() - started
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def instrument(runner: Any) -> dict[str, float]:
    """Have products and attention add to the times that are returned."""
    spent = dict.fromkeys(PARTS, 0.0)
    model, attention = runner._model, runner._attention
    if hasattr(model, "decoder"):  # all layers are one kernel, which cannot be looked into
        model.decoder = Timed(model.decoder, spent, "layers")
        model = model.model
    for layer in model.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            setattr(layer, name, Timed(getattr(layer, name), spent, "matrix products"))
    model.head = Timed(model.head, spent, "matrix products")
    attention.forward = Timed(attention.forward, spent, "attention")
    return spent


def batch_of(rows: list[tuple[int, int]], vocab_size: int) -> ScheduledBatch:
    """All rows enter and sample."""
    new, next_block = [], 0
    for index, (start, count) in enumerate(rows):
        length = start + count
        blocks = -(-length // BLOCK_SIZE) + 1  # room for the token that is sampled
        new.append(
            NewSequence(
                id=index,
                token_ids=[(31 * index + 7 * i) % vocab_size for i in range(length)],
                num_prompt_tokens=length,
                num_computed_tokens=start,
                block_ids=list(range(next_block, next_block + blocks)),
                sampling=SamplingParams(temperature=0.0),
                seed=0,
            )
        )
        next_block += blocks
    scheduled = [ScheduledRow(i, start, count, [], True) for i, (start, count) in enumerate(rows)]
    return ScheduledBatch(1, [], new, scheduled)


def measure(runner: Any, spent: dict[str, float], name: str, seconds: float) -> dict:
    """Run a step again and again; the median of each part."""
    rows = STEPS[name]
    first = batch_of(rows, runner.vocab_size)
    runner.sample(runner.execute(first))
    again = ScheduledBatch(2, [], [], first.rows)
    seen: dict[str, list[float]] = {part: [] for part in ("total", *PARTS, "rest", "sample")}
    ends = time.perf_counter() + seconds
    while len(seen["total"]) < 3 or time.perf_counter() < ends:
        spent.update(dict.fromkeys(PARTS, 0.0))
        started = time.perf_counter()
        handle = runner.execute(again)
        executed = time.perf_counter()
        runner.sample(handle)
        done = time.perf_counter()
        for part in PARTS:
            seen[part].append(spent[part])
        seen["rest"].append(executed - started - sum(spent.values()))
        seen["sample"].append(done - executed)
        seen["total"].append(done - started)
    runner.execute(ScheduledBatch(3, [new.id for new in first.new], [], []))
    tokens = sum(count for _, count in rows)
    return {
        "step": name,
        "count": len(seen["total"]),
        "ms": {part: round(1e3 * statistics.median(times), 2) for part, times in seen.items()},
        "best_ms": round(1e3 * min(seen["total"]), 2),
        "tokens_per_s": round(tokens / statistics.median(seen["total"]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=DEFAULT_SOURCE)
    parser.add_argument("--attention", choices=["numba", "torch"], default="numba")
    parser.add_argument(
        "--weights", choices=["auto", "fp32", "fp16", "int8", "packed"], default="auto"
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=1.0, help="per kind of step")
    arguments = parser.parse_args()
    settings = Config(
        model=ModelConfig(source=arguments.source, weights=arguments.weights),
        engine=EngineConfig(threads=arguments.threads, deterministic=arguments.deterministic),
        kernels=KernelsConfig(attention=arguments.attention),
        scheduler=SchedulerConfig(max_num_seqs=32),
    )

    async def resolve() -> Any:
        return await resolve_model(settings.model, report=lambda stage: None)

    resolved = trio.run(resolve)
    prepare_environment(settings)
    import torch

    from trioserve.core.model_runner import ModelRunner

    load = os.getloadavg()[0]
    runner = ModelRunner(resolved, settings)
    report = StageReporter(lambda stage: None)
    runner.load(report)
    longest = max(start + count for rows in STEPS.values() for start, count in rows) + BLOCK_SIZE
    most = max(
        sum(-(-(start + count) // BLOCK_SIZE) + 1 for start, count in rows)
        for rows in STEPS.values()
    )
    runner.init_kv_cache(most, longest)
    runner.warm_up(report)
    spent = instrument(runner)
    result = {
        "model": resolved.name,
        "weights": runner.info()["weights"],
        "attention": runner.info()["attention"],
        "processor": detect(settings).describe(),
        "torch": torch.__version__,
        "load_before": round(load, 1),
        "results": [measure(runner, spent, name, arguments.seconds) for name in STEPS],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
