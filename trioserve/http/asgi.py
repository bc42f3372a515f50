"""The app class, and one request's way through it, over whichever protocol it came.

quart-trio runs a request as two tasks and cancels the one that answers while hypercorn is still
inside the last send; and a body iterator that never starts never cleans up. Here a request is one
task, the last send is not cancelled, and what a request holds lives on an ExitStack around all of
it. Routes that take prompts are called directly: quart's way to a view costs more than a small
answer (docs/decisions/0010).
"""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Protocol, cast

import attrs
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
from quart import Request, Response
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException

from trioserve.errors import RequestError
from trioserve.http.auth import ApiKeys
from trioserve.http.background import BackgroundTasks
from trioserve.http.body import RequestBody
from trioserve.http.errors import error_reply, http_error_reply, internal_error_reply
from trioserve.http.exchange import Exchange
from trioserve.http.guard import PASSED, Guard
from trioserve.http.messages.errors import in_anthropics_shape, is_messages_path
from trioserve.http.reply import Reply
from trioserve.http.request_log import RequestRecord
from trioserve.http.request_state import RequestState, enter_request, request_state

if TYPE_CHECKING:
    from trioserve.config.schema import Config
    from trioserve.engine.api import EngineApi
    from trioserve.http.metrics import Metrics
    from trioserve.http.open_requests import OpenRequests
    from trioserve.http.routes.page import PageRoutes
    from trioserve.tracing.tracer import Tracer

log = logging.getLogger(__name__)

CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Handler = Callable[[], Awaitable[Reply]]


@attrs.frozen
class AppContext:
    """What the routes of one app work with."""

    engine: EngineApi
    config: Config
    stopping: trio.Event
    open_requests: OpenRequests
    metrics: Metrics
    parsing: trio.CapacityLimiter  # threads for large bodies
    guard: Guard = attrs.field(factory=lambda: Guard(ApiKeys((), None)))
    page: PageRoutes | None = None
    tracer: Tracer | None = None
    background: BackgroundTasks = attrs.field(factory=BackgroundTasks)


class NoWebsocket:
    """Refuses an ASGI websocket, which HTTP/2 can ask for: there is no such route."""

    def __init__(self, app: QuartTrio, scope: Any) -> None:
        pass

    async def __call__(self, receive: Any, send: Any) -> None:
        """Answer 403. Cancellation leaves the stream to the connection."""
        await send({"type": "websocket.close", "code": 1000})


class App(QuartTrio):
    """A quart-trio app that carries its context; no globals, any number per process."""

    context: AppContext

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.short_ways: dict[str, Handler] = {}

    def add_prompt_route(self, path: str, endpoint: str, handler: Handler) -> None:
        """Add a route for POST that is called without quart where path and method are just these.

        The handler finds its request in ``request_state()`` alone. quart knows the route too: for
        the list of routes, and for all that asks for it in another way.
        """
        self.add_url_rule(path, endpoint, view_func=cast(Any, handler), methods=["POST"])
        self.short_ways[path] = handler

    async def make_response(self, result: Any) -> Any:
        """As quart's, for a Reply as well."""
        if isinstance(result, Reply):
            return _ReplyResponse(result)
        return await super().make_response(result)

    async def make_default_options_response(self) -> Any:
        """As quart's, without the type of a body that there is not."""
        response = await super().make_default_options_response()
        del response.headers["Content-Type"]
        return response

    async def handle_user_exception(
        self, error: Exception | BaseExceptionGroup[BaseException]
    ) -> Any:
        """Note the error for the metrics, and make an answer of it."""
        answer = await super().handle_user_exception(error)
        request_state().error = bare(error) if isinstance(error, Exception) else None
        return answer


class _ReplyResponse(Response):
    """Takes a Reply through quart, which may add headers; its body is not made here."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(b"", status=reply.status, headers=reply.headers)
        self.reply = reply
        del self.headers["Content-Length"]


def bare(error: Exception) -> Exception:
    """The error without its frames: they hold the body, and a cycle around them would keep it until
    the collector comes by."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def reply_to(error: Exception) -> Reply:
    """The answer for whatever a route raised; a bug of ours is logged."""
    state = request_state()
    if isinstance(error, RequestError):
        reply = error_reply(error)
    elif isinstance(error, HTTPException):
        reply = http_error_reply(error, state.method, state.path)
    else:
        log.error("request %s failed", state.id, exc_info=error)
        reply = internal_error_reply()
    return in_anthropics_shape(reply, state.id) if is_messages_path(state.path) else reply


class Sender(Protocol):
    """The way of one answer to its client."""

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head, or hold it until there is something to go with it."""

    async def write(self, data: bytes) -> None:
        """Send a piece of the body, which is not empty."""

    async def end(self) -> None:
        """Send the end; not cancelled."""

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send an answer whose body is there: the three in one; not cancelled."""


class RequestConnection(TrioASGIHTTPConnection):
    """One request and its answer.

    Args:
        exchange: what it shares with its connection, where that knows of it.
    """

    app: App

    def __init__(self, app: App, scope: HTTPScope, exchange: Exchange | None = None) -> None:
        super().__init__(app, scope)
        self._exchange = exchange or Exchange()
        config = app.context.config.http
        timeout_s = min(config.body_timeout_s, config.request_timeout_s or math.inf)
        self.body = RequestBody(config.max_body_bytes, timeout_s, _announced(scope["headers"]))

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Answer one request that comes by ASGI. Cancellation, as by a client that left, closes
        all it holds."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._feed, receive, nursery.cancel_scope)
            await self.run(_AsgiSender(cast(Any, send)))
            nursery.cancel_scope.cancel()

    async def _feed(self, receive: ASGIReceiveCallable, scope: trio.CancelScope) -> None:
        """Take in the body; the client's leaving ends the request."""
        while (message := await receive())["type"] == "http.request":
            self.body.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.body.end()
        scope.cancel()

    async def run(self, sender: Sender) -> None:
        """Answer the request, whose body is fed by somebody else. Cancellation closes all it
        holds."""
        context, scope = self.app.context, self.scope
        headers = cast(list[tuple[bytes, bytes]], scope["headers"])
        started = trio.current_time()
        with ExitStack() as lifetime:
            tasks = AsyncExitStack()
            state = RequestState("", self._exchange, lifetime, tasks, body=self.body)
            state.method, state.path, state.headers = scope["method"], scope["path"], headers
            given = state.header(b"x-request-id")
            state.id = given if CLIENT_ID.fullmatch(given) else secrets.token_hex(12)
            enter_request(state)
            if (tracer := context.tracer) is not None:
                state.trace = tracer.begin(state.id, state.method, state.path, headers)
            if context.config.log.requests:
                state.record = RequestRecord(context.config.log)
            lifetime.callback(self._account, state, started)
            async with tasks:
                reply = await self._judge(state)
                state.status = reply.status
                await self._send(sender, state, reply)
                state.end_tasks()

    async def _judge(self, state: RequestState) -> Reply:
        """The answer, once the guard has let the request pass; it is not routed before."""
        verdict = self.app.context.guard.judge(self.scope)
        if verdict is PASSED:
            return await self._route(state)
        if verdict.preflight:
            reply = Reply(b"", 204, {})
        elif verdict.refusal is not None:
            reply = await self._refused(verdict.refusal)
        else:
            reply = await self._route(state)
        reply.headers.update(verdict.headers)
        return reply

    async def _route(self, state: RequestState) -> Reply:
        handler = self.app.short_ways.get(state.path) if state.method == "POST" else None
        if handler is None:
            return await self._by_quart(state)
        state.route = state.path
        try:
            return await handler()
        except Exception as error:
            reply = reply_to(error)
            state.error = bare(error)
            return reply

    async def _by_quart(self, state: RequestState) -> Reply:
        request = self._quarts_request()
        response = await self.app.handle_request(request)
        state.route = request.url_rule.rule if request.url_rule is not None else None
        return await _as_reply(cast(Response, response))

    def _quarts_request(self) -> Request:
        # It could push further answers through what it is given; nothing here does.
        return self._create_request_from_scope(cast(Any, None))

    async def _refused(self, refusal: RequestError) -> Reply:
        page = self.app.context.page
        if page is not None:
            form = page.refused(self._quarts_request(), refusal)
            if form is not None:
                return await _as_reply(form)
        return reply_to(refusal)

    async def _send(self, sender: Sender, state: RequestState, reply: Reply) -> None:
        headers = reply.headers
        headers["X-Request-Id"] = state.id
        if self.app.context.stopping.is_set() and self.scope["http_version"].startswith("1"):
            headers["Connection"] = "close"
        body, status = reply.body, reply.status
        if isinstance(body, bytes):
            if status not in (204, 304):
                headers["Content-Length"] = str(len(body))
            await sender.whole(status, _encoded(headers), body)
        else:
            await sender.start(status, _encoded(headers))
            await body.send_to(sender.write)
            await sender.end()

    def _account(self, state: RequestState, started: float) -> None:
        context = self.app.context
        context.metrics.count_request(state.route, state.status)
        if state.accepted is False:
            context.metrics.count_rejection(state.error)
        if state.trace is not None and context.tracer is not None:
            model = context.engine.served_names[0]
            state.trace.end(state.route, state.status, model, state.error)
            context.tracer.add(state.trace)
        if state.record is not None:
            state.record.write(
                id=state.id,
                method=state.method,
                route=state.route,
                status=state.status,
                seconds=trio.current_time() - started,
                client=self.scope.get("client"),
            )
        log.debug(
            "%s %s: %s in %.1f ms, request %s",
            state.method,
            state.route or "(no route)",
            state.status or "client gone",
            (trio.current_time() - started) * 1000,
            state.id,
        )


class _AsgiSender:
    """By ASGI's messages, as over HTTP/2."""

    def __init__(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._send = send

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """As Sender's."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """As Sender's."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """As Sender's."""
        # hypercorn posts the disconnect, which cancels this task, from inside this last send.
        with trio.CancelScope(shield=True):
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """As Sender's."""
        await self.start(status, headers)
        if body:
            await self.write(body)
        await self.end()


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def _announced(headers: Any) -> int:
    """What the head says of the body's length, which the connection has checked."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return 0


async def _as_reply(response: Response) -> Reply:
    if isinstance(response, _ReplyResponse):
        response.reply.headers = dict(response.headers)
        return response.reply
    body = await response.get_data()
    assert isinstance(body, bytes)
    return Reply(body, response.status_code, dict(response.headers))


App.asgi_http_class = cast(Any, RequestConnection)
App.asgi_websocket_class = cast(Any, NoWebsocket)
