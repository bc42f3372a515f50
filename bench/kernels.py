"""How fast are attention over the paged cache and the products with narrow weights?

    python bench/kernels.py [--threads 2] [--seconds 0.3]

Shapes of SmolLM2-135M (9 heads, 3 KV heads of 64) and of an 8B model (32 heads, 8 KV heads of 128),
blocks of 16 in shuffled order. Several layers' caches are gone through in turn so that they do not
stay in the core's own cache. Prints one JSON object: microseconds a call, GB/s of keys and values
read and GFLOP/s of useful products. ``prepare_us`` is once a step, not once a layer. ``products``
are all projections of SmolLM2-135M by number of rows: panels (our kernel) and FBGEMM;
``code_products`` the same over 4- and 8-bit codes, ``best_logits`` what a greedy row needs,
``gate_values`` the activation of one row. ``tile_peak_gflops`` is what the tile unit does with
operands that it already has.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trioserve.config.schema import Config, EngineConfig
from trioserve.devices.cpu import detect, prepare_environment

SHAPES = {"smollm2-135m": (9, 3, 64), "8b": (32, 8, 128)}
BATCHES = {  # rows of (tokens in the cache, new tokens)
    "decode 1 at 160": [(160, 1)],
    "decode 1 at 8000": [(8000, 1)],
    "decode 8 at 160": [(160, 1)] * 8,
    "decode 32 at 160": [(160, 1)] * 32,
    "decode 32 at 1000": [(1000, 1)] * 32,
    "prefill 128": [(0, 128)],
    "prefill 4 x 128": [(0, 128)] * 4,
    "prefill 512": [(0, 512)],
    "prefill 512 at 4000": [(4000, 512)],
    "mixed 31 + 128": [(160, 1)] * 31 + [(0, 128)],
}
PROJECTIONS = [(960, 576, 30), (576, 576, 30), (3072, 576, 30), (576, 1536, 30), (49152, 576, 1)]
BLOCK_SIZE = 16
CYCLED_BYTES = 50e6
SLOW = {"torch": 400_000}  # new tokens × context beyond which a backend is not waited for


def contexts(rows: list[tuple[int, int]], num_blocks: int):
    """A step over shuffled blocks."""
    import torch

    from trioserve.models.attention import BatchContext

    shuffled = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    width = max(-(-(start + count) // BLOCK_SIZE) for start, count in rows)
    tables = np.zeros((len(rows), width), np.int32)
    slots, positions, used = [], [], 0
    for line, (start, count) in enumerate(rows):
        blocks = -(-(start + count) // BLOCK_SIZE)
        tables[line, :blocks] = shuffled[used : used + blocks]
        used += blocks
        where = np.arange(start, start + count)
        positions.append(where)
        slots.append(
            tables[line, where // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + where % BLOCK_SIZE
        )
    return BatchContext(
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=torch.from_numpy(np.concatenate(slots)),
        query_starts=np.cumsum([0, *(count for _, count in rows)]).astype(np.int32),
        row_starts=np.array([start for start, _ in rows], np.int32),
        row_tables=np.arange(len(rows), dtype=np.int32),
        block_tables=tables,
    )


def best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of one call, the least of all that fit into ``seconds``; three at least."""
    call()
    least, ends, count = float("inf"), time.perf_counter() + seconds, 0
    while count < 3 or time.perf_counter() < ends:
        started = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - started)
        count += 1
    return least


def measure(name: str, shape: str, batch: str, threads: int, seconds: float) -> dict:
    """One line of the result."""
    import torch

    from trioserve.models.attention import KVCacheSpec, make_backend

    heads, kv_heads, head_dim = SHAPES[shape]
    rows = BATCHES[batch]
    tokens = sum(count for _, count in rows)
    read = sum(2 * kv_heads * head_dim * 4 * (start + count) for start, count in rows)
    flops = sum(
        4 * heads * head_dim * (count * start + count * (count + 1) / 2) for start, count in rows
    )
    num_blocks = sum(-(-(start + count) // BLOCK_SIZE) for start, count in rows)
    layers = max(1, min(30, int(CYCLED_BYTES / read)))
    spec = KVCacheSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    backend = make_backend(name, [spec] * layers, BLOCK_SIZE, threads)
    backend.init_cache(num_blocks)
    context = contexts(rows, num_blocks)
    whole = torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    query, key, value = whole.split((heads, kv_heads, kv_heads), dim=1)
    backend.prepare(context)

    def all_layers() -> None:
        for layer in range(layers):
            backend.forward(layer, query, key, value, context)

    spent = best(all_layers, seconds) / layers
    return {
        "backend": name,
        "shape": shape,
        "batch": batch,
        "us": round(spent * 1e6, 1),
        "gb_per_s": round(read / spent / 1e9, 1),
        "gflops": round(flops / spent / 1e9, 1),
        "prepare_us": round(best(lambda: backend.prepare(context), seconds / 10) * 1e6, 1),
    }


def products(rows: int, threads: int, seconds: float) -> dict:
    """All projections of one step, by our kernel and by FBGEMM; weights as in a model."""
    import torch

    from trioserve.kernels.cpu.panel_product import PanelProduct, Panels
    from trioserve.kernels.cpu.runtime import Team, cache_directory
    from trioserve.models.linear import PackedFp16Linear

    product = PanelProduct(Team(threads, cache_directory()))
    weights = [torch.randn(out, inputs) for out, inputs, count in PROJECTIONS for _ in range(count)]
    x = {inputs: torch.randn(rows, inputs) for _, inputs, _ in PROJECTIONS}
    panels = [Panels.half(weight) for weight in weights]
    packed = [(PackedFp16Linear(weight), weight.shape[1]) for weight in weights]
    parameters = sum(weight.numel() for weight in weights)
    ours = best(lambda: [product(x[panel.inputs], panel) for panel in panels], seconds)
    theirs = best(lambda: [linear(x[inputs]) for linear, inputs in packed], seconds)
    return {
        "rows": rows,
        "panels_ms": round(ours * 1e3, 2),
        "fbgemm_ms": round(theirs * 1e3, 2),
        "panels_gflops": round(2e-9 * rows * parameters / ours, 1),
        "panels_gb_per_s": round(2e-9 * parameters / ours, 1),
    }


def code_products(bits: int, rows: int, team: Any, seconds: float) -> dict:
    """All projections of one step over codes of so many bits, as the team's kernels do them."""
    import torch

    from trioserve.kernels.cpu.codes import BLOCK, Q4, Blocks
    from trioserve.kernels.cpu.panel_product import PanelProduct, Panels

    def random_panels(outputs: int, inputs: int) -> Panels:
        lines = (outputs, inputs // BLOCK)
        kind = torch.uint8 if bits == Q4 else torch.int8
        codes = torch.randint(0, 1 << bits, (outputs, inputs)).to(kind)
        minima = torch.rand(lines).half() if bits == Q4 else None
        return Panels.of_blocks(Blocks(bits, codes, torch.rand(lines).half(), minima))

    product = PanelProduct(team)
    x = {inputs: torch.randn(rows, inputs) for _, inputs, _ in PROJECTIONS}
    panels = [random_panels(out, width) for out, width, count in PROJECTIONS for _ in range(count)]
    spent = best(lambda: [product(x[panel.inputs], panel) for panel in panels], seconds)
    parameters = sum(panel.outputs * panel.inputs for panel in panels)
    return {
        "bits": bits,
        "rows": rows,
        "byte_products": bool(team.byte_products),
        "tile_products": 0 if team.tiles is None else 2 * team.parts - 1,
        "ms": round(spent * 1e3, 2),
        "gflops": round(2e-9 * rows * parameters / spent, 1),
        "gb_per_s": round(1e-9 * sum(panel.data.nbytes for panel in panels) / spent, 1),
    }


def all_code_products(threads: int, seconds: float) -> list[dict]:
    """With all that the processor has, on the vector unit alone, and rounded to bfloat16."""
    from trioserve.kernels.cpu.codes import Q4, Q8
    from trioserve.kernels.cpu.runtime import Team, cache_directory

    cache = cache_directory()
    teams = [Team(threads, cache)]
    if teams[0].byte_products:
        teams.append(Team(threads, cache, tiles=False, byte_products=False))
    if teams[0].tiles is not None:
        teams.append(Team(threads, cache, rounded=True))
    return [
        code_products(bits, rows, team, seconds)
        for bits in (Q4, Q8)
        for rows in (1, 4, 8, 16, 32, 128, 512)
        for team in teams
    ]


def whole_products(threads: int, seconds: float) -> list[dict]:
    """All projections of one step over weights in whole numbers, by each unit that there is."""
    import torch

    from trioserve.kernels.cpu.runtime import Team, cache_directory
    from trioserve.kernels.cpu.whole_panels import WHOLE8, WHOLE16, panels_of
    from trioserve.kernels.cpu.whole_product import PRESENT, WholeProduct

    if not PRESENT:
        return []
    teams = [Team(threads, cache_directory(), tiles=tiles) for tiles in (True, False)]
    units = {(made := WholeProduct(team)).unit: made for team in teams}
    weights = [torch.randn(out, inputs) for out, inputs, count in PROJECTIONS for _ in range(count)]
    parameters = sum(weight.numel() for weight in weights)
    lines = []
    for bits, kind in ((8, WHOLE8), (16, WHOLE16)):
        panels = [panels_of(weight, kind) for weight in weights]
        for rows in (1, 4, 8, 16, 32, 128, 512):
            x = {inputs: torch.randn(rows, inputs) for _, inputs, _ in PROJECTIONS}
            for unit, product in units.items():
                spent = best(
                    lambda product=product, x=x, panels=panels: [
                        product(x[panel.inputs], panel) for panel in panels
                    ],
                    seconds,
                )
                lines.append(
                    {
                        "bits": bits,
                        "rows": rows,
                        "unit": unit,
                        "ms": round(spent * 1e3, 2),
                        "gflops": round(2e-9 * rows * parameters / spent, 1),
                        "gb_per_s": round(
                            1e-9 * sum(panel.data.nbytes for panel in panels) / spent, 1
                        ),
                    }
                )
    return lines


def best_logits(rows: int, threads: int, seconds: float) -> dict:
    """The best of rows of SmolLM2's logits, by our kernel and by torch's operators."""
    import torch

    from trioserve.core.candidates import first_best
    from trioserve.kernels.cpu.best import FirstBest
    from trioserve.kernels.cpu.runtime import Team, cache_directory

    kernel = FirstBest(Team(threads, cache_directory()))
    logits = torch.randn(rows, PROJECTIONS[-1][0])
    ours, theirs = (best(lambda way=way: way(logits), seconds) for way in (kernel, first_best))
    return {
        "rows": rows,
        "us": round(ours * 1e6, 1),
        "torch_us": round(theirs * 1e6, 1),
        "gb_per_s": round(logits.nbytes / ours / 1e9, 1),
    }


class GateParams(ctypes.Structure):
    """Addresses of float32 [count] and how often."""

    _fields_ = [(name, ctypes.c_int64) for name in ("gate", "up", "out", "count", "rounds")]


def gate_values(count: int, seconds: float) -> dict:
    """silu(gate) * up on one thread, of values that stay in its nearest cache."""
    import numba
    import torch

    from trioserve.kernels.cpu import silu
    from trioserve.kernels.cpu.runtime import Team

    def gated(params):
        p = numba.carray(params, 1)[0]
        for _ in range(p.rounds):
            silu.silu_mul(p.gate, p.up, p.out, p.count)

    kernel = Team(1).compile(gated, GateParams)
    gate, up, out = (torch.randn(count) for _ in range(3))
    params = GateParams(gate.data_ptr(), up.data_ptr(), out.data_ptr(), count, 1000)
    spent = best(lambda: kernel(params), seconds) / params.rounds
    return {
        "values": count,
        "ns": round(spent * 1e9, 1),
        "values_per_ns": round(1e-9 * count / spent, 2),
        "gb_per_s": round(12e-9 * count / spent, 1),
    }


def tile_peak(threads: int, seconds: float) -> float | None:
    """GFLOP/s of bfloat16 products without loads; None where there is no tile unit."""
    from trioserve.kernels.cpu import amx
    from trioserve.kernels.cpu.runtime import Team

    team = Team(threads)
    if team.tiles is None:
        return None
    params = amx.PeakParams(team.tiles.ctypes.data, 20_000)
    kernel = team.compile(amx.peak, amx.PeakParams)
    spent = best(lambda: kernel(params), seconds)
    return round(threads * params.operations / spent / 1e9, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.3, help="per measurement")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--backend", choices=["numba", "torch"], action="append")
    arguments = parser.parse_args()
    settings = Config(engine=EngineConfig(threads=arguments.threads))
    prepare_environment(settings)
    import torch

    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    lines = []
    with torch.inference_mode():
        for shape in arguments.shape or SHAPES:
            for batch, rows in BATCHES.items():
                size = sum(count * (start + count) for start, count in rows)
                lines += [
                    measure(name, shape, batch, arguments.threads, arguments.seconds)
                    for name in arguments.backend or ("numba", "torch")
                    if size <= SLOW.get(name, size)
                ]
        step = [
            products(rows, arguments.threads, arguments.seconds) for rows in (1, 4, 8, 32, 128, 512)
        ]
        codes = all_code_products(arguments.threads, arguments.seconds)
        whole = whole_products(arguments.threads, arguments.seconds)
        logits = [best_logits(rows, arguments.threads, arguments.seconds) for rows in (1, 8, 32)]
    result = {
        "processor": detect(settings).describe(),
        "torch": torch.__version__,
        "load_before": round(load, 1),
        "attention": lines,
        "products": step,
        "code_products": codes,
        "whole_products": whole,
        "best_logits": logits,
        "gate_values": gate_values(1536, arguments.seconds),
        "tile_peak_gflops": tile_peak(arguments.threads, arguments.seconds),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
