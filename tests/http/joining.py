"""A streamed answer joined to what the whole one would have been."""

from __future__ import annotations

from typing import Any


def join(events: list[Any]) -> dict[str, Any]:
    """The choices and all else of a stream's chunks, in the shape of the answer in one piece.

    Fields that chunks leave out are absent. Each chunk's ``usage`` but the last's is in ``usages``.
    """
    *chunks, done = events
    assert done == "[DONE]"
    whole: dict[str, Any] = {"choices": {}, "usages": []}
    for chunk in chunks:
        assert chunk["object"] in ("chat.completion.chunk", "text_completion")
        for name, value in chunk.items():
            if name == "choices":
                for choice in value:
                    _add(whole["choices"].setdefault(choice["index"], {}), choice)
            elif name == "usage":
                whole["usages"].append(value)
            else:
                assert whole.setdefault(name, value) == value, name
    whole["choices"] = [whole["choices"][index] for index in sorted(whole["choices"])]
    return whole


def _add(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    assert joined.get("finish_reason") is None, "nothing follows the last chunk of a choice"
    for name, value in choice.items():
        if name == "delta":
            message = joined.setdefault("message", {"content": ""})
            message["content"] += value.get("content", "")
            if "role" in value:
                assert "role" not in message
                message["role"] = value["role"]
        elif name in ("text", "token_ids"):
            joined[name] = joined[name] + value if name in joined else value
        elif name == "logprobs":
            if value is not None:
                lists = joined.setdefault("logprobs", {})
                for key, part in value.items():
                    lists[key] = lists.get(key, []) + part if part is not None else None
        else:
            joined[name] = value
