"""What does HTTP cost: processor time of the server per streamed chunk and per small request?

A server around an engine that answers at once, in this process; the client is another process, so
that this one's processor time is the server's alone. One JSON object on stdout.

    python bench/http_overhead.py [--chunks 2000] [--requests 300] [--streams 8]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
from typing import Any

import trio

from trioserve.config.schema import Config, HttpConfig
from trioserve.engine.api import (
    EngineStatus,
    GenerationDefaults,
    Phase,
    TextDelta,
    Timings,
    Usage,
)
from trioserve.http.listeners import bind
from trioserve.http.server import serve_http
from trioserve.sampling_params import SamplingParams

CLIENT = """
import socket, sys
port, path, num, body = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].encode()
request = (f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
           f"Content-Length: {len(body)}\\r\\n\\r\\n").encode() + body
sock = socket.create_connection(("127.0.0.1", port))
for _ in range(num):
    sock.sendall(request)
    seen = b""
    while True:
        data = sock.recv(1 << 16)
        if not data:
            sys.exit("connection closed")
        seen = seen[-2000:] + data
        if b"0\\r\\n\\r\\n" in seen or (b"content-length" in seen and seen.endswith(b"}")):
            break
"""


class InstantStream:
    """Answers with ``max_tokens`` deltas of one token, a scheduling point between each."""

    def __init__(self, id: int, prompt_token_ids: list[int], num_tokens: int) -> None:
        self.id = id
        self.prompt_token_ids = prompt_token_ids
        self._left = self._num_tokens = num_tokens

    async def __aenter__(self) -> InstantStream:
        return self

    async def __aexit__(self, *args: object) -> None:
        self.close()

    def __aiter__(self) -> InstantStream:
        return self

    async def __anext__(self) -> TextDelta:
        if not self._left:
            raise StopAsyncIteration
        await trio.lowlevel.checkpoint()
        self._left -= 1
        return TextDelta(" token", [7], finish_reason=None if self._left else "length")

    def close(self) -> None:
        pass

    @property
    def timings(self) -> Timings:
        return Timings(0.0, None, None, None)

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_token_ids), self._num_tokens, 0)


class InstantEngine:
    """The smallest EngineApi."""

    served_names = ("bench",)
    max_model_len = 1_000_000
    generation_defaults = GenerationDefaults()
    status = EngineStatus(Phase.READY, 1, [], None, "bench", None, None, 0, 1.0, 1.0)

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * len(text)

    async def render_chat(self, messages: list[dict[str, Any]], **extra: Any) -> list[int]:
        return [1, 2, 3]

    def submit(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> InstantStream:
        return InstantStream(1, prompt_token_ids, sampling.max_tokens or 16)


async def measure(port: int, path: str, num_requests: int, body: Any, num_clients: int) -> float:
    """Processor seconds of this process while the clients run."""
    command = [
        *(sys.executable, "-c", CLIENT, str(port), path, str(num_requests)),
        json.dumps(body),
    ]
    before = time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(num_clients):
            nursery.start_soon(trio.run_process, command)
    return time.process_time() - before


async def main(args: argparse.Namespace) -> dict[str, Any]:
    config = Config(http=HttpConfig(port=0))
    listeners = bind(config.http)
    port = listeners[0].socket.getsockname()[1]
    stopping = trio.Event()
    messages = [{"role": "user", "content": "hello"}]
    whole = {"messages": messages, "max_tokens": 1}
    stream = {"messages": messages, "max_tokens": args.chunks, "stream": True}

    async def run(task_status: trio.TaskStatus[None]) -> None:
        await serve_http(
            InstantEngine(),  # type: ignore[arg-type]
            listeners,
            config,
            stopping=stopping,
            drain_deadline_s=1.0,
            task_status=task_status,
        )

    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        chat = "/v1/chat/completions"
        await measure(port, chat, 20, whole, 1)
        idle = await measure(port, chat, 1, whole, 1)
        requests_s = await measure(port, chat, args.requests, whole, 1) - idle
        streams_s = await measure(port, chat, 1, stream, args.streams) - idle * args.streams
        stopping.set()
    return {
        "us_per_json_request": round(requests_s / (args.requests - 1) * 1e6, 1),
        "us_per_sse_chunk": round(streams_s / (args.streams * args.chunks) * 1e6, 1),
        "requests": args.requests,
        "streams": args.streams,
        "chunks_per_stream": args.chunks,
        "python": platform.python_version(),
        "trio": trio.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=8)
    print(json.dumps(trio.run(main, parser.parse_args()), indent=1))
