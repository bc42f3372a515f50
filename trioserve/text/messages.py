"""Chat messages as clients send them, made into the one shape that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trioserve.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with every legal spelling made one; the input is left as it is.

    * ``content`` is always text: null or absent is "", text parts are joined with a newline.
    * ``developer`` is ``system``.
    * The arguments of tool calls are an object where they are JSON for one; "" and "null" are {}.
      What is not JSON for an object stays the text that the model wrote.
    * Keys whose value is null, and an empty ``tool_calls``, are as good as absent. All other keys
      (``name``, ``tool_call_id``, …) are passed on.

    Raises:
        InvalidRequest: with the path of what is wrong as ``param``, for example
            ``messages[2].content[1].type``.
    """
    if not _is_list(messages):
        raise InvalidRequest("messages must be a list", param="messages")
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} must be an object", param=path)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{path}.role must be one of {', '.join(ROLES)}, not {_quoted(role)}",
            param=f"{path}.role",
        )
    result = {key: value for key, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content(message.get("content"), f"{path}.content")
    calls = result.pop("tool_calls", [])
    if not _is_list(calls):
        raise InvalidRequest(f"{path}.tool_calls must be a list", param=f"{path}.tool_calls")
    if calls:
        result["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return result


def _content(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if _is_list(content):
        return "\n".join(_text_part(part, f"{path}[{i}]") for i, part in enumerate(content))
    raise InvalidRequest(f"{path} must be text or a list of parts", param=path)


def _text_part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{path} must be an object", param=path)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise InvalidRequest(
            f"{path}.type is {_quoted(kind)}; this model reads text parts only",
            param=f"{path}.type",
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{kind} must be text", param=f"{path}.{kind}")
    return text


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{path}.function must be an object", param=f"{path}.function")
    if not isinstance(function.get("name"), str):
        path = f"{path}.function.name"
        raise InvalidRequest(f"{path} must be text", param=path)
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, path: str) -> dict[str, Any] | str:
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise InvalidRequest(f"{path} must be text", param=path)
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else arguments


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _quoted(value: Any) -> str:
    """A client's value in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
