"""``/openapi.json`` and ``/docs``."""

from __future__ import annotations

import functools
from typing import Any

import orjson
import trio
from quart import Response

from trioserve.engine.api import GenerationDefaults
from trioserve.http.asgi import App
from trioserve.http.reply import JSON
from trioserve.http.sampling_fields import Rules

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Referrer-Policy": "no-referrer",
}


def register(app: App) -> None:
    """Add the routes, unless `http.docs` is off."""
    if app.context.config.http.docs:
        routes = DocRoutes(app)
        app.add_url_rule("/openapi.json", view_func=routes.document)
        app.add_url_rule("/docs", view_func=routes.page)


class DocRoutes:
    """Handlers of one app. What is told is made once, at the first question for it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def document(self) -> Response:
        """The routes that are registered, as OpenAPI 3.1."""
        return Response(await self._made("_document_bytes"), content_type=JSON)

    async def page(self) -> Response:
        """The same to read."""
        return Response(
            await self._made("_page_bytes"),
            content_type="text/html; charset=utf-8",
            headers=PAGE_HEADERS,
        )

    async def _made(self, name: str) -> bytes:
        """A property, made in a thread the first time: that takes some 50 ms, which streams would
        notice. Cancellation leaves the thread to end by itself."""
        if name not in vars(self):
            make = functools.partial(getattr, self, name)
            limiter = self._app.context.parsing
            await trio.to_thread.run_sync(make, abandon_on_cancel=True, limiter=limiter)
        made: bytes = getattr(self, name)
        return made

    @functools.cached_property
    def _document(self) -> dict[str, Any]:
        # Most servers are never asked.
        from trioserve.http.openapi.document import build

        context = self._app.context
        return build(
            ((rule.rule, rule.methods or ()) for rule in self._app.url_map.iter_rules()),
            rules=Rules.of(context.config.http, GenerationDefaults()),
            strict=context.config.http.strict_fields,
            open_paths=context.guard.open_paths,
        )

    @functools.cached_property
    def _document_bytes(self) -> bytes:
        return orjson.dumps(self._document)

    @functools.cached_property
    def _page_bytes(self) -> bytes:
        from trioserve.http.openapi.page import render

        return render(self._document).encode()
