"""``/v1/models``."""

from __future__ import annotations

import time
from typing import Any

import orjson
from quart import Response

from trioserve.http.asgi import App, AppContext
from trioserve.http.errors import unknown_model
from trioserve.http.reply import JSON


def register(app: App) -> None:
    """Add the routes."""
    routes = ModelRoutes(app.context)
    app.add_url_rule("/v1/models", view_func=routes.list_all)
    app.add_url_rule("/v1/models/<path:name>", view_func=routes.one)


class ModelRoutes:
    """Handlers of one app."""

    def __init__(self, context: AppContext) -> None:
        self._engine = context.engine
        self._created = int(time.time())

    async def list_all(self) -> Response:
        """The served names, also while the model loads: readiness is told elsewhere."""
        cards = [self._card(name) for name in self._engine.served_names]
        return Response(orjson.dumps({"object": "list", "data": cards}), content_type=JSON)

    async def one(self, name: str) -> Response:
        """One served name; 404 for others."""
        if name not in self._engine.served_names:
            raise unknown_model(name, self._engine.served_names)
        return Response(orjson.dumps(self._card(name)), content_type=JSON)

    def _card(self, name: str) -> dict[str, Any]:
        info = self._engine.status.info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trioserve",
            "root": self._engine.served_names[0],
            "parent": None,
            "max_model_len": info.max_model_len if info is not None else None,
            "permission": [],
        }
