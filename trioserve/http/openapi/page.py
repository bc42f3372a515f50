"""The document as one self-contained HTML page; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from trioserve.http.openapi.shapes import ITEM_SCHEMA, Schema

_STYLE = """\
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --dim: #59636e; --line: #d6dce2;
  --soft: #f3f5f7; --get: #0b6b3a; --post: #0a4fa3; --delete: #a3200a; }
@media (prefers-color-scheme: dark) { :root { --back: #12161b; --text: #e3e8ee; --dim: #98a3af;
  --line: #313a44; --soft: #1b2129; --get: #5fd39a; --post: #7db4ff; --delete: #ff8f7a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: 1rem 0 .2rem; } h2 { margin: 2.2rem 0 .4rem; }
h3 { margin: 0; font-size: 1rem; font-weight: 600; overflow-wrap: anywhere; }
h4 { margin: 1rem 0 .3rem; font-size: .95rem; }
a { color: inherit; } p { margin: .4rem 0; } .dim { color: var(--dim); }
code { font: .9em ui-monospace, monospace; background: var(--soft); padding: .1em .3em;
  border-radius: .25em; overflow-wrap: anywhere; }
nav ul { columns: 20rem; list-style: none; padding: 0; margin: .3rem 0; }
nav li { overflow-wrap: anywhere; }
article, .schema { border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem;
  margin: .8rem 0; }
.method { display: inline-block; min-width: 3.6em; font: 700 .8rem ui-monospace, monospace; }
.get { color: var(--get); } .post { color: var(--post); } .delete { color: var(--delete); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0;
  border-top: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; border-top: 0; }
td:first-child { white-space: nowrap; }
details > summary { cursor: pointer; } td td:first-child { white-space: normal; }
@media (max-width: 40rem) { tr, td { display: block; } th { display: none; }
  tr { border-top: 1px solid var(--line); padding: .4rem 0; } td { border: 0; padding: .1rem 0; }
  td:first-child { white-space: normal; } }
"""
_NUM_ENUM_SHOWN = 24
_FAR = 2**31


def render(document: dict[str, Any]) -> str:
    """The page. It asks for nothing outside itself and runs no script."""
    info = document["info"]
    parts = [
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n",
        '<meta name=viewport content="width=device-width, initial-scale=1">\n',
        f"<title>{escape(info['title'])}</title>\n<style>\n{_STYLE}</style>\n<main>\n",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>\n",
        *(f"<p>{_prose(text)}</p>\n" for text in info["description"].split("\n\n")),
        f"{_security(document)}<p class=dim>For programs: <a href=openapi.json>",
        "<code>openapi.json</code></a></p>\n",
    ]
    groups = [(tag, list(_operations(document, tag["name"]))) for tag in document["tags"]]
    parts.append(_contents(groups))
    for tag, operations in groups:
        name = escape(tag["name"])
        parts.append(f"<h2 id=tag-{name}>{name}</h2>\n<p>{_prose(tag['description'])}</p>\n")
        parts += (_article(method, path, operation) for method, path, operation in operations)
    parts.append("<h2 id=shapes>Shapes</h2>\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        heading = f"<h3>{escape(name)}</h3>\n"
        parts.append(f'<div class=schema id="{_anchor(name)}">\n{heading}{_shape(schema)}</div>\n')
    parts.append("</main>\n</html>\n")
    return "".join(parts)


def _operations(document: dict[str, Any], tag: str) -> Iterable[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if operation["tags"] == [tag]:
                yield method, path, operation


def _contents(groups: list[tuple[Any, list[tuple[str, str, dict[str, Any]]]]]) -> str:
    lines = ["<nav aria-label=Contents>\n"]
    for tag, operations in groups:
        lines.append(f"<h4>{escape(tag['name'])}</h4>\n<ul>\n")
        for method, path, operation in operations:
            target = escape(operation["operationId"])
            lines.append(f"<li>{_method(method)} <a href=#{target}>{escape(path)}</a></li>\n")
        lines.append("</ul>\n")
    lines.append("</nav>\n")
    return "".join(lines)


def _security(document: dict[str, Any]) -> str:
    schemes = document["components"].get("securitySchemes", {})
    return "".join(f"<p>{_prose(scheme['description'])}</p>\n" for scheme in schemes.values())


def _article(method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [
        f"<article id={escape(operation['operationId'])}>\n",
        f"<h3>{_method(method)} {escape(path)}</h3>\n<p>{_prose(operation['summary'])}</p>\n",
    ]
    if description := operation.get("description"):
        lines += (f"<p>{_prose(text)}</p>\n" for text in description.split("\n\n"))
    if parameters := operation.get("parameters"):
        rows = [
            (
                f"<code>{escape(one['name'])}</code> <span class=dim>in {escape(one['in'])}</span>",
                _type(one["schema"]),
                _prose(one["description"]),
            )
            for one in parameters
        ]
        lines.append(f"<h4>Parameters</h4>\n{_table(('name', 'type', ''), rows)}")
    if body := operation.get("requestBody"):
        kinds = ", ".join(_type(media["schema"]) for media in body["content"].values())
        lines.append(f"<h4>Body</h4>\n<p>{kinds}</p>\n")
    lines.append(f"<h4>Answers</h4>\n{_answers(operation['responses'])}</article>\n")
    return "".join(lines)


def _answers(responses: dict[str, Any]) -> str:
    rows = []
    for status, response in responses.items():
        kinds = []
        for media_type, media in response.get("content", {}).items():
            kind = media.get(ITEM_SCHEMA)
            shape = f"events of {_type(kind)}" if kind else _type(media["schema"])
            kinds.append(f"{shape} <span class=dim>{escape(media_type)}</span>")
        rows.append((escape(status), "<br>".join(kinds), _prose(response["description"])))
    return _table(("status", "body", ""), rows)


def _shape(schema: Schema) -> str:
    """A schema in full: its text and, for objects, a table of their fields."""
    text = f"<p>{_prose(schema['description'])}</p>\n" if "description" in schema else ""
    return text + (_fields(schema) or f"<p>{_type(schema)}</p>\n")


def _fields(schema: Schema) -> str:
    """Tables of the fields of the objects that a schema has inside; empty if there are none."""
    if inner := schema.get("properties"):
        required = schema.get("required", ())
        rows = [
            (
                f"<code>{escape(name)}</code>{'' if name in required else _OPTIONAL}",
                _type(field),
                _explained(field),
            )
            for name, field in inner.items()
        ]
        return _table(("field", "type", ""), rows)
    if isinstance(schema.get("items"), dict):
        return _fields(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        return _fields(schema["additionalProperties"])
    tables = []
    for number, choice in enumerate(schema.get("anyOf", ()), 1):
        if table := _fields(choice):
            text = _prose(choice.get("description", f"Form {number}"))
            tables.append(f"<p class=dim>{text}</p>\n{table}")
    return "".join(tables)


_OPTIONAL = " <span class=dim>optional</span>"


def _explained(field: Schema) -> str:
    notes = [_prose(field["description"])] if "description" in field else []
    if "default" in field:
        notes.append(f"<span class=dim>Default <code>{_json(field['default'])}</code>.</span>")
    if table := _fields(field):
        notes.append(f"<details><summary>Fields</summary>\n{table}</details>")
    return " ".join(notes)


def _type(schema: Schema) -> str:
    """What a value is, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{_anchor(name)}">{escape(name)}</a>'
    if "const" in schema:
        return f"<code>{_json(schema['const'])}</code>"
    if "enum" in schema:
        shown = [f"<code>{_json(value)}</code>" for value in schema["enum"][:_NUM_ENUM_SHOWN]]
        return " | ".join(shown + ["…"] * (len(schema["enum"]) > _NUM_ENUM_SHOWN))
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    kinds = schema.get("type", "anything")
    texts = [_one_type(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    return " | ".join(texts)


def _one_type(kind: str, schema: Schema) -> str:
    if kind == "array":
        items = _type(schema["items"]) if schema.get("items") else "anything"
        return f"array of {items}{_bounds(schema, 'minItems', 'maxItems', ' items')}"
    if kind in ("integer", "number"):
        return kind + _bounds(schema, "minimum", "maximum", "")
    if kind == "string":
        return kind + _bounds(schema, "minLength", "maxLength", " characters")
    return kind


def _bounds(schema: Schema, low: str, high: str, unit: str) -> str:
    """The range, without ends so far away that they say nothing."""
    least, most = (_end(schema.get(name)) for name in (low, high))
    if not least and not most:
        return ""
    if not most:
        text = f"at least {least}"
    elif not least or (least == "0" and unit):
        text = f"at most {most}"
    else:
        text = f"{least} to {most}"
    return f" <span class=dim>({text}{unit})</span>"


def _end(value: float | None) -> str:
    if value is None or abs(value) >= _FAR:
        return ""
    return str(int(value) if value == int(value) else value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["<div class=scroll><table>\n<tr>", *(f"<th>{text}" for text in head), "\n"]
    lines += ("<tr>" + "".join(f"<td>{cell}" for cell in row) + "\n" for row in rows)
    return "".join([*lines, "</table></div>\n"])


def _method(method: str) -> str:
    return f'<span class="method {escape(method)}">{escape(method.upper())}</span>'


def _anchor(name: str) -> str:
    return escape(f"shape-{name}")


def _json(value: Any) -> str:
    return escape(json.dumps(value))


def _prose(text: str) -> str:
    """Escaped text in which what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
