"""Holds answers to the OpenAPI document, more strictly than the document says it: no field of an
answer may be undescribed."""

from __future__ import annotations

import json
import re
from typing import Any

from jsonschema import Draft202012Validator

from trioserve.config.schema import Config, HttpConfig
from trioserve.http.openapi.shapes import EVENTS, ITEM_SCHEMA, JSON

from .client import Answer, Served

EVERYTHING: dict[str, Any] = {"admin": True}
"""Settings of ``[http]`` under which every route is registered."""


def everything_on() -> Config:
    """The configuration with these settings."""
    return Config(http=HttpConfig(port=0, **EVERYTHING))


async def document_of(served: Served) -> dict[str, Any]:
    answer = await served.call("GET", "/openapi.json")
    assert answer.status == 200
    document = answer.json
    assert isinstance(document, dict)
    return document


def closed(schema: Any) -> Any:
    """The schema with all objects closed whose fields are listed."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: closed(one) for name, one in schema["properties"].items()}
        made.setdefault("additionalProperties", False)
    return made


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    root = {"allOf": [closed(schema)], "components": closed(document["components"])}
    return Draft202012Validator(root)


def operation_of(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    """The operation of a request, of whose templates the longest goes first."""
    path = path.partition("?")[0]
    for template in sorted(document["paths"], key=len, reverse=True):
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(template))
        if re.fullmatch(pattern, path) and method.lower() in document["paths"][template]:
            found = document["paths"][template][method.lower()]
            assert isinstance(found, dict)
            return found
    raise AssertionError(f"{method} {path} is not described")


def events_of(answer: Answer) -> list[Any]:
    """The events of a stream of any API, without OpenAI's end marker."""
    data = re.findall(r"^data: (.*)$", answer.body.decode(), re.MULTILINE)
    assert data
    return [json.loads(one) for one in data if one != "[DONE]"]


def check_answer(document: dict[str, Any], method: str, path: str, answer: Answer) -> None:
    """Assert that the answer is one of those described for its request."""
    responses = operation_of(document, method, path)["responses"]
    assert str(answer.status) in responses, f"{method} {path}: {answer.status} {answer.body!r}"
    content = responses[str(answer.status)].get("content", {})
    kind = answer.headers.get("content-type", "")
    if not content:
        assert not answer.body
        return
    name = kind if kind in content else kind.partition(";")[0]
    assert name in content, f"{method} {path}: {kind} is not described"
    media = content[name]
    if name == EVENTS:
        check = validator(document, media[ITEM_SCHEMA])
        for event in events_of(answer):
            check.validate(event)
    elif name == JSON:
        validator(document, media["schema"]).validate(answer.json)
