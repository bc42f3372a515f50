"""The smallest bodies, and what an error looks like."""

from __future__ import annotations

from typing import Any

USER = [{"role": "user", "content": "hi"}]
CHAT = {"messages": USER}
COMPLETION = {"prompt": "hi"}
BOTH = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def is_error(body: Any) -> bool:
    """Whether this is OpenAI's shape of an error, with words in it."""
    return set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]
