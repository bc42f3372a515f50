"""How near do steps come to what the machine can do at most?

Measures how fast all cores read and copy memory, and the peaks of matrix products, then the steps
that the figures of a server come from: decode with one stream, with many, with a long context, and
prefill. Each must read its weights, and keys and values, and do its multiplications; the table
shows both as shares of what was measured, and the least time that either allows. Attention stands
in lines of its own. ``--step FILE`` takes the JSON of bench/step.py instead of measuring.

    python bench/roofline.py [--step step.json] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import step
from lib.output import table, write_lines

FIELDS = ("read_gb_per_s", "copy_gb_per_s", "fp32_gflops", "bf16_gflops", "int8_gops")


def work_of(line: dict[str, Any], model: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Bytes that a step has to read and operations that it has to do, in products and attention.

    A multiplication and an addition are two operations. Only the rows that sample pass the head
    and what follows the last layer's attention; the latter is not told apart.
    """
    sampled = line["streams"] + line["prompts"]
    decoded = 1e6 * line.get("kv_mb", 0.0) / model["kv_bytes_per_token"]
    prompts, length = line["prompts"], line["prompt_tokens"]
    pairs = decoded + prompts * length * (length + 1) / 2  # of a new token and one before it
    cached = decoded + prompts * length
    return {
        "products": {
            "bytes": model["product_bytes"],
            "flops": 2.0
            * (line["new_tokens"] * model["layer_weights"] + sampled * model["head_weights"]),
        },
        "attention": {
            "bytes": cached * model["kv_bytes_per_token"],
            "flops": 4.0 * pairs * model["attention_width"] * model["num_layers"],
        },
    }


def against(name: str, ms: float, work: dict[str, float], machine: dict[str, Any]) -> dict:
    """One line: what was reached, and its shares of what the machine can do."""
    gigabytes, gigaflops = 1e-6 * work["bytes"] / ms, 1e-6 * work["flops"] / ms
    peaks = {name.partition("_")[0]: machine[name] for name in FIELDS[2:]}
    peak = max(filter(None, peaks.values()))
    return {
        "figure": name,
        "ms": ms,
        "gb_per_s": round(gigabytes, 1),
        "share_of_read": round(gigabytes / machine["read_gb_per_s"], 2),
        "gflops": round(gigaflops, 1),
        **{f"share_of_{kind}": at and round(gigaflops / at, 2) for kind, at in peaks.items()},
        "least_ms": round(
            max(1e-6 * work["bytes"] / machine["read_gb_per_s"], 1e-6 * work["flops"] / peak), 3
        ),
    }


def roofline(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Two lines for each case of a result of bench/step.py: the whole step, and its attention."""
    lines = []
    for line in measured["results"]:
        work = work_of(line, measured["model"])
        whole = {key: sum(part[key] for part in work.values()) for key in ("bytes", "flops")}
        lines.append(against(line["case"], line["ms"]["total"], whole, measured["machine"]))
        for part in ("products", "attention"):
            if (ms := line["ms"][part]) > 0:
                name = f"  {part}"
                lines.append(against(name, ms, work[part], measured["machine"]))
    return lines


def lines_of(result: dict[str, Any]) -> list[str]:
    """The tables."""
    machine = result["machine"]
    told = [(name, machine[name]) for name in FIELDS if machine[name] is not None]
    columns = list(result["results"][0])
    rows = [tuple("-" if line[key] is None else line[key] for key in columns) for line in
            result["results"]]  # fmt: skip
    return [*table(told), "", *table([tuple(columns), *rows])]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", metavar="FILE", help="JSON of bench/step.py")
    parser.add_argument("--streams", type=step.numbers, default=[1, 32], metavar="N,…")
    parser.add_argument("--contexts", type=step.numbers, default=[128, 8192], metavar="N,…")
    parser.set_defaults(prefill=True)
    step.add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    measured = json.loads(Path(options.step).read_text()) if options.step else step.run(options)
    result = {key: measured[key] for key in ("conditions", "model", "machine")} | {
        "bench": "roofline",
        "results": roofline(measured),
    }
    write_lines(result, options.json, lines_of(result))
