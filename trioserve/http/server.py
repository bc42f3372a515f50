"""Accepts connections and serves them, each on its own; drains when told to stop."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Sequence
from typing import Protocol, cast

import attrs
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework
from prometheus_client.registry import Collector

from trioserve.config.schema import Config, HttpConfig
from trioserve.engine.api import EngineApi
from trioserve.http.app import make_app
from trioserve.http.asgi import App
from trioserve.http.connection import Connection, HeadLimits
from trioserve.http.guard import Guard
from trioserve.http.stream import ClientStream, StreamLike
from trioserve.http.tls import Tls
from trioserve.tracing.tracer import Tracer

log = logging.getLogger(__name__)

FLUSH_S = 2.0  # for last words and idle connections once nothing is open any more
ACCEPT_PAUSE_S = 0.1
ACCEPT_TOLD_S = 10.0  # between two lines about it
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class ListenerLike(Protocol):
    """What is used of a listener; ``trioserve.http.listeners.Listener`` has it."""

    async def accept(self) -> StreamLike: ...
    def close(self) -> None: ...


@attrs.frozen
class DrainReport:
    """How the drain went."""

    num_cut: int  # requests ended by an error at the deadline


async def serve_http(
    engine: EngineApi,
    listeners: Sequence[ListenerLike],
    config: Config,
    *,
    stopping: trio.Event,
    drain_deadline_s: float,
    collectors: Sequence[Collector] = (),
    tracer: Tracer | None = None,
    guard: Guard | None = None,
    tls: Tls | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> DrainReport:
    """Serve until ``stopping`` is set, then drain and return.

    Draining: new generation requests get 503 and every answer closes its connection; probes are
    answered on; requests being answered go on until they end or until ``drain_deadline_s`` after
    ``stopping``, when each gets a final error. The listeners are closed when this returns. Installs
    no signal handlers. ``collectors`` have further series for ``/metrics``; ``tracer`` takes
    the notes of each request; ``guard`` and ``tls`` are made from the configuration unless given.

    Cancellation resets all connections at once.
    """
    try:
        app = make_app(engine, config, stopping, tracer=tracer, guard=guard)
        server = _Server(app, config.http, stopping, tls or Tls.from_config(config.http))
        server.add_metrics(collectors)
        return await server.serve(listeners, drain_deadline_s, task_status)
    finally:
        for listener in listeners:
            listener.close()


class _Server:
    """The connections of one ``serve_http``; only its own tasks write here."""

    def __init__(self, app: App, http: HttpConfig, stopping: trio.Event, tls: Tls | None) -> None:
        self._app = app
        self._open_requests = self._app.context.open_requests
        self._metrics = self._app.context.metrics
        self._http = http
        self._tls = tls
        self._limits = HeadLimits(http.max_header_bytes, http.max_headers)
        self._stopping = stopping
        self._wrapped = ASGIWrapper(cast(ASGIFramework, self._app))
        self._hypercorn = _hypercorn_config(http)
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._idle: dict[Connection, float] = {}  # since when; the longest first
        self._changed = trio.lowlevel.ParkingLot()  # until a connection closes or becomes idle

    def add_metrics(self, collectors: Sequence[Collector]) -> None:
        for collector in collectors:
            self._metrics.registry.register(collector)

    async def serve(
        self,
        listeners: Sequence[ListenerLike],
        drain_deadline_s: float,
        task_status: trio.TaskStatus[None],
    ) -> DrainReport:
        async with trio.open_nursery() as connections:
            await connections.start(self._app.context.background.run)
            try:
                async with trio.open_nursery() as acceptors:
                    for listener in listeners:
                        acceptors.start_soon(self._accept, listener, connections)
                    acceptors.start_soon(self._close_idle)
                    task_status.started()
                    await self._stopping.wait()
                    await self._drain(drain_deadline_s)
                    acceptors.cancel_scope.cancel()
                for listener in listeners:
                    listener.close()
                num_cut = self._open_requests.cut_all()
                if num_cut:
                    log.warning("drain deadline: %d requests cut", num_cut)
                await self._context.terminated.set()
                for connection in self._connections:
                    connection.close_if_idle()
                with trio.move_on_after(FLUSH_S):
                    await self._wait_no_connections()
            finally:
                # hypercorn shields its sends: cancelling alone would wait for slow clients.
                for connection in self._connections:
                    connection.stream.abort()
            connections.cancel_scope.cancel()
        return DrainReport(num_cut)

    async def _drain(self, deadline_s: float) -> None:
        if num_open := len(self._open_requests):
            log.info("draining: %d requests open, %g s at most", num_open, deadline_s)
        with trio.move_on_after(deadline_s):
            await self._open_requests.wait_none()

    async def _wait_no_connections(self) -> None:
        while self._connections:
            await self._changed.park()

    async def _accept(self, listener: ListenerLike, connections: trio.Nursery) -> None:
        told_s = -math.inf
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                if trio.current_time() - told_s >= ACCEPT_TOLD_S:
                    told_s = trio.current_time()
                    log.error("cannot accept connections: %s; trying on", error.strerror)
                self._close_longest_idle()
                await trio.sleep(ACCEPT_PAUSE_S)
                continue
            client = self._client(stream)
            try:
                await self._wait_for_room()
            except BaseException:
                client.abort()
                raise
            connection = Connection(
                self._wrapped,
                self._hypercorn,
                self._context,
                client,
                asked=self._app,
                http2=self._http.http2,
                on_idle=self._note_idle,
                handshake_timeout_s=self._http.tls_handshake_timeout_s,
                limits=self._limits,
            )
            self._connections.add(connection)
            connections.start_soon(self._serve_connection, connection, client)

    def _client(self, stream: StreamLike) -> ClientStream:
        if self._tls is None:
            return ClientStream(stream, self._http.send_timeout_s)
        return self._tls.wrap(stream, self._http.send_timeout_s)

    async def _close_idle(self) -> None:
        """Close connections that have been idle for the keep-alive time. Cancellation ends it.

        One task for all: a deadline for each would be set anew twice for every request. Whoever
        becomes idle while this sleeps is not due before it wakes.
        """
        timeout_s = self._http.keep_alive_timeout_s
        while True:
            now_s = trio.current_time()
            since_s = next(iter(self._idle.values()), now_s)
            if since_s + timeout_s > now_s:
                await trio.sleep_until(since_s + timeout_s)
            else:
                self._close_longest_idle()

    async def _wait_for_room(self) -> None:
        """Wait until one more connection may be served; the longest idle one makes room.

        So that clients which hold connections open and ask nothing lock nobody out. Those which
        are being answered are never closed for this.
        """
        leaving: Connection | None = None
        while len(self._connections) >= self._http.max_connections:
            if leaving not in self._connections:
                leaving = self._close_longest_idle()
            await self._changed.park()

    def _close_longest_idle(self) -> Connection | None:
        """Have the connection end that has been idle longest, and return it; None if all work."""
        if not self._idle:
            return None
        connection = next(iter(self._idle))
        del self._idle[connection]
        connection.close_if_idle()
        return connection

    def _note_idle(self, connection: Connection, idle: bool) -> None:
        self._idle.pop(connection, None)
        if idle:
            self._idle[connection] = trio.current_time()
            self._changed.unpark_all()

    async def _serve_connection(self, connection: Connection, client: ClientStream) -> None:
        """Serve one connection; whatever goes wrong in it ends it and nothing else."""
        self._metrics.connections.inc()
        try:
            await connection.run()
        except* Exception as group:
            self._metrics.connection_failures.inc()
            log.error("a connection failed", exc_info=group)
        finally:
            if client.timed_out:
                log.info("a client took nothing for %g s and was cut", self._http.send_timeout_s)
            client.abort()  # closed already, unless something went wrong
            self._connections.discard(connection)
            self._idle.pop(connection, None)
            self._changed.unpark_all()
            self._metrics.connections.dec()


def _hypercorn_config(http: HttpConfig) -> HypercornConfig:
    config = HypercornConfig()
    config.accesslog = None
    config.errorlog = logging.getLogger("trioserve.http.hypercorn")
    config.include_server_header = False
    config.h2_max_header_list_size = http.max_header_bytes
    config.keep_alive_timeout = http.keep_alive_timeout_s
    config.keep_alive_max_requests = 10**9
    return config
