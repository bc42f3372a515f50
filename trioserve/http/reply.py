"""Answers as routes make them, without a framework's machinery: it costs more than a small one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import attrs
import orjson

JSON = "application/json"


class Events(Protocol):
    """A body that is written piece by piece."""

    async def send_to(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write all of it. Cancellation ends it where it is."""


@attrs.define
class Reply:
    """One answer. Its length is told if the body is there, else it is written as it comes.

    Attributes:
        headers: each name once, in the spelling it is sent in but for case.
    """

    body: bytes | Events
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=lambda: {"Content-Type": JSON})


def json_reply(data: Any, status: int = 200) -> Reply:
    """The answer that is ``data`` as JSON."""
    return Reply(orjson.dumps(data), status)
