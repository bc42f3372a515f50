"""Prompts and messages in request bodies: their shapes, checked; nothing here knows the model."""

from __future__ import annotations

from typing import Any

from trioserve.http.fields import Fields, kind_of, shown

MAX_PROMPTS = 1024
MAX_MESSAGES = 16384
MAX_DOCUMENTS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_prompts(fields: Fields) -> tuple[str | list[int], ...]:
    """The field ``prompt``: texts or lists of token ids, at least one unless it is faulty."""
    value = fields.value("prompt")
    wanted = "a string, an array of strings, of token ids, or of arrays of token ids"
    if value is None:
        fields.fault("prompt", f"is missing; give {wanted}")
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        fields.fault("prompt", f"must be {wanted}, not {kind_of(value)}")
        return ()
    if not value:
        fields.fault("prompt", "must not be an empty array")
        return ()
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return (value,) if _are_token_ids(fields, "prompt", value) else ()
    if len(value) > MAX_PROMPTS:
        fields.fault("prompt", f"must have at most {MAX_PROMPTS} prompts, not {len(value)}")
        return ()
    return tuple(_read_prompt_list(fields, value, wanted))


def _read_prompt_list(fields: Fields, values: list[Any], wanted: str) -> list[str | list[int]]:
    prompts: list[str | list[int]] = []
    for index, item in enumerate(values):
        path = f"prompt[{index}]"
        if type(item) is not type(values[0]) or not isinstance(item, str | list):
            fields.fault(path, f"is {kind_of(item)}; prompt must be {wanted}")
        elif isinstance(item, list) and not item:
            fields.fault(path, "must not be an empty array")
        elif isinstance(item, str) or _are_token_ids(fields, path, item):
            prompts.append(item)
    return prompts


def _are_token_ids(fields: Fields, path: str, items: list[Any]) -> bool:
    for index, item in enumerate(items):
        if type(item) is not int or item < 0:
            fields.fault(f"{path}[{index}]", f"must be a token id, not {kind_of(item)}")
            return False
    return True


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a chat, each of a legal shape; faults are noted in ``fields``."""
    messages = read_message_list(fields)
    for index, message in enumerate(messages):
        _check_message(fields, f"messages[{index}]", message)
    return messages


def read_message_list(fields: Fields) -> list[Any]:
    """What ``messages`` holds, whatever its items are; empty where a fault is noted."""
    value = fields.value("messages")
    if value is None:
        fields.fault("messages", "is missing; give an array of messages")
    elif not isinstance(value, list):
        fields.fault("messages", f"must be an array of messages, not {kind_of(value)}")
    elif not value:
        fields.fault("messages", "must not be empty")
    elif len(value) > MAX_MESSAGES:
        fields.fault("messages", f"must have at most {MAX_MESSAGES} items, not {len(value)}")
    else:
        return value
    return []


def _check_message(fields: Fields, path: str, message: Any) -> None:
    if not isinstance(message, dict):
        fields.fault(path, f"must be an object, not {kind_of(message)}")
        return
    inner = Fields(message, fields.path(path), fields.faults)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        inner.fault("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    inner.string("name")
    inner.string("tool_call_id")
    _check_content(inner, message.get("content"))
    _check_tool_calls(inner, message.get("tool_calls"))


def _check_content(message: Fields, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        message.fault("content", f"must be a string or an array of parts, not {kind_of(content)}")
        return
    for index, part in enumerate(content):
        path = f"content[{index}]"
        if not isinstance(part, dict):
            message.fault(path, f"must be an object, not {kind_of(part)}")
            continue
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            message.fault(f"{path}.type", f"{shown(kind)} is not supported; this model reads text")
        elif not isinstance(part.get(kind), str):
            message.fault(f"{path}.{kind}", f"must be a string, not {kind_of(part.get(kind))}")


def _check_tool_calls(message: Fields, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        message.fault("tool_calls", f"must be an array, not {kind_of(calls)}")
        return
    for index, call in enumerate(calls):
        path = f"tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict):
            message.fault(path, f"must be an object, not {kind_of(call)}")
        elif not isinstance(function, dict):
            message.fault(f"{path}.function", f"must be an object, not {kind_of(function)}")
        elif not isinstance(function.get("name"), str):
            message.fault(
                f"{path}.function.name", f"must be a string, not {kind_of(function.get('name'))}"
            )
        elif not isinstance(function.get("arguments"), str | dict | None):
            message.fault(
                f"{path}.function.arguments",
                f"must be a string, not {kind_of(function['arguments'])}",
            )


def last_text(messages: list[dict[str, Any]]) -> str:
    """The text of the last message, if it is the assistant's: what a continued answer begins with;
    parts are joined as for the template."""
    message = messages[-1]
    if message["role"] != "assistant":
        return ""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part[part["type"]] for part in content)


def read_documents(fields: Fields) -> list[dict[str, Any]]:
    """The field ``documents``, for templates that show them to the model."""
    value = fields.value("documents")
    if value is None:
        return []
    if not isinstance(value, list):
        fields.fault("documents", f"must be an array of objects, not {kind_of(value)}")
        return []
    if len(value) > MAX_DOCUMENTS:
        fields.fault("documents", f"must have at most {MAX_DOCUMENTS} items, not {len(value)}")
        return []
    for index, document in enumerate(value):
        if not isinstance(document, dict):
            fields.fault(f"documents[{index}]", f"must be an object, not {kind_of(document)}")
    return value
