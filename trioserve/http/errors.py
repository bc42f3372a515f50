"""Errors as clients see them: always ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, ClassVar

from werkzeug.exceptions import HTTPException, MethodNotAllowed

from trioserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RequestAborted,
    RequestError,
)
from trioserve.http.reply import Reply, json_reply

MAX_SHOWN_METHOD, MAX_SHOWN_PATH = 20, 120  # characters of what a client chose

HTTP_ERRORS: dict[int, tuple[str, str]] = {
    400: ("invalid_http", "the request is not valid HTTP/1.1"),
    404: ("route_not_found", "no such route"),
    405: ("method_not_allowed", "this route does not take that method"),
    408: ("body_timeout", "the request's body did not arrive in time"),
    413: ("body_too_large", "the request's body is larger than http.max_body_bytes"),
    414: ("target_too_long", "the request's target is too long"),
    431: ("headers_too_large", "the request's headers are too large"),
    500: ("internal_error", "internal error; the server's log says more under this request's id"),
    501: ("not_implemented", "the request's transfer coding is not supported"),
    505: ("version_not_supported", "only HTTP/1.1 is spoken here"),
}
"""Errors of the HTTP machinery: ``error.code`` and message by status."""


class WrongMediaType(RequestError):
    """The body is not said to be JSON. Raised by the routes."""

    status: ClassVar[int] = 415
    default_code: ClassVar[str] = "unsupported_media_type"


class InvalidBody(InvalidRequest):
    """One or several faults of a request's body. Raised by ``trioserve.http.schema``.

    Attributes:
        faults: pairs of the path at fault and what is wrong there, in the order found.
    """

    def __init__(self, faults: list[tuple[str, str]], *, code: str | None = None) -> None:
        text = "; ".join(f"{path}: {fault}" if path else fault for path, fault in faults)
        super().__init__(text, param=faults[0][0] or None, code=code)
        self.faults = faults


def unknown_model(name: str, served_names: tuple[str, ...]) -> ModelNotFound:
    """The error for a request that names a model not served here."""
    shown = name if len(name) <= 100 else name[:97] + "..."
    served = ", ".join(served_names)
    return ModelNotFound(
        f"the model {shown!r} is not served here; served: {served}",
        param="model",
        code="model_not_found",
    )


def error_object(error: RequestError) -> dict[str, Any]:
    """The body that tells a client of ``error``; also the data of an error event in a stream."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_reply(error: RequestError) -> Reply:
    """The answer for ``error``: its status, body and Retry-After."""
    reply = json_reply(error_object(error), error.status)
    if isinstance(error, DeadlineExceeded | RequestAborted):
        # OpenAI's client repeats a 504 and a 409 by itself: a deadline would cost three times as
        # much, and what was aborted would run again.
        reply.headers["x-should-retry"] = "false"
    if error.retry_after_s is not None:
        reply.headers["Retry-After"] = str(error.retry_after_s)
    return reply


def http_error_object(status: int, message: str = "") -> dict[str, Any]:
    """The body for an error of the HTTP machinery; ``message`` in place of the usual one."""
    code, usual = HTTP_ERRORS.get(status) or (f"http_{status}", HTTPStatus(status).phrase.lower())
    ours = status >= 500 and status not in (501, 505)
    kind = "server_error" if ours else "invalid_request_error"
    return {"error": {"message": message or usual, "type": kind, "param": None, "code": code}}


def http_error_reply(error: HTTPException, method: str, path: str) -> Reply:
    """The answer for an error of the HTTP machinery: no such route, wrong method, and so on."""
    status = error.code or 500
    message, allow = "", ""
    if status == 404:
        message = f"no such route: {_asked(method, path)}"
    elif isinstance(error, MethodNotAllowed):
        allow = ", ".join(sorted(error.valid_methods or ()))
        message = f"this route does not take that method: {_asked(method, path)}; it takes {allow}"
    reply = json_reply(http_error_object(status, message), status)
    if allow:
        reply.headers["Allow"] = allow
    return reply


def _asked(method: str, path: str) -> str:
    """What was asked for as printable ASCII of bounded length."""
    method, path = ascii(method)[1:-1], ascii(path)[1:-1]
    return f"{_cut(method, MAX_SHOWN_METHOD)} {_cut(path, MAX_SHOWN_PATH)}"


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."


def internal_error_reply() -> Reply:
    """The answer for a bug of ours. Says nothing of what went wrong; the log does."""
    return json_reply(http_error_object(500), 500)
