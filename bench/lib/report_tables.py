"""The results of bench/report.py as the markdown tables of docs/benchmarks.md.

Each table is made of one section and left out where that was not measured; a figure that is not
there is "-".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lib.step_loop import PARTS

Sections = dict[str, Any]
Figure = Callable[[Sections], float | str]
BEYOND = ("schedule", "inputs", "rest", "sample", "emit")
PERCENTILES = ("median", "p90", "p99")


def markdown(result: dict[str, Any]) -> list[str]:
    """Lines of all tables, with the conditions before them."""
    sections = result["sections"]
    told = result["conditions"]
    lines = [
        f"Python {told['python']}, {told['machine']}, {told['processors']} processors "
        f"({told['processor']}), revision {told['revision']}, load average "
        f"{told['load_average']} before. Share of the processors that others used: "
        + ", ".join(f"{name} {share:.0%}" for name, share in result["others_share"].items())
        + "."
    ]
    for name, fault in result["failures"].items():
        lines += ["", f"NOT MEASURED: {name}: {fault}"]
    for title, rows in tables(sections):
        lines += ["", title, "", *as_markdown(rows)]
    return lines


def tables(sections: Sections) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Title and rows of each table that can be filled; the first row is the head."""
    if set(sections) & {"server", "step", "startup", "memory"}:
        yield "The targets:", targets(sections)
    for name, title, rows in (
        ("server", "A server under load, milliseconds as median / p90 / p99:", under_load),
        ("startup", "From the command on, seconds:", starts),
        ("step", "Milliseconds of a step by part (`bench/step.py`):", steps),
        ("step", "Beside what the machine can do (`bench/roofline.py`):", roofline),
        ("deterministic", "What `[engine] deterministic` costs, tokens/s of steps alone:", exact),
        ("avx2", 'With AVX2 alone (`[kernels] instructions = "avx2"`):', with_avx2),
        ("compare", "Beside other engines, in turns in one run:", compared),
        ("quality", "What the weights cost in quality, against float32:", quality),
        ("http", "What the front end costs:", targets_met),
        ("overload", "What others notice of bad clients:", noticed),
        ("soak", "Memory over many requests:", phases),
    ):
        if name in sections:
            yield title, rows(sections)


def as_markdown(rows: list[tuple[Any, ...]]) -> list[str]:
    head, *others = [[cell(value) for value in row] for row in rows]
    lines = [head, ["---"] * len(head), *others]
    return [f"| {' | '.join(line)} |" for line in lines]


def cell(value: Any) -> str:
    """Three digits that matter; whole numbers from a thousand on."""
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


# ----------------------------------------------------------------------------- the targets


def load(sections: Sections, name: str) -> dict[str, Any]:
    """The medians of a load of ``bench/serve.py``."""
    found: dict[str, Any] = sections["server"][name]["median"]
    return found


def step_named(sections: Sections, name: str) -> dict[str, Any]:
    return next(line for line in sections["step"]["results"] if line["case"] == name)


def prefill_speed(sections: Sections) -> float:
    found = load(sections, "prefill")
    return 1e3 * found["prompt_tokens"] / found["completed"] / found["ttft_ms"]["median"]


def beyond(sections: Sections) -> str:
    """Milliseconds beside products and attention with 1 and 32 streams, and beside products."""
    texts = []
    for streams in (1, 32):
        ms = step_named(sections, f"decode {streams} at 128")["ms"]
        own = sum(ms[part] for part in BEYOND)
        texts.append(f"{own:.2f} (with attention {own + ms['attention']:.2f})")
    return ", ".join(texts)


def longer_context(sections: Sections) -> str:
    """What a step of one stream takes longer for more keys and values, as a speed of reading."""
    lines = [line for line in sections["step"]["results"] if line["streams"] == 1]
    short, long = (pick(lines, key=lambda line: line["context"]) for pick in (min, max))
    if long["context"] == short["context"]:
        return "-"
    more_ms = long["ms"]["total"] - short["ms"]["total"]
    speed = (long["kv_mb"] - short["kv_mb"]) / more_ms
    copy = sections["step"]["machine"]["copy_gb_per_s"]
    return (
        f"{more_ms:.1f} ms more at {long['context']:,} than at {short['context']}: "
        f"{speed:.1f} GB/s, {speed / copy:.2f} of a copy's {copy}"
    )


def worker_memory(sections: Sections) -> float:
    found: float = sections["memory"]["filled"]["median"]["server"]["worker_memory"]["beyond_mib"]
    return found * 2**20 / 1e6


TARGETS: tuple[tuple[str, str, Figure], ...] = (
    ("command to ready, page cache warm, s", "≤ 3.0",
     lambda all: all["startup"]["median"]["warm"]["ready_s"]),
    ("1 stream, decode, tokens/s over HTTP", "≥ 120",
     lambda all: 1e3 / load(all, "decode")["tpot_ms"]["median"]),
    ("1 stream, prompt of 1,024 tokens, tokens/s to the first token", "≥ 700", prefill_speed),
    ("32 streams, 128 tokens in, 64 out, output tokens/s over HTTP", "≥ 200",
     lambda all: load(all, "full")["output_tokens_per_s"]),
    ("decode alone at 32 rows, tokens/s", "≥ 270",
     lambda all: step_named(all, "decode 32 at 128")["tokens_per_s"]),
    ("second request with the same 1,000-token prefix: first token, % of the first's", "≤ 10",
     lambda all: 100 * load(all, "prefix")["prefix"]["ratio"]),
    ("step beyond products and attention at 1 and 32 rows, ms", "≤ 2", beyond),
    ("context of 8 K against 128", "only the bytes read", longer_context),
    ("worker's memory beyond weights and cache, MB", "≤ 450", worker_memory),
    ("time between tokens at 32 streams, p99, ms", "-",
     lambda all: load(all, "full")["itl_ms"]["p99"]),
    ("first token after 5 idle seconds, ms slower than a warm one", "≤ 5",
     lambda all: load(all, "idle")["idle"]["slower_ms"]),
)  # fmt: skip


def targets(sections: Sections) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [("what", "target", "found")]
    for what, target, figure in TARGETS:
        try:
            rows.append((what, target, figure(sections)))
        except (KeyError, StopIteration):  # that part was not measured
            rows.append((what, target, None))
    return rows


# ----------------------------------------------------------------------------- one section each


def under_load(sections: Sections) -> list[tuple[Any, ...]]:
    times = ("ttft_ms", "itl_ms", "tpot_ms")
    rows: list[tuple[Any, ...]] = [("load", *times, "tokens/s", "requests/s")]
    for name, found in sections["server"].items():
        if "median" not in found:
            continue
        median = found["median"]
        shown = [
            " / ".join(cell(median[kind][at]) for at in PERCENTILES) if kind in median else None
            for kind in times
        ]
        speeds = median["output_tokens_per_s"], median["requests_per_s"]
        rows.append((describe(name, found["settings"]), *shown, *speeds))
    return rows


def describe(name: str, settings: dict[str, Any]) -> str:
    """A load in words."""
    if name == "prefix":
        return f"pairs with {settings['shared_prefix']:,} tokens in common"
    if name == "idle":
        return f"one at a time, pauses of {settings['idle']:g} s"
    rate, streams = settings["rate"], settings["concurrency"]
    how = f"{streams} streams" if rate is None else f"{rate:g} requests/s, Poisson"
    return f"{how}, {settings['prompt_tokens']:,} in, {settings['max_tokens']} out"


def starts(sections: Sections) -> list[tuple[Any, ...]]:
    median = sections["startup"]["median"]
    kinds = [kind for kind in ("cold", "warm") if kind in median]
    rows: list[tuple[Any, ...]] = [("", *kinds)]
    stages = {f"stage {name}": name for name in median[kinds[-1]]["stages_s"]}
    whole = ("port_open_s", "ready_s", "first_token_s")
    rows += [(name, *(median[kind][name] for kind in kinds)) for name in whole]
    rows += [
        (name, *(median[kind]["stages_s"].get(at) for kind in kinds)) for name, at in stages.items()
    ]
    return rows


def steps(sections: Sections) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [
        ("step", "total", *PARTS, "tokens/s", "KV read, MB", "GB/s", "of a copy")
    ]
    for line in sections["step"]["results"]:
        read = (line.get(key) for key in ("kv_mb", "kv_gb_per_s", "kv_share_of_copy"))
        ms = (f"{line['ms'][name]:.2f}" for name in ("total", *PARTS))
        rows.append((line["case"], *ms, line["tokens_per_s"], *read))
    return rows


def roofline(sections: Sections) -> list[tuple[Any, ...]]:
    machine = sections["step"]["machine"]
    rows: list[tuple[Any, ...]] = [
        (
            "figure",
            "ms",
            "least ms",
            "GB/s",
            f"of {machine['read_gb_per_s']} GB/s read",
            "GFLOP/s",
            f"of {cell(machine['fp32_gflops'])} in fp32",
            f"of {cell(machine['bf16_gflops'])} in bf16",
            f"of {cell(machine['int8_gops'])} in int8",
        )
    ]
    columns = ("figure", "ms", "least_ms", "gb_per_s", "share_of_read", "gflops")
    for line in sections["step"]["roofline"]:
        shares = (line[f"share_of_{kind}"] for kind in ("fp32", "bf16", "int8"))
        rows.append((*(line[name] for name in columns), *shares))
    return rows


def exact(sections: Sections) -> list[tuple[Any, ...]]:
    usual = {line["case"]: line for line in sections.get("step", {}).get("results", ())}
    rows: list[tuple[Any, ...]] = [("step", "as usual", "deterministic")]
    for line in sections["deterministic"]["results"]:
        before = usual.get(line["case"], {}).get("tokens_per_s")
        rows.append((line["case"], before, line["tokens_per_s"]))
    return rows


def with_avx2(sections: Sections) -> list[tuple[Any, ...]]:
    """The targets that are measured so, made of the section as of those with all instructions."""
    found = sections["avx2"]
    server = {name: part for name, part in found.items() if name not in ("startup", "step")}
    parts = {"startup": found["startup"], "step": found["step"], "server": server}
    return [row for row in targets(parts) if row[-1] not in (None, "-")]


COMPARED = {
    "decode_tokens_per_s": "one stream, tokens/s after the first",
    "prefill_tokens_per_s": "prompt of 1,024 words, words/s to the first token",
    "output_tokens_per_s": "32 streams, tokens/s over all",
}


def compared(sections: Sections) -> list[tuple[Any, ...]]:
    median, ready = (sections["compare"][key] for key in ("median", "ready_s"))
    ours = median["trioserve"]
    others = [name for name in median if name != "trioserve"]
    head = ["figure", "trioserve"]
    for name in others:
        head += [name, "ratio"]
    rows: list[tuple[Any, ...]] = [tuple(head)]
    for figure, words in COMPARED.items():
        row: list[Any] = [words, ours[figure]]
        for name in others:
            row += [median[name][figure], f"{ours[figure] / median[name][figure]:.2f}"]
        rows.append(tuple(row))
    last: list[Any] = ["seconds until ready", ready.get("trioserve")]
    for name in others:
        last += [ready.get(name), None]
    return [*rows, tuple(last)]


def quality(sections: Sections) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [
        ("weights", "the same most likely token", "perplexity", "largest difference of a logit",
         "memory, MB")
    ]  # fmt: skip
    for name, line in sections["quality"]["layouts"].items():
        rows.append((
            name, f"{line['agreed']:.2%}", f"{line['perplexity_ratio']:.4f} times",
            f"{line['largest_difference']:.3f}", line["weight_bytes"] / 1e6,
        ))  # fmt: skip
    return rows


def targets_met(sections: Sections) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [("case", "figure", "limit", "found", "")]
    for line in sections["http"]["targets"]:
        met = "met" if line["met"] else "missed"
        rows.append((line["case"], line["figure"], line["limit"], line["found"], met))
    return rows


def noticed(sections: Sections) -> list[tuple[Any, ...]]:
    figures = ("gap_worst_ms", "gap_median_ms", "probe_worst_ms", "probe_median_ms")
    figures += ("server_cpu_share", "parent_mib")
    rows: list[tuple[Any, ...]] = [("bad clients", *figures)]
    for name, found in sections["overload"]["median"].items():
        rows.append((name, *(found[figure] for figure in figures)))
    return rows


def phases(sections: Sections) -> list[tuple[Any, ...]]:
    found = sections["soak"]
    rows: list[tuple[Any, ...]] = [
        ("phase", "requests", "per second", "parent, bytes per request",
         "worker, bytes per request")
    ]  # fmt: skip
    for name, phase in found["phases"].items():
        grown = phase["bytes_per_request"]
        per_s = phase.get("requests_per_s")
        rows.append((name, phase["requests"], per_s, grown["parent_bytes"], grown["worker_bytes"]))
    return [*rows, (f"verdict: {found['verdict']}", None, None, None, None)]
