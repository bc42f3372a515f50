"""Control: ``/v1/requests`` and ``/admin``. Registered only with ``http.admin = true``."""

from __future__ import annotations

import logging
from typing import Any

import orjson
import trio
from quart import Response, request

from trioserve.errors import InvalidRequest, RequestAborted, RequestError
from trioserve.http.asgi import App, AppContext
from trioserve.http.open_requests import OpenRequest
from trioserve.http.reply import JSON
from trioserve.http.request_state import request_state

log = logging.getLogger(__name__)

ROUTES = [
    "/admin/drain",
    "/admin/pause",
    "/admin/reset_prefix_cache",
    "/admin/resume",
    "/v1/requests",
    "/v1/requests/<id>",
]
"""Templates of these routes."""

PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What answers put before the id of their request."""

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000


class UnknownRequest(RequestError):
    """No request with this id is open. Raised by these routes."""

    status = 404
    default_code = "request_not_found"


def register(app: App) -> None:
    """Add the routes, if they are switched on."""
    if not app.context.config.http.admin:
        return
    routes = AdminRoutes(app.context)
    app.add_url_rule("/v1/requests", view_func=routes.list_open)
    app.add_url_rule("/v1/requests/<id>", view_func=routes.status)
    app.add_url_rule("/v1/requests/<id>", view_func=routes.abort, methods=["DELETE"])
    for name in ("drain", "pause", "resume", "reset_prefix_cache"):
        view = getattr(routes, name)
        app.add_url_rule(f"/admin/{name}", f"admin_{name}", view, methods=["POST"])


class AdminRoutes:
    """Handlers of one app."""

    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._engine = context.engine
        self._open = context.open_requests

    # ---------------------------------------------------------------------- requests

    async def list_open(self) -> Response:
        """The open requests, the oldest first; ``limit`` of them at most."""
        limit = _limit(request.args.get("limit", str(DEFAULT_LIMIT)))
        found = sorted(self._open, key=lambda opened: opened.opened_s)
        shown = [_describe(opened) for opened in found[:limit]]
        return _json({"object": "list", "data": shown, "total": len(found)})

    async def status(self, id: str) -> Response:
        """One open request; of several with one id the oldest."""
        return _json(_describe(self._find(id)[0]))

    async def abort(self, id: str) -> Response:
        """End all open requests with this id; each tells its client."""
        found = self._find(id)
        for opened in found:
            opened.end(RequestAborted("the request was aborted by the server's operator"))
        log.info("request %s: aborted over HTTP, by request %s", found[0].id, request_state().id)
        return _json({"id": found[0].id, "object": "request", "status": "aborted"})

    def _find(self, id: str) -> list[OpenRequest]:
        found = self._open.find(id)
        for prefix in PREFIXES:
            if not found and id.startswith(prefix):
                found = self._open.find(id.removeprefix(prefix))
        if not found:
            raise UnknownRequest("no request with this id is open; it has ended, or never was here")
        return found

    # ----------------------------------------------------------------------- server

    async def drain(self) -> Response:
        """Begin what the first SIGTERM begins; the process ends when it is done."""
        if not self._context.stopping.is_set():
            log.info(
                "drain asked for over HTTP, by request %s: no new requests, finishing those that"
                " run",
                request_state().id,
            )
            self._context.stopping.set()
        return _json({"status": "draining", "open_requests": len(self._open)})

    async def pause(self) -> Response:
        """Compute no step until resumed."""
        await self._engine.pause()
        log.info("paused over HTTP, by request %s", request_state().id)
        return _json({"paused": True})

    async def resume(self) -> Response:
        """Go on."""
        await self._engine.resume()
        log.info("resumed over HTTP, by request %s", request_state().id)
        return _json({"paused": False})

    async def reset_prefix_cache(self) -> Response:
        """Forget what was cached of prompts; without success while requests use some of it."""
        return _json({"success": await self._engine.reset_prefix_cache()})


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"limit must be an integer from 1 to {MAX_LIMIT}", param="limit")
    return int(text)


def _describe(opened: OpenRequest) -> dict[str, Any]:
    running = any(stream.started for stream in opened.streams)
    return {
        "id": opened.id,
        "object": "request",
        "status": "running" if running else "queued",
        "answers": len(opened.streams),
        "completion_tokens": sum(stream.usage.completion_tokens for stream in opened.streams),
        "seconds": round(trio.current_time() - opened.opened_s, 3),
    }


def _json(body: dict[str, Any]) -> Response:
    response = Response(orjson.dumps(body), content_type=JSON)
    response.headers["Cache-Control"] = "no-store"
    return response
