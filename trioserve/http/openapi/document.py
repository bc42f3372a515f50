"""Puts the document together: what is described, as far as it is registered."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

import trioserve
from trioserve.http.openapi import (
    control,
    generation,
    messages,
    responses,
    service,
    tokenization,
)
from trioserve.http.openapi.shapes import ERROR, ERRORS, JSON, Schema, json_answer, ref
from trioserve.http.sampling_fields import Rules

MODULES = (generation, responses, messages, tokenization, service, control)
PATHS: dict[str, dict[str, Any]] = {
    path: operations for module in MODULES for path, operations in module.PATHS.items()
}
TAGS = {
    "Generation": "Text from a model.",
    "Tokens": "Texts as token ids, and back.",
    "Models": "What is served.",
    "Service": "How the server is and what it does.",
    "Control": "To act on the server and its requests.",
}
DESCRIPTION = """\
A server for large language models that speaks the OpenAI API.

In a request's body null stands for an absent field. A field that is unknown is not silently
dropped: the header `X-Trioserve-Ignored-Fields` names it. Every answer has an `X-Request-Id`, the
request's own or a fresh one. HEAD is answered wherever GET is, OPTIONS everywhere.
"""
_KEY = "One of the keys of `http.api_keys` or `http.api_keys_file`"
SECURITY_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": f"{_KEY}, as `Authorization: Bearer KEY`.",
    },
    "header": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": f"{_KEY}, as `x-api-key: KEY`.",
    },
}
STRICT = (
    "CompletionRequest",
    "ChatRequest",
    "StreamOptions",
    "ResponsesRequest",
    "ResponsesStreamOptions",
    "Reasoning",
    "TextFormat",
    "MessagesRequest",
    "CountRequest",
    "TokenizeRequest",
    "DetokenizeRequest",
)
"""Objects whose unknown fields are noticed."""
_REFERENCE = "#/components/schemas/"


def path_of(rule: str) -> str:
    """A route's template as OpenAPI writes it."""
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule)


def build(
    routes: Iterable[tuple[str, Iterable[str]]],
    *,
    rules: Rules | None = None,
    strict: bool = False,
    open_paths: Container[str] | None = None,
) -> dict[str, Any]:
    """The document of a server.

    Args:
        routes: templates and methods of what is registered; what is not described here, and what
            is described but not registered, is left out.
        rules: the operator's limits.
        strict: unknown fields of bodies are refused.
        open_paths: what is answered without an API key; None where no key is asked for.
    """
    paths: dict[str, dict[str, Any]] = {}
    for rule, methods in sorted(routes):
        path = path_of(rule)
        wanted = {method.lower() for method in methods}
        for method, operation in PATHS.get(path, {}).items():
            if method in wanted:
                guarded = open_paths is not None and rule not in open_paths
                paths.setdefault(path, {})[method] = _guarded(method, operation, guarded)
    schemas = _referenced(paths, rules or Rules())
    if strict:
        for name in filter(schemas.__contains__, STRICT):
            schemas[name] = _closed(schemas[name])
    used = {op["tags"][0] for operations in paths.values() for op in operations.values()}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "trioserve",
            "version": trioserve.__version__,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag, "description": text} for tag, text in TAGS.items() if tag in used],
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if open_paths is not None:
        document["components"]["securitySchemes"] = SECURITY_SCHEMES
    return document


def _closed(schema: Schema) -> Schema:
    """The schema of an object, or of one of several, without further fields."""
    if "anyOf" in schema:
        return schema | {"anyOf": [_closed(choice) for choice in schema["anyOf"]]}
    return schema | {"additionalProperties": False}


def _guarded(method: str, operation: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    """The operation with what the guard before it may answer."""
    errors = [] if method == "get" else [403]
    made = dict(operation)
    if needs_key:
        errors = [401]
        made["security"] = [{name: []} for name in SECURITY_SCHEMES]
    guarded = {str(status): json_answer(ERRORS[status], _error_of(operation)) for status in errors}
    made["responses"] = dict(sorted((guarded | operation["responses"]).items()))
    return made


def _error_of(operation: dict[str, Any]) -> Schema:
    """The schema of an operation's errors."""
    for status, response in operation["responses"].items():
        schema: Schema = response.get("content", {}).get(JSON, {}).get("schema", {})
        if status >= "400" and schema.get("$ref", "").endswith("Error"):
            return schema
    return ref(ERROR)


def _referenced(paths: dict[str, Any], rules: Rules) -> dict[str, Schema]:
    """The schemas that are used, directly or by others."""
    known = {name: schema for module in MODULES for name, schema in module.schemas(rules).items()}
    found: set[str] = set()
    pending: list[Any] = [paths]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                name = reference.removeprefix(_REFERENCE)
                if name not in found:
                    found.add(name)
                    pending.append(known[name])
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return {name: schema for name, schema in known.items() if name in found}
