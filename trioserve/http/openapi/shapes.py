"""Small functions that make the dictionaries of an OpenAPI 3.1 document; pure.

Schemas are JSON Schema 2020-12. In request bodies null stands for an absent field, so optional
fields allow it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]

JSON = "application/json"
EVENTS = "text/event-stream"
ITEM_SCHEMA = "x-itemSchema"
"""Where a stream's events are described; OpenAPI 3.2 has it as ``itemSchema``, 3.1 has nothing."""
ERROR = "Error"


def _typed(kind: str, description: str, keywords: dict[str, Any]) -> Schema:
    schema: Schema = {"type": kind}
    if description:
        schema["description"] = description
    return schema | {key: value for key, value in keywords.items() if value is not None}


def string(description: str = "", **keywords: Any) -> Schema:
    """A string."""
    return _typed("string", description, keywords)


def integer(
    description: str = "", low: int | None = None, high: int | None = None, **keywords: Any
) -> Schema:
    """An integer in ``[low, high]``."""
    return _typed("integer", description, {"minimum": low, "maximum": high} | keywords)


def number(
    description: str = "", low: float | None = None, high: float | None = None, **keywords: Any
) -> Schema:
    """A number in ``[low, high]``."""
    return _typed("number", description, {"minimum": low, "maximum": high} | keywords)


def boolean(description: str = "", **keywords: Any) -> Schema:
    """True or false."""
    return _typed("boolean", description, keywords)


def array(items: Schema, description: str = "", **keywords: Any) -> Schema:
    """An array of equal items."""
    return _typed("array", description, {"items": items} | keywords)


def mapping(values: Schema, description: str = "", **keywords: Any) -> Schema:
    """An object with keys of any name."""
    return _typed("object", description, {"additionalProperties": values} | keywords)


def anything(description: str = "") -> Schema:
    """Any value."""
    return {"description": description} if description else {}


def free(description: str = "") -> Schema:
    """An object whose fields are its owner's own affair."""
    return mapping({}, description)


def enum(values: Iterable[Any], description: str = "", **keywords: Any) -> Schema:
    """One of several strings."""
    return string(description, enum=list(values), **keywords)


def const(value: Any, description: str = "") -> Schema:
    """Always the same value."""
    schema: Schema = {"const": value}
    return schema | {"description": description} if description else schema


def nothing_but(description: str, *values: Any) -> Schema:
    """One of a few values, or null."""
    return (
        {"enum": list(values), "description": description}
        if values
        else {
            "type": "null",
            "description": description,
        }
    )


def one_of(*schemas: Schema, description: str = "") -> Schema:
    """Any of several schemas."""
    schema: Schema = {"anyOf": list(schemas)}
    return schema | {"description": description} if description else schema


def ref(name: str) -> Schema:
    """A schema of ``components``."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    kind = schema.get("type")
    if kind == "null" or schema.keys() <= {"description"}:
        return schema
    if "enum" in schema:
        schema = schema | {"enum": [*schema["enum"], None]}
        if kind is None:
            return schema
    if isinstance(kind, str):
        return schema | {"type": [kind, "null"]}
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}


def obj(
    required: dict[str, Schema],
    optional: dict[str, Schema] | None = None,
    description: str = "",
    **keywords: Any,
) -> Schema:
    """An object of an answer: ``required`` fields are always there, ``optional`` ones may be."""
    schema = _typed("object", description, {"properties": required | (optional or {})})
    if required:
        schema["required"] = list(required)
    return schema | keywords


def body(required: dict[str, Schema], optional: dict[str, Schema], description: str = "") -> Schema:
    """An object of a request, whose optional fields may be null."""
    fields = {name: nullable(schema) for name, schema in optional.items()}
    return obj(required, fields, description)


def json_answer(description: str, schema: Schema, **headers: Schema) -> dict[str, Any]:
    """A response with JSON."""
    return _answer(description, {JSON: {"schema": schema}}, headers)


def text_answer(description: str, *media_types: str) -> dict[str, Any]:
    """A response with text, of one of several media types."""
    return _answer(description, {kind: {"schema": string()} for kind in media_types}, {})


def empty_answer(description: str) -> dict[str, Any]:
    """A response without a body."""
    return {"description": description}


def json_or_events(description: str, whole: Schema, event: Schema) -> dict[str, Any]:
    """A response that is JSON or, if ``stream`` is true, server-sent events."""
    # No type: before OpenAPI 3.2 some readers take it for the whole stream, others for each event.
    stream = {"schema": {"description": "Server-sent events."}, ITEM_SCHEMA: event}
    content = {JSON: {"schema": whole}, EVENTS: stream}
    return _answer(description, content, {})


def _answer(
    description: str, content: dict[str, Any], headers: dict[str, Schema]
) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": description, "content": content}
    if headers:
        answer["headers"] = {
            name.replace("_", "-"): {"schema": schema} for name, schema in headers.items()
        }
    return answer


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """A part of the path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": string(minLength=1),
    }


def query_parameter(name: str, schema: Schema, description: str) -> dict[str, Any]:
    """A parameter of the query, which may be left out."""
    return {"name": name, "in": "query", "description": description, "schema": schema}


def operation(
    name: str,
    tag: str,
    summary: str,
    answers: dict[int, dict[str, Any]],
    *,
    description: str = "",
    parameters: Iterable[dict[str, Any]] = (),
    body: Schema | None = None,
    errors: Iterable[int] = (),
    error: str = ERROR,
) -> dict[str, Any]:
    """What one method of one path takes and answers.

    Args:
        name: the ``operationId``.
        answers: responses that are no errors, by status.
        errors: statuses of errors it can answer with, besides those of every route.
        error: the schema of its errors.
    """
    made: dict[str, Any] = {"operationId": name, "tags": [tag], "summary": summary}
    if description:
        made["description"] = description
    if params := list(parameters):
        made["parameters"] = params
    if body is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    responses = {str(status): answer for status, answer in answers.items()}
    for status in sorted(errors):
        responses[str(status)] = json_answer(ERRORS[status], ref(error))
    made["responses"] = responses
    return made


ERRORS = {
    400: "The request is wrong; all faults of its body are listed.",
    401: "A key is missing or wrong.",
    403: "A web page of another origin may not ask for this.",
    404: "No such thing.",
    405: "The route does not take that method.",
    408: "The body did not arrive in time.",
    409: "It cannot be done in the present state.",
    413: "The body is too large.",
    415: "The body is not said to be JSON in UTF-8.",
    429: "Too many requests wait already; try again later.",
    500: "The request failed; the server's log says more under its id.",
    503: "Not ready, or shutting down; try again later.",
    504: "Not begun, or not done, in its time.",
}
BODY_ERRORS = (400, 408, 413, 415)
GENERATION_ERRORS = (400, 404, 408, 409, 413, 415, 429, 500, 503, 504)
