"""Errors as clients see them: always ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, ClassVar

import orjson
from quart import Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from trioserve.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, RequestError

JSON = "application/json"


class WrongMediaType(RequestError):
    """The body is not said to be JSON. Raised by the routes."""

    status: ClassVar[int] = 415


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


def error_response(error: RequestError) -> Response:
    """The response for ``error``: its status, body and Retry-After."""
    response = Response(orjson.dumps(error_object(error)), status=error.status, content_type=JSON)
    if isinstance(error, DeadlineExceeded):
        # OpenAI's client repeats a 504 by itself, and a deadline would cost three times as much.
        response.headers["x-should-retry"] = "false"
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def http_error_response(error: HTTPException) -> Response:
    """The response for an error of the HTTP machinery: no such route, wrong method, and so on."""
    status = error.code or 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {
        "error": {
            "message": _HTTP_MESSAGES.get(status) or HTTPStatus(status).phrase.lower(),
            "type": kind,
            "param": None,
            "code": None,
        }
    }
    response = Response(orjson.dumps(body), status=status, content_type=JSON)
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        response.headers["Allow"] = ", ".join(sorted(error.valid_methods))
    return response


def internal_error_response() -> Response:
    """The response for a bug of ours. Says nothing of what went wrong; the log does."""
    body = {
        "error": {
            "message": "internal error; the server's log says more under this request's id",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    return Response(orjson.dumps(body), status=500, content_type=JSON)


_HTTP_MESSAGES = {
    404: "no such route",
    405: "this route does not take that method",
    408: "the request's body did not arrive in time",
    413: "the request's body is larger than http.max_body_bytes",
}
