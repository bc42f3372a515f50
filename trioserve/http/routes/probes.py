"""Liveness, readiness, the course of the start-up, version, metrics."""

from __future__ import annotations

from typing import Any

import orjson
from quart import Response, request

import trioserve
from trioserve.engine.api import EngineStatus, Phase, StageStatus
from trioserve.http.asgi import App, AppContext
from trioserve.http.reply import JSON


def register(app: App) -> None:
    """Add the routes."""
    routes = ProbeRoutes(app.context)
    app.add_url_rule("/health/live", view_func=routes.live)
    app.add_url_rule("/health/ready", view_func=routes.ready)
    app.add_url_rule("/health", endpoint="health", view_func=routes.ready)
    app.add_url_rule("/ping", endpoint="ping", view_func=routes.ready, methods=["GET", "POST"])
    app.add_url_rule("/load", view_func=routes.load)
    app.add_url_rule("/startup", view_func=routes.startup)
    app.add_url_rule("/version", view_func=routes.version)
    app.add_url_rule("/metrics", view_func=routes.metrics)


class ProbeRoutes:
    """Handlers of one app."""

    def __init__(self, context: AppContext) -> None:
        self._context = context

    async def live(self) -> Response:
        """200 as long as the server serves."""
        return _json({"status": "live"})

    async def ready(self) -> Response:
        """200 while requests are taken, else 503 with the phase and what it is waiting for.

        That is the stage and how far it is while a model loads or after it failed, and the
        requests still being answered while the server drains.
        """
        status = self._context.engine.status
        draining = self._context.stopping.is_set()
        phase = Phase.DRAINING if draining else status.phase
        if phase is Phase.READY:
            body = {"status": phase.value, "model": status.model_name, "paused": status.paused}
            return _json(body)
        # Once it drains, the last stage is over and says nothing of what is going on.
        stage = None if phase in (Phase.DRAINING, Phase.CLOSED) else _current(status)
        response = _json(
            {
                "status": phase.value,
                "stage": stage.name if stage else None,
                "fraction": stage.fraction if stage else None,
                "cause": self._cause(status),
                "open_requests": len(self._context.open_requests),
            },
            503,
        )
        response.headers["Retry-After"] = "1"
        return response

    def _cause(self, status: EngineStatus) -> str | None:
        """Why the engine failed. It may name paths and the machine's memory, so where keys are
        asked for it is not for those who have none, as those of probes."""
        if status.cause is None or self._context.guard.open_paths is None:
            return status.cause
        return "told by /startup, with a key"

    async def load(self) -> Response:
        """How many requests are being answered or wait."""
        return _json({"server_load": len(self._context.open_requests)})

    async def startup(self) -> Response:
        """All stages with their times, what the engine settled on, and the last failure."""
        status = self._context.engine.status
        info = status.info
        return _json(
            {
                "phase": status.phase.value,
                "model": status.model_name,
                "incarnation": status.incarnation,
                "uptime_s": round(status.uptime_s, 3),
                "ready_after_s": status.ready_after_s,
                "cause": status.cause,
                "stages": [_stage(stage) for stage in status.stages],
                "info": {name: getattr(info, name) for name in info.__struct_fields__}
                if info is not None
                else None,
            }
        )

    async def version(self) -> Response:
        """The version that serves."""
        return _json({"version": trioserve.__version__})

    async def metrics(self) -> Response:
        """All series in Prometheus' text format, or OpenMetrics for those who accept it."""
        accept = request.headers.get("Accept", "")
        text, content_type = self._context.metrics.exposition(accept)
        return Response(text, content_type=content_type)


def _current(status: EngineStatus) -> StageStatus | None:
    """The stage that runs or failed, or the last that is done."""
    begun = [stage for stage in status.stages if stage.state != "pending"]
    running = [stage for stage in begun if stage.state in ("running", "failed")]
    return running[-1] if running else begun[-1] if begun else None


def _stage(stage: StageStatus) -> dict[str, Any]:
    return {
        "name": stage.name,
        "state": stage.state,
        "fraction": stage.fraction,
        "detail": stage.detail,
        "bytes": stage.num_bytes,
        "seconds": stage.seconds,
    }


def _json(body: dict[str, Any], status: int = 200) -> Response:
    response = Response(orjson.dumps(body), status=status, content_type=JSON)
    response.headers["Cache-Control"] = "no-store"
    return response
