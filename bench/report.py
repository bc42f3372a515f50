"""All figures of docs/benchmarks.md, measured one script after another, as its tables.

Notes the conditions, runs each script with settings of its own, and prints markdown; --out keeps
every JSON, and --render FILE prints the tables of such a file again. A script that fails is told
and the others go on. For each, the share of the processors that others used meanwhile is noted:
where it is not near zero, the figures mean little. Some 15 minutes on two cores.

    python bench/report.py --out report.json [--only server,step] [--peer openvino-genai=PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import frozen
from lib.client import ServerError, Target, until_ready
from lib.output import conditions
from lib.proc import foreign_share, processor_times
from lib.report_tables import markdown
from lib.server import free_port, server

BENCH = Path(__file__).parent
READY_S = 300.0
SERVE = {  # loads put on a server that runs with its defaults
    "decode": "--concurrency 1 --requests 4 --prompt-tokens 128 --max-tokens 64 --repeat 3",
    "prefill": "--concurrency 1 --requests 3 --prompt-tokens 1024 --max-tokens 1 --repeat 3",
    "full": "--concurrency 32 --requests 32 --prompt-tokens 128 --max-tokens 64 --repeat 3",
    "open": "--rate 2 --requests 60 --prompt-tokens 128 --max-tokens 64",
    "prefix": "--shared-prefix 1000 --requests 5 --max-tokens 1",
    "idle": "--idle 5 --requests 5 --prompt-tokens 16 --max-tokens 1",
}
AVX2_LOADS = ("decode", "prefill", "full")
CACHE_MIB = 256  # of the server whose memory is measured; the load goes once through all of it
FILLING = "--concurrency 4 --requests 12 --prompt-tokens 1000 --max-tokens 8 --warm-up 0"


@frozen
class Options:
    """What may be said of all scripts: of the server, and how long they take."""

    peers: list[str]
    short: bool
    arguments: list[str]


def script(name: str, *arguments: str) -> dict[str, Any]:
    """The JSON of a script of this folder; it may have missed a target, but must have one.

    Raises:
        RuntimeError: it gave none; its last lines are the message.
    """
    command = [sys.executable, str(BENCH / f"{name}.py"), "--json", "-", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-3:]
        raise RuntimeError(f"{name}, status {done.returncode}: {' '.join(last)}") from None
    return found


def loads(options: Options, commands: dict[str, str], *settings: str) -> dict[str, Any]:
    """Results of ``serve`` against one server of our own; "failed" says why one is none."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server([*options.arguments, *settings], dict(os.environ), port) as process:
        trio.run(until_ready, Target.of(url), process, READY_S)
        always = ("--base-url", url, "--pid", str(process.pid))
        short = ("--repeat", "1", "--requests", "2") if options.short else ()
        found: dict[str, Any] = {}
        for name, command in commands.items():
            try:
                found[name] = script("serve", *always, *command.split(), *short)
            except RuntimeError as error:
                found[name] = {"failed": str(error)}
    return found


def of_step(options: Options, *arguments: str) -> dict[str, Any]:
    """A result of ``step``, and how it stands beside what the machine can do."""
    short = ("--seconds", "0.01", "--streams", "1", "--contexts", "32") if options.short else ()
    found = script("step", *arguments, *short)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(found, file)
        file.flush()
        lines = script("roofline", "--step", file.name)["results"]
    return found | {"roofline": lines}


def of_avx2(options: Options) -> dict[str, Any]:
    """What carries a target, with AVX2 alone: a start, three loads and a step of 32 rows."""
    limited = ("--set", "kernels.instructions=avx2")
    counts = ("--commands", "1", "--cold", "0", "--warm", "1" if options.short else "3")
    start = script("startup", *counts, "--load-requests", "0", "--", *options.arguments, *limited)
    found = loads(options, {name: SERVE[name] for name in AVX2_LOADS}, *limited)
    seconds = "0.01" if options.short else "0.5"
    one = ("--streams", "1,32", "--contexts", "128", "--no-prefill", "--seconds", seconds)
    step = script("step", "--instructions", "avx2", *one)
    return {"startup": start, "step": step, **found}


def of_quality(options: Options) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCH / "quality.py")], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def of_compare(options: Options) -> dict[str, Any]:
    named = [part for peer in options.peers for part in ("--peer", peer)]
    rounds = "1" if options.short else "3"
    return script("compare", *named, "--rounds", rounds, "--", *options.arguments)


def of_startup(options: Options) -> dict[str, Any]:
    counts = ("--commands", "5", "--cold", "1", "--warm", "1" if options.short else "5")
    return script("startup", *counts, "--load-requests", "0", "--", *options.arguments)


def of_memory(options: Options) -> dict[str, Any]:
    setting = ("--set", f"cache.memory={CACHE_MIB}MiB")
    return loads(options, {"filled": FILLING}, *setting)


def of_http(options: Options) -> dict[str, Any]:
    times = ("1", "1") if options.short else ("4", "2")
    return script("http_overhead", "--seconds", times[0], "--repeat", times[1])


def of_overload(options: Options) -> dict[str, Any]:
    return script("overload", "--seconds", "1" if options.short else "6")


def of_soak(options: Options) -> dict[str, Any]:
    kinds = ("tiny", "aborted", "erroneous", "warm-up")
    short = [f"--{kind}=40" for kind in kinds] if options.short else []
    return script("soak", *short)


SECTIONS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "startup": of_startup,
    "server": partial(loads, commands=SERVE),
    "memory": of_memory,
    "step": of_step,
    "deterministic": lambda options: of_step(options, "--deterministic", "--contexts", "128"),
    "avx2": of_avx2,
    "compare": of_compare,
    "quality": of_quality,
    "http": of_http,
    "overload": of_overload,
    "soak": of_soak,
}


def measure(names: list[str], options: Options, out: str | None) -> dict[str, Any]:
    """Run the sections; everything so far is in ``out`` after each."""
    result: dict[str, Any] = {
        "bench": "report",
        "conditions": conditions(),
        "sections": {},
        "failures": {},
        "took_s": {},
        "others_share": {},
    }
    for name in names:
        began, before = time.perf_counter(), processor_times()
        try:
            result["sections"][name] = SECTIONS[name](options)
        except (RuntimeError, ServerError, SystemExit, subprocess.CalledProcessError) as error:
            result["failures"][name] = str(error)
        result["failures"] |= faults_of_loads(name, result["sections"].get(name, {}))
        result["took_s"][name] = round(time.perf_counter() - began, 1)
        result["others_share"][name] = round(foreign_share(before, processor_times()), 3)
        took, used = result["took_s"][name], result["others_share"][name]
        told = f"{name}: {took:.0f} s, others used {used:.0%}"
        print(told, result["failures"].get(name, ""), file=sys.stderr, flush=True)
        if out:
            Path(out).write_text(json.dumps(result, indent=1) + "\n")
    return result


def faults_of_loads(name: str, loads: dict[str, Any]) -> dict[str, str]:
    """What went wrong with loads on a server: one that gave no result, or requests that failed."""
    faults = {}
    for load, found in loads.items():
        if isinstance(found, dict) and "failed" in found:
            faults[f"{name}: {load}"] = found["failed"]
        elif isinstance(found, dict) and found.get("failures"):
            faults[f"{name}: {load}"] = f"requests failed: {json.dumps(found['failures'])}"
    return faults


def sections(text: str) -> list[str]:
    """Names with commas between, in the order in which they are run."""
    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no {unknown[0]}; there are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in wanted]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="FILE", help="write every result there, as it comes")
    parser.add_argument("--render", metavar="FILE", help="measure nothing: tables of an --out FILE")
    parser.add_argument(
        "--only", type=sections, default=list(SECTIONS), metavar="NAMES",
        help=f"some of {','.join(SECTIONS)}",
    )  # fmt: skip
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME[=PYTHON]", help="as of bench/compare"
    )
    parser.add_argument("--short", action="store_true", help="a try of all, for no figures")
    parser.add_argument("arguments", nargs="*", help="for trioserve run, after --")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    if args.render:
        found = json.loads(Path(args.render).read_text())
    else:
        found = measure(args.only, Options(args.peer, args.short, args.arguments), args.out)
    print("\n".join(markdown(found)))
    sys.exit(1 if found["failures"] else 0)
