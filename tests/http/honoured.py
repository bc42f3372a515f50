"""Which fields the parsers of the generation routes read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from trioserve.http import schema
from trioserve.http.fields import Fields


class Asked(dict[str, Any]):
    """A body that remembers which of its keys were asked for."""

    names: set[str]

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def fields_read(parse: Callable[[bytes], Any], raw: bytes) -> set[str]:
    """Names of all top-level fields that ``parse`` asks for, given a body it accepts."""
    bodies: list[Asked] = []

    def record(body: dict[str, Any], *more: Any) -> Fields:
        bodies.append(Asked(body))
        bodies[-1].names = set()
        return Fields(bodies[-1], *more)

    with mock.patch.object(schema, "Fields", record):
        parse(raw)
    return bodies[0].names


COMPLETION = fields_read(schema.parse_completion, b'{"prompt": "a"}')
CHAT = fields_read(schema.parse_chat, b'{"messages": [{"role": "user", "content": "a"}]}')
