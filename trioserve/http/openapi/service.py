"""Description of the routes that tell about the server: probes, models, metrics, documents."""

from __future__ import annotations

from typing import Any, get_type_hints

from trioserve.engine.api import Phase
from trioserve.http.openapi.shapes import (
    ERROR,
    Schema,
    array,
    boolean,
    const,
    empty_answer,
    enum,
    free,
    integer,
    json_answer,
    nullable,
    number,
    obj,
    operation,
    path_parameter,
    ref,
    string,
    text_answer,
)
from trioserve.http.sampling_fields import Rules
from trioserve.ipc.messages import STAGES, ReadyInfo

STAGE_STATES = ("pending", "running", "done", "failed")
BY_TYPE = {str: string(), int: integer(low=0), float: number(), bool: boolean()}

_SCHEMAS: dict[str, Schema] = {
    ERROR: obj(
        {
            "error": obj(
                {
                    "message": string("What is wrong, where, and the remedy.", minLength=1),
                    "type": string("The kind of error, as OpenAI names it."),
                    "param": nullable(string("The field at fault, as a path into the body.")),
                    "code": string("A word for programs."),
                }
            )
        },
        description="Every error of whatever origin.",
    ),
    "Model": obj(
        {
            "id": string("A name to use as `model`."),
            "object": const("model"),
            "created": integer("When the server started, in seconds since 1970."),
            "owned_by": const("trioserve"),
            "root": string("The first served name, which is the one echoed."),
            "parent": {"type": "null"},
            "max_model_len": nullable(
                integer("Longest sequence, prompt and answer, in tokens; null until ready.", low=1)
            ),
            "permission": array({}, "Always empty.", maxItems=0),
        }
    ),
    "ModelList": obj({"object": const("list"), "data": array(ref("Model"))}),
    "Ready": obj(
        {
            "status": const("ready"),
            "model": string("The model served."),
            "paused": boolean("Requests are taken, but wait until the engine is resumed."),
        }
    ),
    "NotReady": obj(
        {
            "status": enum(
                [phase.value for phase in Phase if phase is not Phase.READY],
                "What the server is doing.",
            ),
            "stage": nullable(
                enum(STAGES, "The stage of the start-up that runs or failed; null once draining.")
            ),
            "fraction": nullable(number("How far the stage is.", 0, 1)),
            "cause": nullable(string("Of the last failure.")),
            "open_requests": integer("Requests still being answered.", 0),
        }
    ),
    "Stage": obj(
        {
            "name": enum(STAGES),
            "state": enum(STAGE_STATES),
            "fraction": nullable(number("How far it is.", 0, 1)),
            "detail": string(),
            "bytes": nullable(integer("Bytes read or made.", 0)),
            "seconds": nullable(number("How long it took, or takes so far.", 0)),
        }
    ),
    "Startup": obj(
        {
            "phase": enum([phase.value for phase in Phase]),
            "model": string(),
            "incarnation": integer("Counts workers; 1 is the first.", 0),
            "uptime_s": number("Since the server started.", 0),
            "ready_after_s": nullable(number("How long this start-up took.", 0)),
            "cause": nullable(string("Of the last failure.")),
            "stages": array(ref("Stage")),
            "info": nullable(
                obj(
                    {
                        name: BY_TYPE[kind]
                        for name, kind in get_type_hints(ReadyInfo).items()
                        if name in ReadyInfo.__struct_fields__
                    },
                    description="What the engine settled on; null until ready.",
                )
            ),
        }
    ),
}


def schemas(rules: Rules) -> dict[str, Schema]:
    """The shapes; none depends on the operator's limits."""
    return _SCHEMAS


READINESS = {
    200: json_answer("Requests are taken.", ref("Ready")),
    503: json_answer("They are not.", ref("NotReady"), Retry_After=string("In seconds.")),
}


def _ready(name: str, summary: str) -> dict[str, Any]:
    return operation(name, "Service", summary, READINESS)


PATHS: dict[str, dict[str, Any]] = {
    "/": {
        "get": operation(
            "page",
            "Service",
            "The status page: start-up, rates, a playground",
            {200: text_answer("The page.", "text/html"), 304: empty_answer("As it was.")},
        )
    },
    "/v1/models": {
        "get": operation(
            "listModels",
            "Models",
            "The served names",
            {200: json_answer("Also while the model loads.", ref("ModelList"))},
        )
    },
    "/v1/models/{name}": {
        "get": operation(
            "getModel",
            "Models",
            "One served name",
            {200: json_answer("It is served.", ref("Model"))},
            parameters=[path_parameter("name", "A served name; may hold slashes.")],
            errors=[404],
        )
    },
    "/health": {"get": _ready("health", "Whether requests are taken")},
    "/health/ready": {"get": _ready("ready", "Whether requests are taken")},
    "/health/live": {
        "get": operation(
            "live",
            "Service",
            "Whether the server serves",
            {200: json_answer("Always.", obj({"status": const("live")}))},
        )
    },
    "/ping": {
        "get": _ready("ping", "The same as `/health`, where that is the name"),
        "post": _ready("pingByPost", "The same as `/health`, where that is the name"),
    },
    "/load": {
        "get": operation(
            "load",
            "Service",
            "How many requests are being answered or wait",
            {200: json_answer("The number.", obj({"server_load": integer(low=0)}))},
        )
    },
    "/startup": {
        "get": operation(
            "startup",
            "Service",
            'The stages of the start-up, what became of "auto" settings, the last failure',
            {200: json_answer("As it is now.", ref("Startup"))},
        )
    },
    "/version": {
        "get": operation(
            "version",
            "Service",
            "The version that serves",
            {200: json_answer("The version.", obj({"version": string()}))},
        )
    },
    "/metrics": {
        "get": operation(
            "metrics",
            "Service",
            "All series for Prometheus",
            {200: text_answer("As Accept asks.", "text/plain", "application/openmetrics-text")},
        )
    },
    "/openapi.json": {
        "get": operation(
            "openapi",
            "Service",
            "This document",
            {200: json_answer("OpenAPI 3.1.", free())},
        )
    },
    "/docs": {
        "get": operation(
            "docs",
            "Service",
            "This document as a page",
            {200: text_answer("The page.", "text/html")},
        )
    },
}
