"""Errors in Anthropic's shape, for its routes alone."""

from __future__ import annotations

from typing import Any

import orjson
from quart import Response

from trioserve.errors import RequestError

PREFIX = "/v1/messages"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""``error.type`` by status; else ``api_error`` from 500 on, ``invalid_request_error`` below."""


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def error_object(status: int, message: str, request_id: str) -> dict[str, Any]:
    """The body that tells a client of an error; also the data of an error event in a stream."""
    kind = TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def error_event(error: RequestError, request_id: str) -> bytes:
    """The event that ends a stream in place of ``message_stop``."""
    data = orjson.dumps(error_object(error.status, error.message, request_id))
    return b"event: error\ndata: %b\n\n" % data


async def in_anthropics_shape(response: Response, request_id: str) -> Response:
    """An error response of ``trioserve.http.errors`` with its body made anew; headers stay.

    Cancellation leaves it as it was.
    """
    body = orjson.loads(await response.get_data())
    told = error_object(response.status_code, body["error"]["message"], request_id)
    response.set_data(orjson.dumps(told))
    response.headers["Request-Id"] = request_id
    return response
