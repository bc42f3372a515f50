"""Which fields the parsers of the generation routes read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from trioserve.http import schema
from trioserve.http.fields import Fields


def fields_read(parse: Callable[[bytes], Any], raw: bytes) -> set[str]:
    """Names of all top-level fields that ``parse`` asks for, given a body it accepts."""
    made: list[Fields] = []

    def record(*args: Any) -> Fields:
        made.append(Fields(*args))
        return made[-1]

    with mock.patch.object(schema, "Fields", record):
        parse(raw)
    return made[0]._read


COMPLETION = fields_read(schema.parse_completion, b'{"prompt": "a"}')
CHAT = fields_read(schema.parse_chat, b'{"messages": [{"role": "user", "content": "a"}]}')
