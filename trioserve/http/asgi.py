"""The app class and its ASGI connection: quart-trio's, with request lifetime and final send mended.

quart-trio cancels a request's task while hypercorn is still inside the last send, which loses the
restart of the idle timer; and a body iterator that never starts never cleans up. Here the last send
is shielded, and what a request holds lives on an ExitStack around the whole ASGI call.
"""

from __future__ import annotations

import logging
import re
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import attrs
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import Request, Response
from quart import request as current_request
from quart.utils import encode_headers
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from trioserve.errors import RequestError
from trioserve.http.auth import ApiKeys
from trioserve.http.background import BackgroundTasks
from trioserve.http.errors import error_response
from trioserve.http.exchange import Exchange
from trioserve.http.guard import PASSED, Guard
from trioserve.http.request_log import RequestRecord
from trioserve.http.sse import StreamResponse

if TYPE_CHECKING:
    from trioserve.config.schema import Config
    from trioserve.engine.api import EngineApi
    from trioserve.http.metrics import Metrics
    from trioserve.http.open_requests import OpenRequests
    from trioserve.http.routes.page import PageRoutes
    from trioserve.tracing.record import RequestTrace
    from trioserve.tracing.tracer import Tracer

log = logging.getLogger(__name__)

CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


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


@attrs.define
class RequestState:
    """What belongs to one request, from its first byte to its last."""

    id: str
    exchange: Exchange
    lifetime: ExitStack
    nursery: trio.Nursery | None = None
    status: int | None = None
    route: str | None = None
    accepted: bool | None = None  # whether anything was submitted; None: it asks for no text
    error: Exception | None = None  # that became its answer
    trace: RequestTrace | None = None
    record: RequestRecord | None = None  # for the log, if requests are logged


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

    async def handle_user_exception(
        self, error: Exception | BaseExceptionGroup[BaseException]
    ) -> Any:
        """Note the error for the metrics, and make an answer of it."""
        state: RequestState = cast(Any, current_request.scope)["state"]["request"]
        state.error = error if isinstance(error, Exception) else None
        return await super().handle_user_exception(error)


class RequestConnection(TrioASGIHTTPConnection):
    """One ASGI call."""

    app: App

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Answer one request. Cancellation, as by a client that left, closes all it holds."""
        shared = cast(dict[str, Any], self.scope.get("state") or {})
        exchange = shared.get("exchange") or Exchange()
        started = trio.current_time()
        with ExitStack() as lifetime:
            state = RequestState(self._request_id(), exchange, lifetime)
            shared["request"] = state
            self.scope["state"] = cast(Any, shared)
            if (tracer := self.app.context.tracer) is not None:
                state.trace = tracer.begin(
                    state.id, self.scope["method"], self.scope["path"], self.scope["headers"]
                )
            if self.app.context.config.log.requests:
                state.record = RequestRecord(self.app.context.config.log)
            lifetime.callback(self._account, state, started)
            request = self._create_request_from_scope(send)
            async with trio.open_nursery() as nursery:
                state.nursery = nursery
                nursery.start_soon(self.handle_messages, nursery, request, receive)
                nursery.start_soon(self.handle_request, nursery, request, send)

    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        """Answer and end the call."""
        state: RequestState = cast(Any, request.scope)["state"]["request"]
        response = await self._answer(request)
        state.route = request.url_rule.rule if request.url_rule is not None else None
        state.status = response.status_code
        response.headers["X-Request-Id"] = state.id
        if self.app.context.stopping.is_set() and request.http_version.startswith("1"):
            response.headers["Connection"] = "close"
        await self._send(send, response, state.exchange)
        nursery.cancel_scope.cancel()

    async def _answer(self, request: Request) -> Response:
        """The response, once the guard has let the request pass; it is not routed before."""
        verdict = self.app.context.guard.judge(self.scope)
        if verdict is PASSED:
            return cast(Response, await self.app.handle_request(request))
        if verdict.preflight:
            response = Response(b"", status=204)
            del response.headers["Content-Type"]
        elif verdict.refusal is not None:
            response = await self._refused(verdict.refusal, request)
        else:
            response = cast(Response, await self.app.handle_request(request))
        for name, value in verdict.headers:
            response.headers.add(name, value)
        return response

    async def _refused(self, refusal: RequestError, request: Request) -> Response:
        from trioserve.http.messages.errors import in_anthropics_shape, is_messages_path

        page = self.app.context.page
        if page is not None and (form := page.refused(request, refusal)) is not None:
            return form
        response = error_response(refusal)
        if is_messages_path(request.path):
            state: RequestState = cast(Any, request.scope)["state"]["request"]
            await in_anthropics_shape(response, state.id)
        return response

    async def _send(self, send: Any, response: Response, exchange: Exchange) -> None:
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": encode_headers(response.headers),
        }
        await send(start)

        async def write(data: bytes) -> None:
            if exchange.write is not None:
                await exchange.write(data)
            else:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        if isinstance(response, StreamResponse):
            await response.stream.send_to(write)
        else:
            body = await response.get_data()
            assert isinstance(body, bytes)
            await write(body)
        # hypercorn posts the disconnect, which cancels this task, from inside this last send.
        with trio.CancelScope(shield=True):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _request_id(self) -> str:
        for name, value in self.scope["headers"]:
            if name.lower() == b"x-request-id":
                given = value.decode("latin1")
                if CLIENT_ID.fullmatch(given):
                    return given
        return secrets.token_hex(12)

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
                method=self.scope["method"],
                route=state.route,
                status=state.status,
                seconds=trio.current_time() - started,
                client=self.scope.get("client"),
            )
        log.debug(
            "%s %s: %s in %.1f ms, request %s",
            self.scope["method"],
            state.route or "(no route)",
            state.status or "client gone",
            (trio.current_time() - started) * 1000,
            state.id,
        )


App.asgi_http_class = RequestConnection
App.asgi_websocket_class = cast(Any, NoWebsocket)
