"""The app of one server: routes, limits and error handlers around an engine."""

from __future__ import annotations

import difflib
from typing import Any, cast

import trio
from werkzeug.exceptions import HTTPException

from trioserve.config.schema import Config
from trioserve.engine.api import EngineApi
from trioserve.errors import ConfigError, RequestError
from trioserve.http.asgi import App, AppContext, reply_to
from trioserve.http.guard import Guard
from trioserve.http.metrics import Metrics
from trioserve.http.open_requests import OpenRequests
from trioserve.http.reply import Reply
from trioserve.http.routes import (
    admin,
    docs,
    generation,
    messages,
    models,
    page,
    probes,
    responses,
    tokenization,
)
from trioserve.tracing.tracer import Tracer

ROUTES = [
    "/",
    "/detokenize",
    "/docs",
    "/health",
    "/health/live",
    "/health/ready",
    "/load",
    "/metrics",
    "/openapi.json",
    "/ping",
    "/startup",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/<path:name>",
    "/v1/responses",
    "/v1/responses/<response_id>",
    "/v1/responses/<response_id>/cancel",
    "/v1/responses/<response_id>/input_items",
    "/version",
]
"""Templates of all routes but those of control; a test compares them with what is registered."""


def make_app(
    engine: EngineApi,
    config: Config,
    stopping: trio.Event,
    guard: Guard | None = None,
    *,
    tracer: Tracer | None = None,
) -> App:
    """Build the app. It holds no global state; must be called inside ``trio.run``.

    Args:
        engine: answers the requests.
        config: limits of ``[http]``.
        stopping: once set, generation is refused and connections are closed after each answer.
        tracer: takes the notes of each request.
        guard: lets requests pass to their routes; made from the configuration unless given.

    Raises:
        ConfigError: ``http.open_routes`` names what is no route; as ``Guard.from_config``.
    """
    app = App("trioserve", static_folder=None)
    app.url_map.merge_slashes = False  # a redirect for //v1/... helps nobody
    app.config["PROPAGATE_EXCEPTIONS"] = None
    app.context = AppContext(
        engine=engine,
        config=config,
        stopping=stopping,
        open_requests=OpenRequests(),
        metrics=Metrics(engine, _routes_of(config), config),
        tracer=tracer,
        parsing=trio.CapacityLimiter(1),
        guard=guard or Guard.from_config(config.http),
        page=page.PageRoutes.from_config(config.http),
    )
    for module in (
        probes,
        models,
        generation,
        responses,
        messages,
        tokenization,
        docs,
        page,
        admin,
    ):
        module.register(app)
    _check_open_routes(app)
    for kind in (RequestError, HTTPException, Exception):
        app.register_error_handler(kind, cast(Any, _on_error))
    return app


def _routes_of(config: Config) -> list[str]:
    return sorted([*ROUTES, *admin.ROUTES]) if config.http.admin else ROUTES


def _check_open_routes(app: App) -> None:
    """Refuse paths in ``http.open_routes`` that open nothing, mostly for a slip in them."""
    known = sorted(rule.rule for rule in app.url_map.iter_rules() if not rule.arguments)
    for path in app.context.config.http.open_routes:
        if path not in known:
            close = difflib.get_close_matches(path, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"http.open_routes: there is no route {path!r}; {hint}")


async def _on_error(error: Exception) -> Reply:
    return reply_to(error)
