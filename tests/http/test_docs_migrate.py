"""docs/migrate.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import trio

from trioserve.config.schema import Config
from trioserve.http.app import make_app
from trioserve.http.openapi.document import path_of

from .fake_engine import FakeEngine
from .openapi_checks import everything_on

TEXT = Path("docs/migrate.md").read_text()
SECTIONS = {field.name: type(getattr(Config(), field.name)) for field in attrs.fields(Config)}
KEYS = {
    f"{section}.{field.name}"
    for section, fields in SECTIONS.items()
    for field in attrs.fields(fields)
}


def ours(heading: str, column: int) -> str:
    """The cells of a column of the tables below a heading."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return "\n".join(row[column] for row in rows if not row[0].startswith("| vLLM"))


def test_keys_are_there() -> None:
    named = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_0-9]+)", TEXT))
    assert len(named) > 50
    assert named - KEYS == {"model.toml"}


def test_every_key_of_the_tables_is_of_a_section() -> None:
    words = set(re.findall(r"`([a-z]+)\.[a-z_0-9]+`", ours("Flags", 1) + ours("Environment", 1)))
    assert words <= SECTIONS.keys()


def test_variables_are_ours() -> None:
    for section, key in re.findall(r"TRIOSERVE_([A-Z]+)__([A-Z_]+)", TEXT):
        assert f"{section}.{key}".lower() in KEYS


async def test_routes_are_there() -> None:
    app = make_app(FakeEngine(), everything_on(), trio.Event())
    there = {path_of(rule.rule) for rule in app.url_map.iter_rules()}
    named = set(re.findall(r"`(/[^`]*)`", ours("Routes", 1)))
    assert named <= there
    missing = {path for path in there - named if not path.startswith("/v1/responses/")}
    assert missing == {"/v1/requests"}
