"""The routes, one module per concern; each has ``register(app)``."""

from __future__ import annotations

from typing import Any, cast

from quart import request

from trioserve.http.asgi import RequestState


def request_state() -> RequestState:
    """The state of the request being handled."""
    return cast(RequestState, cast(Any, request.scope)["state"]["request"])
