"""What do other clients notice of slow, silent and greedy ones?

Starts a server and measures, first alone and then under each kind of bad client in turn, how long
the worst gap of a stream between two of its tokens is and how long the worst readiness probe takes:
readers of a byte a second and of nothing, half-closed streams, bodies of a byte a second, idle
connections beyond the limit, bodies of 27 MB. Exit status 1 if a gap or a probe is over its limit.

    python bench/overload.py [--seconds 10] [--gap-ms 300] [--probe-ms 200] [-- MODEL.toml ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import trio
from attrs import define, field
from lib.client import Target, until_ready
from lib.ending import with_parent
from lib.misuse import COMPLETIONS, Client, post
from lib.output import add_output_options, conditions, write_result
from lib.proc import cpu_s_of_tree, own_bytes
from lib.server import free_port, server

PROBE_EVERY_S = 0.1  # as an orchestrator in a hurry
READY_S = 120.0
NUM_STREAMS = 4
NUM_SLOW = 50
NUM_IDLE = 5000
LARGE_BYTES = 27 * 2**20
STEP_S = 0.02
DEFAULT = [
    *("--set", "model.source=random:llama?num_layers=1&hidden_size=32"),
    *("--set", "device.kind=simulated"),
    *("--set", f"device.simulated_step_s={STEP_S}"),
    *("--set", "scheduler.max_num_seqs=256"),
    *("--set", "cache.memory=256MiB"),
]
# The same again where bodies of that size are welcome.
LARGE = ["--set", f"http.max_body_bytes={LARGE_BYTES + 2**20}"]


@define
class Noticed:
    """What the good clients saw."""

    gaps_s: list[float] = field(factory=list)
    probes_s: list[float] = field(factory=list)
    failures: dict[str, int] = field(factory=dict)

    def failed(self, what: str) -> None:
        self.failures[what] = self.failures.get(what, 0) + 1

    def result(self) -> dict[str, Any]:
        """Worst and median in milliseconds, and how many there were."""
        found: dict[str, Any] = {}
        for name, values in (("gap", self.gaps_s), ("probe", self.probes_s)):
            ordered = sorted(values) or [math.inf]
            found[f"{name}_worst_ms"] = round(ordered[-1] * 1e3, 1)
            found[f"{name}_median_ms"] = round(ordered[len(ordered) // 2] * 1e3, 1)
            found[f"{name}s"] = len(values)
        return found


async def watch_stream(target: Target, noticed: Noticed) -> None:
    """Streams, one after another, and the time between two pieces of each. Until cancelled."""
    body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
    while True:
        client = Client(target)
        try:
            stream = await client.send(post(COMPLETIONS, body))
            data, last = b"", math.nan
            while not data.endswith(b"0\r\n\r\n"):
                data = data[-5:] + await stream.receive_some(65536)
                if len(data) <= 5:
                    noticed.failed("a stream ended early")
                    break
                now = trio.current_time()
                if not math.isnan(last):
                    noticed.gaps_s.append(now - last)
                last = now
        except (trio.BrokenResourceError, OSError) as error:
            noticed.failed(f"stream: {type(error).__name__}")
        finally:
            client.close()


async def watch_readiness(target: Target, noticed: Noticed) -> None:
    """A probe on a connection of its own every PROBE_EVERY_S. Until cancelled."""
    while True:
        client = Client(target)
        began = trio.current_time()
        status, _ = await client.ask(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        noticed.probes_s.append(trio.current_time() - began)
        client.close()
        if status != 200:
            noticed.failed(f"readiness: {status}")
        await trio.sleep(PROBE_EVERY_S)


# ----------------------------------------------------------------------------- bad clients

LONG = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 3}


async def slow_reader(target: Target, every_s: float) -> None:
    """Reads a byte every ``every_s``, with the smallest buffer it can have."""
    sock = trio.socket.socket(target.family, socket.SOCK_STREAM)
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await sock.connect(target.address)
        await sock.send(post(COMPLETIONS, LONG))
        while every_s < math.inf:
            if not await sock.recv(1):
                return
            await trio.sleep(every_s)
        await trio.sleep_forever()


async def half_closed(target: Target) -> None:
    """Ends its sending at once, and reads."""
    client = Client(target)
    stream = await client.send(post(COMPLETIONS, LONG | {"max_tokens": 200}))
    await stream.send_eof()
    async for _ in stream:
        pass


async def slow_body(target: Target) -> None:
    """Sends its body a byte a second."""
    head, _, body = post(COMPLETIONS, LONG | {"user": "u" * 500}).partition(b"\r\n\r\n")
    client = Client(target)
    stream = await client.send(head + b"\r\n\r\n")
    for byte in body:
        await stream.send_all(bytes([byte]))
        await trio.sleep(1)


async def idle(target: Target) -> None:
    """Connects and says nothing."""
    sock = trio.socket.socket(target.family, socket.SOCK_STREAM)
    with sock:
        await sock.connect(target.address)
        await sock.recv(1)


async def large_body(target: Target, body: bytes) -> None:
    """A body of 27 MB, again and again."""
    while True:
        client = Client(target)
        await client.ask(body)
        client.close()


def many(num: int, each: Callable[[Target], Awaitable[None]]) -> Callable[[Target], Any]:
    """``num`` bad clients at once; what goes wrong with them is their own fault."""

    async def run_all(target: Target) -> None:
        async def one() -> None:
            with contextlib.suppress(trio.BrokenResourceError, OSError):
                await each(target)

        async with trio.open_nursery() as nursery:
            for index in range(num):
                nursery.start_soon(one)
                if index % 20 == 19:
                    await trio.sleep(0.01)

    return run_all


def large_bodies() -> dict[str, bytes]:
    """Chat bodies of 27 MB: one long text, and ten thousand messages."""
    text = {"messages": [{"role": "user", "content": "word " * (LARGE_BYTES // 5)}]}
    messages = {"messages": [{"role": "user", "content": "y" * 2600}] * 10_000}
    path = "/v1/chat/completions"
    return {
        "one text": post(path, json.dumps(text).encode()),
        "10,000 messages": post(path, json.dumps(messages).encode()),
    }


Case = tuple[list[str], Callable[[Target], Any]]


async def nobody(target: Target) -> None:
    """No bad client at all: what the machine does by itself."""
    await trio.sleep_forever()


def cases() -> dict[str, Case]:
    """Name → (more settings, the bad clients)."""
    found: dict[str, Case] = {
        "nobody": ([], nobody),
        f"{NUM_SLOW} read nothing": ([], many(NUM_SLOW, lambda t: slow_reader(t, math.inf))),
        f"{NUM_SLOW} read a byte a second": ([], many(NUM_SLOW, lambda t: slow_reader(t, 1.0))),
        f"{NUM_SLOW} half-closed": ([], many(NUM_SLOW, half_closed)),
        f"{NUM_SLOW} send a byte a second": ([], many(NUM_SLOW, slow_body)),
        f"{NUM_IDLE} idle": ([], many(NUM_IDLE, idle)),
    }
    for name, body in large_bodies().items():
        found[f"4 send 27 MB, refused: {name}"] = ([], many(4, lambda t, b=body: large_body(t, b)))
        found[f"4 send 27 MB, taken: {name}"] = (LARGE, many(4, lambda t, b=body: large_body(t, b)))
    return found


@contextlib.contextmanager
def bad_clients(name: str, port: int) -> Iterator[None]:
    """The bad clients of a case in a process of their own, which takes no time from the good."""
    command = [sys.executable, __file__, "--bad", name, "--port", str(port)]
    process = subprocess.Popen(command, preexec_fn=with_parent())
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def blocked(target: Target) -> float:
    """How often the server's own loop has been blocked for 0.25 s, by its own account."""
    client = Client(target)
    _, body = await client.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    client.close()
    values = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if line)
    return float(values.get("trioserve_event_loop_blocked_total", "nan"))


async def run_case(name: str, settings: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One server, good clients, and the bad ones beside them for ``--seconds``."""
    port = free_port()
    target = Target.of(f"http://127.0.0.1:{port}")
    noticed = Noticed()
    with server([*(args.arguments or DEFAULT), *settings], None, port) as process:
        await until_ready(target, process, READY_S)
        async with trio.open_nursery() as nursery:
            for _ in range(NUM_STREAMS):
                nursery.start_soon(watch_stream, target, noticed)
            nursery.start_soon(watch_readiness, target, noticed)
            await trio.sleep(1)
            noticed.gaps_s.clear()
            noticed.probes_s.clear()
            cpu_s, num_blocked = cpu_s_of_tree(process.pid), await blocked(target)
            with bad_clients(name, port):
                await trio.sleep(args.seconds)
                cpu_s = cpu_s_of_tree(process.pid) - cpu_s
                memory = own_bytes(process.pid)
                num_blocked = await blocked(target) - num_blocked
                nursery.cancel_scope.cancel()
    result = noticed.result() | {
        "loop_blocked": num_blocked,
        "server_cpu_share": round(cpu_s / args.seconds, 3),
        "parent_mib": round(memory / 2**20, 1),
    }
    return result | ({"failures": noticed.failures} if noticed.failures else {})


async def main(args: argparse.Namespace) -> dict[str, Any]:
    told = conditions()
    found: dict[str, Any] = {}
    faults: list[str] = []
    for name, (settings, _) in cases().items():
        if args.only and args.only not in name:
            continue
        found[name] = await run_case(name, settings, args)
        print(name, found[name], file=sys.stderr, flush=True)
        for kind, limit in (("gap", args.gap_ms), ("probe", args.probe_ms)):
            if (worst := found[name][f"{kind}_worst_ms"]) > limit:
                faults.append(f"{name}: a {kind} of {worst:g} ms")
        faults += [
            f"{name}: {count} times {x}" for x, count in found[name].get("failures", {}).items()
        ]
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "baseline")}
    return {
        "bench": "overload",
        "conditions": told,
        "settings": settings,
        "verdict": "disturbed" if faults else "undisturbed",
        "faults": faults,
        "median": found,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="*", help="of trioserve run, after --")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each case")
    parser.add_argument("--gap-ms", type=float, default=300.0, metavar="MS", help="of a stream")
    parser.add_argument("--probe-ms", type=float, default=200.0, metavar="MS", help="of readiness")
    parser.add_argument("--only", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--bad", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    add_output_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.bad:
        _, clients = cases()[options.bad]
        trio.run(clients, Target.of(f"http://127.0.0.1:{options.port}"))
        sys.exit()
    result = trio.run(main, options)
    lines = [f"verdict: {result['verdict']}", *result["faults"]]
    write_result(result, options, None, lines)
    sys.exit(1 if result["faults"] else 0)
