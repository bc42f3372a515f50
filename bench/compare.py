"""How does trioserve stand beside other engines, measured in turns in one run?

    python bench/compare.py [--peer openvino-genai=OTHER/bin/python] [--peer llama-cpp]
                            [--url NAME=http://127.0.0.1:8080] [--rounds 5]

Starts trioserve with its default model, and each ``--peer`` on the same GGUF file in a process of
its own; ``--url`` adds a server that runs already. Each round puts the same loads on each system in
turn: one stream, a long prompt, and many streams at once. trioserve and servers are asked over
HTTP, peers in process, without one. Prompts are words, the same for all, each used once, so that no
cache helps. Gives medians over the rounds, and trioserve's figure divided by each other's. A peer
that is not installed in this environment is told and left out; each may name the Python that has
it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trio
from attrs import frozen
from lib.answers import read_answer
from lib.client import (
    COMMON_WORDS,
    COMPLETIONS,
    ServerError,
    Target,
    closed_loop,
    describe_server,
    make_request,
    until_ready,
)
from lib.output import conditions, table, write_lines
from lib.peers import ENGINES
from lib.server import free_port, server

TIMEOUT_S = 600.0
READY_S = 120.0
PEER = Path(__file__).parent / "lib" / "peers.py"


@frozen
class Load:
    """So many prompts of so many words at once, and the tokens wanted of each."""

    prompts: int
    words: int
    max_tokens: int


LOADS = {
    "one stream": Load(1, 128, 64),
    "long prompt": Load(1, 1024, 1),
    "many streams": Load(32, 128, 64),
}
FIGURES = {
    "decode_tokens_per_s": "one stream, tokens/s after the first",
    "prefill_tokens_per_s": "prompt of 1,024 words, words/s to the first token",
    "output_tokens_per_s": "32 streams, tokens/s over all",
}
Ask = Callable[[list[str], int], list[list[float]]]


def figures(name: str, load: Load, times: list[list[float]]) -> dict[str, float]:
    """What a load says, from when each prompt's tokens came."""
    assert all(len(seen) == load.max_tokens for seen in times), "answers cut short"
    if name == "one stream":
        [seen] = times
        return {"decode_tokens_per_s": (len(seen) - 1) / (seen[-1] - seen[0])}
    if name == "long prompt":
        return {"prefill_tokens_per_s": load.words / times[0][0]}
    return {"output_tokens_per_s": sum(map(len, times)) / max(seen[-1] for seen in times)}


def over_http(target: Target, model: str) -> Ask:
    """Ask a server; several tokens in one chunk count as come together."""

    def ask(prompts: list[str], max_tokens: int) -> list[list[float]]:
        requests = [
            make_request(
                target,
                "POST",
                COMPLETIONS,
                {
                    "model": model,
                    "prompt": prompt,
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            )
            for prompt in prompts
        ]
        exchanges = trio.run(closed_loop, target, requests, len(requests), TIMEOUT_S)
        outcomes = [read_answer(exchange) for exchange in exchanges]
        if failed := [outcome.failure for outcome in outcomes if outcome.failure]:
            raise ServerError(failed[0])
        began = min(outcome.sent_at for outcome in outcomes)
        return [_spread(outcome, began) for outcome in outcomes]

    return ask


def _spread(outcome: Any, began: float) -> list[float]:
    """A time for each token: text that shows later than its token takes the next chunk's."""
    times = [at - began for at in outcome.chunk_times]
    missing = outcome.output_tokens - len(times)
    return [*times, *([times[-1]] * missing)] if missing > 0 else times


@contextlib.contextmanager
def peer(name: str, python: str, model: str) -> Iterator[tuple[Ask, dict[str, Any]] | None]:
    """Another engine in a process, and what it says of itself; None, and a line on stderr, where
    it is not installed."""
    command = [python, str(PEER), name, model]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(prompts: list[str], max_tokens: int) -> list[list[float]]:
        print(
            json.dumps({"prompts": prompts, "max_tokens": max_tokens}),
            file=process.stdin,
            flush=True,
        )
        line = process.stdout.readline()
        if not line:
            raise ServerError(f"{name} ended with status {process.wait()}")
        answer: list[list[float]] = json.loads(line)
        return answer

    try:
        first = json.loads(process.stdout.readline() or '{"missing": "it ended at once"}')
        if "missing" in first:
            print(f"{name} is left out: {first['missing']}", file=sys.stderr)
            yield None
        else:
            yield ask, first
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def prompts_of(load: Load, seed: str) -> list[str]:
    words = COMMON_WORDS.split()
    return [
        " ".join(random.Random(f"{seed}/{index}").choices(words, k=load.words))
        for index in range(load.prompts)
    ]


@contextlib.contextmanager
def trioserve_server(options: list[str]) -> Iterator[tuple[Ask, float]]:
    port = free_port()
    began = time.perf_counter()
    with server(options, dict(os.environ), port) as process:
        target = Target.of(f"http://127.0.0.1:{port}")
        trio.run(until_ready, target, process, READY_S)
        ready_s = time.perf_counter() - began
        name, _ = trio.run(describe_server, target, 0.0)
        yield over_http(target, name), ready_s


def engine(text: str) -> tuple[str, str]:
    """NAME or NAME=PYTHON."""
    name, _, python = text.partition("=")
    if name not in ENGINES:
        raise argparse.ArgumentTypeError(f"no engine {name}; there are {', '.join(ENGINES)}")
    return name, python


def default_gguf() -> str:
    """The file of the default model, fetched if need be."""
    from trioserve.config.schema import ModelConfig
    from trioserve.models.resolve import resolve_model

    async def resolve() -> Any:
        return await resolve_model(ModelConfig(), report=lambda stage: None)

    return str(trio.run(resolve).tensors[0].path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer", type=engine, action="append", default=[], metavar="NAME[=PYTHON]",
        help=f"one of {', '.join(ENGINES)}, and the Python that has it",
    )  # fmt: skip
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--python", default=sys.executable, help="of peers that name none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write everything there; - for stdout")
    parser.add_argument("options", nargs="*", help="for trioserve run, after --")
    arguments = parser.parse_args()
    seed, told = os.urandom(4).hex(), conditions()
    with contextlib.ExitStack() as stack:
        systems: dict[str, Ask] = {}
        started: dict[str, float] = {}
        chosen: dict[str, dict[str, Any]] = {}
        ours = stack.enter_context(trioserve_server(arguments.options))
        systems["trioserve"], started["trioserve"] = ours
        for name, python in arguments.peer:
            found = stack.enter_context(peer(name, python or arguments.python, default_gguf()))
            if found is not None:
                systems[name], chosen[name] = found
                started[name] = chosen[name].pop("load_s")
        for text in arguments.url:
            name, _, url = text.partition("=")
            target = Target.of(url)
            model, _ = trio.run(describe_server, target, 0.0)
            systems[name] = over_http(target, model)
        seen = measure(systems, arguments.rounds, seed)
    report(seen, started, told | {"chosen": chosen}, arguments)


def measure(systems: dict[str, Ask], rounds: int, seed: str) -> dict[str, dict[str, list[float]]]:
    """Every figure of every system in every round; a round before them warms up."""
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in systems}
    for turn in range(-1, rounds):
        for load_name, load in LOADS.items():
            for name, ask in systems.items():
                times = ask(prompts_of(load, f"{seed}/{turn}/{load_name}"), load.max_tokens)
                for figure, value in figures(load_name, load, times).items():
                    if turn >= 0:
                        seen[name].setdefault(figure, []).append(value)
                    when = f"round {turn + 1}" if turn >= 0 else "to warm up"
                    print(f"{when}: {name}: {figure} {value:.1f}", file=sys.stderr, flush=True)
    return seen


def report(
    seen: dict[str, dict[str, list[float]]],
    started: dict[str, float],
    told: dict[str, Any],
    arguments: argparse.Namespace,
) -> None:
    """Print medians, and ours divided by each, and write everything."""
    medians = {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        for name, figures in seen.items()
    }
    rows: list[tuple[Any, ...]] = [("", *medians)]
    for figure, words in FIGURES.items():
        rows.append((words, *(round(line[figure], 1) for line in medians.values())))
    for figure, words in FIGURES.items():
        ours = medians["trioserve"][figure]
        rows.append(
            (f"ratio: {words}", *(round(ours / line[figure], 2) for line in medians.values()))
        )
    rows.append(("seconds to be ready", *(round(started.get(name, 0.0), 1) for name in medians)))
    result = {
        "bench": "compare",
        "conditions": told,
        "ready_s": started,
        "median": medians,
        "all": seen,
    }
    write_lines(result, arguments.json, table(rows))


if __name__ == "__main__":
    try:
        main()
    except ServerError as error:
        sys.exit(f"compare: {error}")
