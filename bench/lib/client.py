"""An HTTP client that costs little while it measures: raw sockets, a connection per request.

The connection is made before the clock of a request starts. What comes is kept with its time and
understood later by ``lib.answers``.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import h11
import trio
from attrs import evolve, frozen

from lib.answers import Exchange, Outcome, read_answer, read_response

LAST_CHUNK = b"\r\n0\r\n\r\n"
POLL_S = 0.2
START_POLL_S = 0.05  # each poll costs the starting server a little
FIRST_WORDS = 16  # of the prompts that tell how a server counts
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# For servers that want text: in nearly every vocabulary each of these is one token with its blank.
COMMON_WORDS = """
the of and to in is that for was on are with as at be this have from or had by not but what
all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use may water
long little very after words called just where most know
"""


class ServerError(Exception):
    """The server cannot be measured; the text says why."""


@frozen
class Target:
    """Where a server listens. ``prefix`` is the path before /v1."""

    host: str
    port: int
    prefix: str
    family: int
    address: Any

    @classmethod
    def of(cls, url: str) -> Target:
        """Resolve a base URL, with or without /v1 at its end. Blocking.

        Raises:
            ServerError: it is no http URL, or its host has no address.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ServerError(f"{url}: expected http://HOST:PORT")
        port = parts.port or 80
        try:
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ServerError(f"{url}: {error}") from None
        family, _, _, _, address = sorted(found)[0]  # IPv4 first, as servers do by default
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, prefix, family, address)


@frozen
class Request:
    """A request as it goes over the wire."""

    target: str  # method and path
    data: bytes


def make_request(target: Target, method: str, path: str, body: Any = None) -> Request:
    """A request to ``path`` under the base URL, with a JSON body if one is given."""
    payload = b"" if body is None else json.dumps(body).encode()
    headers = [("Host", f"{target.host}:{target.port}"), ("Connection", "close")]
    if payload:
        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(payload)))]
    connection = h11.Connection(h11.CLIENT)
    head = h11.Request(method=method, target=target.prefix + path, headers=headers)
    data = (connection.send(head) or b"") + payload
    return Request(f"{method} {target.prefix}{path}", data)


async def exchange(
    target: Target, request: Request, timeout_s: float, due_at: float | None = None
) -> Exchange:
    """Send, and receive to the end. What goes wrong is noted in the result, never raised.

    Cancellation closes the connection.
    """
    result = Exchange(request.target, sent_at=time.perf_counter())
    with trio.move_on_after(timeout_s) as scope:
        try:
            await _transfer(target, request, result, due_at)
        except OSError as error:
            result.failure = f"connect: {type(error).__name__}"
        except trio.BrokenResourceError as error:
            result.failure = type(error.__cause__ or error).__name__
    if scope.cancelled_caught:
        result.failure = "timeout"
    return result


async def _transfer(
    target: Target, request: Request, result: Exchange, due_at: float | None
) -> None:
    sock = trio.socket.socket(target.family, socket.SOCK_STREAM)
    with sock:
        await sock.connect(target.address)
        stream = trio.SocketStream(sock)
        result.sent_at = time.perf_counter()
        result.lag_s = result.sent_at - due_at if due_at is not None else 0.0
        await stream.send_all(request.data)
        tail = b""
        while True:
            data = await stream.receive_some(65536)
            result.pieces.append((time.perf_counter(), data))
            tail = (tail + data)[-len(LAST_CHUNK) :]
            if not data or tail == LAST_CHUNK:
                return


async def closed_loop(
    target: Target, requests: Iterable[Request], num_streams: int, timeout_s: float
) -> list[Exchange]:
    """``num_streams`` at once, each sending its next request when its last has been answered."""
    queue = iter(requests)
    results: list[Exchange] = []

    async def stream() -> None:
        for request in queue:
            result = await exchange(target, request, timeout_s)
            results.append(result)

    async with trio.open_nursery() as nursery:
        for _ in range(num_streams):
            nursery.start_soon(stream)
    return results


def poisson_offsets(rate: float, num_requests: int, seed: str) -> list[float]:
    """Seconds from the start at which requests arrive, ``rate`` a second on average."""
    rng = random.Random(seed)
    at = 0.0
    offsets = []
    for _ in range(num_requests):
        at += rng.expovariate(rate)
        offsets.append(at)
    return offsets


async def open_loop(
    target: Target, requests: list[Request], offsets: list[float], timeout_s: float
) -> list[Exchange]:
    """Each request at its own time, whatever became of those before."""
    results: list[Exchange] = []
    start = time.perf_counter()

    async def send(request: Request, due_at: float) -> None:
        results.append(await exchange(target, request, timeout_s, due_at))

    async with trio.open_nursery() as nursery:
        for request, offset in zip(requests, offsets, strict=True):
            await trio.sleep(max(0.0, start + offset - time.perf_counter()))
            nursery.start_soon(send, request, start + offset)
    return results


async def get_json(target: Target, path: str, timeout_s: float = 10.0) -> tuple[int, Any]:
    """Status and body of a GET; status 0 without an answer, None for a body that is no JSON."""
    result = await exchange(target, make_request(target, "GET", path), timeout_s)
    response = read_response(result)
    if response is None:
        return 0, None
    try:
        return response.status, json.loads(response.whole_body)
    except ValueError:
        return response.status, None


# ------------------------------------------------------------------------------- prompts


@frozen
class Workload:
    """What is asked: ``kind`` is "ids", "text" or "chat"; ``size`` counts ids, or words.

    Of these, ``tail`` at the end are a request's own where it is one of several with one beginning.
    """

    model: str
    kind: str
    size: int
    max_tokens: int
    vocabulary: range
    extra: dict[str, Any]
    tail: int = 0

    def body(self, seed: str, shared: str | None = None) -> dict[str, Any]:
        """The JSON of one request; the prompt is random, and the same for the same seed. With the
        same ``shared`` the beginning is the same too."""
        source: Sequence[Any] = self.vocabulary if self.kind == "ids" else COMMON_WORDS.split()
        own = self.size if shared is None else min(self.tail, self.size)
        pieces = random.Random(shared).choices(source, k=self.size - own)
        pieces += random.Random(seed).choices(source, k=own)
        prompt: Any
        if self.kind == "ids":
            prompt = {"prompt": pieces}
        else:
            text = " ".join(pieces)
            chat = {"messages": [{"role": "user", "content": text}]}
            prompt = chat if self.kind == "chat" else {"prompt": text}
        body = {
            "model": self.model,
            **prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return {key: value for key, value in body.items() if value is not None}

    def request(self, target: Target, seed: str, shared: str | None = None) -> Request:
        """One request, ready to be sent."""
        path = CHAT if self.kind == "chat" else COMPLETIONS
        return make_request(target, "POST", path, self.body(seed, shared))

    def requests(self, target: Target, seed: str, num_requests: int) -> Iterator[Request]:
        """Requests whose prompts all differ."""
        return (self.request(target, f"{seed}/{index}") for index in range(num_requests))


async def ask(
    target: Target, workload: Workload, seed: str, timeout_s: float, shared: str | None = None
) -> Outcome:
    """The outcome of one request."""
    return read_answer(await exchange(target, workload.request(target, seed, shared), timeout_s))


async def describe_server(target: Target, wait_s: float) -> tuple[str, int | None]:
    """Name of the first model, and the vocabulary's size if the server tells; waits until ready.

    Raises:
        ServerError: it is not ready after ``wait_s``.
    """
    deadline = trio.current_time() + wait_s
    while True:
        ready, _ = await get_json(target, "/health/ready")  # other servers have no such path
        status, models = await get_json(target, "/v1/models")
        if ready != 503 and status == 200 and models and models.get("data"):
            break
        if trio.current_time() >= deadline:
            raise ServerError(
                f"http://{target.host}:{target.port}{target.prefix}: /v1/models gives "
                f"{status or 'no answer'}, /health/ready {ready or 'no answer'}; see --wait"
            )
        await trio.sleep(POLL_S)
    model = models["data"][0]
    size = (model.get("meta") or {}).get("n_vocab")
    status, startup = await get_json(target, "/startup")
    if status == 200 and startup and startup.get("info"):
        size = startup["info"]["vocab_size"]
    return model["id"], size


async def until_ready(target: Target, process: subprocess.Popen[Any], wait_s: float) -> None:
    """Return when a server that was started for this says that it is ready.

    Raises:
        SystemExit: it ended, or is not ready after ``wait_s``.
    """
    deadline = trio.current_time() + wait_s
    while (await get_json(target, "/health/ready"))[0] != 200:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}")
        if trio.current_time() >= deadline:
            raise SystemExit(f"the server is not ready after {wait_s:g} s")
        await trio.sleep(START_POLL_S)


async def settle(
    target: Target, workload: Workload, kinds: list[str], seed: str, timeout_s: float
) -> tuple[Workload, list[str]]:
    """The workload with the first kind of prompt that the server takes, and what it refused.

    Raises:
        ServerError: it takes none.
    """
    refused = []
    for kind in kinds:
        size = workload.size if kind == "ids" else FIRST_WORDS
        tried = evolve(workload, kind=kind, size=size)
        outcome = await ask(target, tried, f"{seed}/{kind}", timeout_s)
        if outcome.failure is None:
            break
        refused.append(f"prompts as {kind}: {outcome.failure}")
    else:
        raise ServerError("the server takes no request; " + "; ".join(refused))
    if kind != "ids" and outcome.prompt_tokens is not None:
        counted = outcome.prompt_tokens
        try:
            tried = await fit_words(target, tried, workload.size, counted, seed, timeout_s)
        except ServerError as error:
            raise ServerError("; ".join([*refused, str(error)])) from None
    return tried, refused


async def fit_words(
    target: Target,
    workload: Workload,
    num_tokens: int,
    counted: int,
    seed: str,
    timeout_s: float,
) -> Workload:
    """A workload of as many words as make ``num_tokens``, by the server's count.

    ``counted`` is what the server counted for the words of ``workload``. Where words differ in
    tokens, so do prompts, a little.
    """
    per_word: float | None = None
    for turn in range(4):
        wanted = workload.size + (num_tokens - counted) / (per_word or 1.0)
        # The first step is small and tells how many tokens a word has.
        size = 2 * FIRST_WORDS if per_word is None else max(1, round(wanted))
        if size == workload.size:
            break
        before, words = counted, workload.size
        workload = evolve(workload, size=size)
        outcome = await ask(target, workload, f"{seed}/fit/{turn}", timeout_s)
        if outcome.prompt_tokens is None:
            raise ServerError(f"prompts of {size} words: {outcome.failure or 'not counted'}")
        counted = outcome.prompt_tokens
        per_word = per_word or max(0.5, (counted - before) / (size - words))
    return workload
