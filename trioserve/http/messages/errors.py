"""Errors in Anthropic's shape, for its routes alone."""

from __future__ import annotations

from typing import Any

import orjson

from trioserve.errors import RequestError
from trioserve.http.reply import Reply

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


def in_anthropics_shape(reply: Reply, request_id: str) -> Reply:
    """An error of ``trioserve.http.errors`` with its body made anew; headers stay."""
    assert isinstance(reply.body, bytes)
    message = orjson.loads(reply.body)["error"]["message"]
    reply.body = orjson.dumps(error_object(reply.status, message, request_id))
    reply.headers["Request-Id"] = request_id
    return reply
