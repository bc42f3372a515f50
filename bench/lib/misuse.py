"""Clients as servers meet them: tiny requests, requests left at any moment, requests in error.

Each kind is a function that makes one request and returns what came of it in a word or two; what
should not have come of it begins with UNEXPECTED.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from attrs import define, frozen

from lib.client import Target

UNEXPECTED = "unexpected: "
RESET = b"\x01\0\0\0\0\0\0\0"  # SO_LINGER: close with a reset
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@frozen
class Limits:
    """What the server takes, as far as requests must know it."""

    vocab_size: int
    max_model_len: int

    def prompt(self, rng: random.Random, longest: int) -> list[int]:
        """Random token ids, 1 to ``longest``, as many as the context has room for."""
        longest = min(longest, self.max_model_len - 2)
        return [rng.randrange(self.vocab_size) for _ in range(rng.randint(1, longest))]


@define
class Client:
    """One connection; makes a new one where the last was closed. Not for two tasks at once."""

    target: Target
    stream: trio.SocketStream | None = None

    async def send(self, data: bytes) -> trio.SocketStream:
        """Send on the connection that is there, or on a new one."""
        if self.stream is None:
            sock = trio.socket.socket(self.target.family, socket.SOCK_STREAM)
            await sock.connect(self.target.address)
            self.stream = trio.SocketStream(sock)
        await self.stream.send_all(data)
        return self.stream

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to ``data``; status 0 where the connection ended first."""
        try:
            stream = await self.send(data)
            status, body, kept = await _answer(stream)
        except (trio.BrokenResourceError, OSError):
            status, body, kept = 0, b"", False
        if not kept:
            self.close()
        return status, body

    def close(self, *, reset: bool = False) -> None:
        """Leave, if there is a connection."""
        if self.stream is not None:
            if reset:
                self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.stream.socket.close()
            self.stream = None


async def _answer(stream: trio.SocketStream) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection may be used again."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = await stream.receive_some(65536)
        if not piece:
            return 0, b"", False
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = LENGTH.search(head)
    while not (body.endswith(b"0\r\n\r\n") if length is None else len(body) >= int(length[1])):
        piece = await stream.receive_some(65536)
        if not piece:
            return 0, body, False
        body += piece
    return int(head[9:12]), body, b"connection: close" not in head.lower()


def post(path: str, body: Any) -> bytes:
    """A POST of JSON, or of bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


# --------------------------------------------------------------------------------- kinds

Kind = Callable[[Client, Limits, random.Random], Awaitable[str]]


async def tiny(client: Client, limits: Limits, rng: random.Random) -> str:
    """A short prompt, different each time, and one token."""
    stream = rng.random() < 0.5
    body = {"prompt": limits.prompt(rng, 32), "max_tokens": 1, "stream": stream}
    status, answer = await client.ask(post(COMPLETIONS, body))
    whole = status == 200 and (not stream or b"[DONE]" in answer)
    return "ok" if whole else f"{UNEXPECTED}{status} {answer[:200]!r}"


async def aborted(client: Client, limits: Limits, rng: random.Random) -> str:
    """A long answer, left at a random moment; prompts share one of four beginnings."""
    own = Client(client.target)  # to be left
    beginning = [(7 * rng.randrange(4) + i) % limits.vocab_size for i in range(100)]
    prompt = (beginning + limits.prompt(rng, 300))[: limits.max_model_len - 2]
    moment = rng.choice(["body", "sent", "soon", "first token", "later"])
    stream = moment in ("first token", "later") or rng.random() < 0.5
    body = {
        "prompt": prompt,
        "max_tokens": 1000,
        "ignore_eos": True,
        "n": rng.choice([1, 1, 2]),
        "stream": stream,
    }
    data = post(COMPLETIONS, body)
    try:
        if moment == "body":
            await own.send(data[: rng.randrange(1, len(data))])
            return "left while sending"
        sent = await own.send(data)
        if moment == "sent":
            return "left when sent"
        if moment == "soon":
            await trio.sleep(rng.random() * 0.03)
            return "left soon"
        wanted = 1 if moment == "first token" else rng.randint(2, 20)
        received = b""
        while received.count(b"data: ") < wanted:
            piece = await sent.receive_some(65536)
            if not piece or received[9:12] not in (b"", b"200"):
                return f"{UNEXPECTED}{received[:200]!r}"
            received += piece
        return f"left at {moment}" if wanted == 1 else "left while decoding"
    except (trio.BrokenResourceError, OSError) as error:
        return f"{UNEXPECTED}{moment}: {type(error).__name__}"
    finally:
        own.close(reset=rng.random() < 0.5)


def _errors(limits: Limits, rng: random.Random) -> tuple[str, bytes, tuple[int, ...]]:
    good = {"prompt": "hello", "max_tokens": 4}
    long = {"prompt": limits.prompt(rng, 200), "max_tokens": 1000, "ignore_eos": True}
    unknown = f"m{rng.random()}"
    cases: list[tuple[str, bytes, tuple[int, ...]]] = [
        ("not json", post(COMPLETIONS, b'{"prompt": '), (400,)),
        ("wrong type", post(COMPLETIONS, good | {"temperature": "hot"}), (400,)),
        ("no prompt", post(CHAT, {"messages": []}), (400,)),
        ("bad id", post(COMPLETIONS, {"prompt": [limits.vocab_size]}), (400,)),
        ("too long", post(COMPLETIONS, {"prompt": [1] * (limits.max_model_len + 1)}), (400,)),
        ("unknown model", post(COMPLETIONS, good | {"model": unknown}), (404,)),
        ("unknown field", post(COMPLETIONS, good | {unknown: 1}), (200,)),
        ("no route", f"GET /{unknown} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), (404,)),
        ("method", b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", (405,)),
        ("malformed", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", (400,)),
        ("late", post(COMPLETIONS, long | {"timeout_s": 0.001}), (504,)),
        ("late stream", post(COMPLETIONS, long | {"timeout_s": 0.02, "stream": True}), (200, 504)),
    ]
    return rng.choice(cases)


async def erroneous(client: Client, limits: Limits, rng: random.Random) -> str:
    """One of a dozen errors; the answer has the status that belongs to it."""
    name, data, expected = _errors(limits, rng)
    status, answer = await client.ask(data)
    if status not in expected or (status == 200 and name == "late stream" and b"[DONE]" in answer):
        return f"{UNEXPECTED}{name}: {status} {answer[:200]!r}"
    return name


KINDS: dict[str, Kind] = {"tiny": tiny, "aborted": aborted, "erroneous": erroneous}


async def make_requests(
    target: Target, kind: str, limits: Limits, num_requests: int, num_streams: int, seed: str
) -> dict[str, int]:
    """Make requests of one kind, ``num_streams`` at a time; counts what came of them.

    All connections are closed when it returns. Cancellation closes them too.
    """
    outcomes: dict[str, int] = {}
    numbers = iter(range(num_requests))
    make = KINDS[kind]

    async def stream() -> None:
        client = Client(target)
        try:
            for number in numbers:
                outcome = await make(client, limits, random.Random(f"{seed}/{kind}/{number}"))
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
        finally:
            client.close()

    async with trio.open_nursery() as nursery:
        for _ in range(num_streams):
            nursery.start_soon(stream)
    return outcomes
