"""Description of the control routes, which are there with `http.admin = true`."""

from __future__ import annotations

from typing import Any

from trioserve.http.openapi.shapes import (
    Schema,
    array,
    boolean,
    const,
    enum,
    integer,
    json_answer,
    number,
    obj,
    operation,
    path_parameter,
    query_parameter,
    ref,
    string,
)
from trioserve.http.routes.admin import DEFAULT_LIMIT, MAX_LIMIT
from trioserve.http.sampling_fields import Rules

_SCHEMAS: dict[str, Schema] = {
    "OpenRequest": obj(
        {
            "id": string("As its answer and the log have it."),
            "object": const("request"),
            "status": enum(["queued", "running"]),
            "answers": integer("Choices of all prompts.", 0),
            "completion_tokens": integer("Delivered so far.", 0),
            "seconds": number("Since its head arrived.", 0),
        }
    )
}
_ID = path_parameter("id", "A request's id, or that of its answer.")


def schemas(rules: Rules) -> dict[str, Schema]:
    """The shapes; none depends on the operator's limits."""
    return _SCHEMAS


def _control(name: str, summary: str, answer: Schema, *, errors: tuple[int, ...] = ()) -> Any:
    return {
        "post": operation(
            name, "Control", summary, {200: json_answer("Done.", answer)}, errors=errors
        )
    }


PATHS: dict[str, dict[str, Any]] = {
    "/v1/requests": {
        "get": operation(
            "listRequests",
            "Control",
            "The open requests, the oldest first",
            {
                200: json_answer(
                    "Some of them.",
                    obj(
                        {
                            "object": const("list"),
                            "data": array(ref("OpenRequest")),
                            "total": integer("How many there are.", 0),
                        }
                    ),
                )
            },
            parameters=[
                query_parameter(
                    "limit", integer(low=1, high=MAX_LIMIT, default=DEFAULT_LIMIT), "Most told."
                )
            ],
            errors=[400],
        )
    },
    "/v1/requests/{id}": {
        "get": operation(
            "getRequest",
            "Control",
            "An open request",
            {200: json_answer("As it is now.", ref("OpenRequest"))},
            parameters=[_ID],
            errors=[404],
        ),
        "delete": operation(
            "abortRequest",
            "Control",
            "End an open request; its client is told",
            {
                200: json_answer(
                    "It ends.",
                    obj({"id": string(), "object": const("request"), "status": const("aborted")}),
                )
            },
            parameters=[_ID],
            errors=[404],
        ),
    },
    "/admin/drain": _control(
        "drain",
        "Take no new requests, finish those that run, then end",
        obj({"status": const("draining"), "open_requests": integer(low=0)}),
    ),
    "/admin/pause": _control(
        "pause",
        "Compute no step until resumed; requests are taken and wait",
        obj({"paused": boolean()}),
        errors=(503,),
    ),
    "/admin/resume": _control(
        "resume", "Go on after a pause", obj({"paused": boolean()}), errors=(503,)
    ),
    "/admin/reset_prefix_cache": _control(
        "resetPrefixCache",
        "Forget what was cached of prompts",
        obj({"success": boolean("False while requests use some of it, which is kept.")}),
        errors=(503,),
    ),
}
