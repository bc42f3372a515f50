"""What the tests of /v1/responses and /v1/messages share."""

from __future__ import annotations

import json
from typing import Any

from .client import Client

RESPONSES = ("/v1/responses", {"input": "hi"})
MESSAGES = (
    "/v1/messages",
    {"model": "fake", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]},
)
BOTH = [RESPONSES, MESSAGES]


def named_events(body: bytes) -> list[dict[str, Any]]:
    """The data of each event; its name is that of its type. Comments are left out."""
    events = []
    for block in body.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}", block
        events.append(event)
    return events


async def next_event(client: Client, kind: str) -> dict[str, Any]:
    """Read chunks until there is an event of a type; the others of its chunk are dropped."""
    while chunk := await client.chunk():
        for event in named_events(chunk):
            if event["type"] == kind:
                return event
    raise EOFError(f"the stream ended without {kind}")


def told(body: Any) -> tuple[str, str]:
    """Type and message of an error in either shape."""
    error = body["error"]
    return error["type"], error["message"]
