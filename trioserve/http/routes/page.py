"""``/``: the status page, or the form that asks for the key it needs."""

from __future__ import annotations

import functools

from quart import Request, Response, request

from trioserve.config.schema import HttpConfig
from trioserve.errors import RequestError
from trioserve.http.asgi import App
from trioserve.http.auth import Unauthorized
from trioserve.http.page import Document, make_document


def register(app: App) -> None:
    """Add the route, unless ``http.page`` turns it off."""
    if app.context.page is not None:
        app.add_url_rule("/", endpoint="status_page", view_func=app.context.page.page)


class PageRoutes:
    """The handler of one app. What is shown is made once, when it is first asked for."""

    @classmethod
    def from_config(cls, http: HttpConfig) -> PageRoutes | None:
        """The routes, or None where they are turned off."""
        return cls() if http.page else None

    async def page(self) -> Response:
        """The document, or 304 for who has it already."""
        document = self._document
        if request.if_none_match.contains_weak(document.etag):
            response = Response(b"", status=304, headers=document.headers)
            del response.headers["Content-Type"], response.headers["Content-Length"]
        else:
            response = Response(document.body, headers=document.headers)
        response.set_etag(document.etag)
        return response

    def refused(self, asked: Request, refusal: RequestError) -> Response | None:
        """The answer for a browser that opens the page without a key, which it cannot send.

        The form in it keeps the key and asks for the data with it. None for all else: those get
        the error itself.
        """
        opens = asked.path == "/" and asked.method in ("GET", "HEAD")
        # By name: a program that takes anything is none that shows forms.
        wants_form = "text/html" in asked.accept_mimetypes.values()
        if not (opens and wants_form and isinstance(refusal, Unauthorized)):
            return None
        return Response(self._form.body, status=refusal.status, headers=self._form.headers)

    @functools.cached_property
    def _document(self) -> Document:
        return make_document()

    @functools.cached_property
    def _form(self) -> Document:
        return make_document(locked=True)
