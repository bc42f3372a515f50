"""A raw HTTP/1.1 client and a server around a fake engine, over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trioserve.config.schema import Config, HttpConfig, LogConfig, SchedulerConfig
from trioserve.http.listeners import bind
from trioserve.http.server import DrainReport, serve_http

from .fake_engine import FakeEngine

PATIENCE_S = 5.0  # only ever used up by a failing test


@attrs.define
class Served:
    """A server that runs."""

    engine: FakeEngine
    port: int
    stopping: trio.Event
    reports: list[DrainReport]
    scope: trio.CancelScope
    done: trio.Event
    clients: list[Client] = attrs.field(factory=list)

    async def connect(self) -> Client:
        """A new connection, closed when the test ends."""
        self.clients.append(Client(await trio.open_tcp_stream("127.0.0.1", self.port)))
        return self.clients[-1]

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on its own connection, answered in whole."""
        client = await self.connect()
        async with client.stream:
            await client.send(method, path, body, **headers)
            return await client.answer()


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    *,
    drain_s: float = 5.0,
    log: LogConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    limit_s: float = 30.0,
    **http: Any,
) -> AsyncIterator[Served]:
    """A server on a free port; cancelled at the end if the test did not drain it."""
    engine = engine or FakeEngine()
    config = Config(
        http=HttpConfig(port=0, **http),
        log=log or LogConfig(),
        scheduler=scheduler or SchedulerConfig(),
    )
    listeners = bind(config.http)
    name = listeners[0].socket.getsockname()
    port = name[1] if isinstance(name, tuple) else 0
    with trio.fail_after(limit_s):
        async with trio.open_nursery() as nursery:
            served = Served(engine, port, trio.Event(), [], nursery.cancel_scope, trio.Event())

            async def run(task_status: trio.TaskStatus[None]) -> None:
                report = await serve_http(
                    engine,
                    listeners,
                    config,
                    stopping=served.stopping,
                    drain_deadline_s=drain_s,
                    task_status=task_status,
                )
                served.reports.append(report)
                served.done.set()

            await nursery.start(run)
            try:
                yield served
            finally:
                for client in served.clients:
                    client.stream.socket.close()
            nursery.cancel_scope.cancel()


@attrs.define
class Answer:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event; the end marker as text."""
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    events: list[Any] = []
    for block in body.decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert not block or block.startswith(":"), block
    return events


class Client:
    """One connection."""

    def __init__(self, stream: trio.SocketStream, patience_s: float = PATIENCE_S) -> None:
        self.stream = stream
        self._patience_s = patience_s
        self._buffer = bytearray()

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        await self.stream.send_all(request_bytes(method, path, body, **headers))

    async def head(self) -> Answer:
        """The status line and headers of the next response."""
        head = await self._until(b"\r\n\r\n")
        lines = head.decode("latin1").split("\r\n")
        headers = {}
        for line in lines[1:]:
            if line:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
        return Answer(int(lines[0].split()[1]), headers, b"")

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body, empty at its end."""
        size = int(await self._until(b"\r\n"), 16)
        data = await self._exactly(size + 2)
        return data[:-2]

    async def event(self) -> Any:
        """The first event of the next chunk that has one."""
        while True:
            chunk = await self.chunk()
            if not chunk:
                raise EOFError("end of the stream")
            if events := parse_events(chunk):
                return events[0]

    async def answer(self) -> Answer:
        """The whole next response."""
        answer = await self.head()
        if answer.headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                answer.body += chunk
        else:
            answer.body = await self._exactly(int(answer.headers.get("content-length", 0)))
        return answer

    async def rest_of_chunks(self) -> bytes:
        """All chunks up to the end of the body."""
        data = b""
        while chunk := await self.chunk():
            data += chunk
        return data

    async def rest(self) -> bytes:
        """All that comes until the server ends its sending."""
        data, self._buffer = bytes(self._buffer), bytearray()
        with trio.fail_after(self._patience_s):
            async for piece in self.stream:
                data += piece
        return data

    def reset(self) -> None:
        """Leave at once."""
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.stream.socket.close()

    async def _until(self, mark: bytes) -> bytes:
        while (end := self._buffer.find(mark)) < 0:
            await self._more()
        found = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return found

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    async def _more(self) -> None:
        with trio.fail_after(self._patience_s):
            data = await self.stream.receive_some()
        if not data:
            raise EOFError(f"connection ended; had {bytes(self._buffer)!r}")
        self._buffer += data


def request_bytes(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    fields = {"Host": "test"}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in fields.items()
    )
    return head.encode() + b"\r\n" + (body or b"")
