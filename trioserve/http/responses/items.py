"""The items a response is made from: read, given their full shape, made into chat messages."""

from __future__ import annotations

from typing import Any

from trioserve.http.fields import Fields, kind_of, shown
from trioserve.http.prompt_fields import MAX_MESSAGES

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")

Item = dict[str, Any]


def read_input(fields: Fields) -> list[Item]:
    """The field ``input`` as message items without ids; empty if it is faulty."""
    value = fields.value("input")
    wanted = "a string or an array of messages"
    if value is None:
        fields.fault("input", f"is missing; give {wanted}")
    elif isinstance(value, str):
        return [message_item("user", [value])]
    elif not isinstance(value, list):
        fields.fault("input", f"must be {wanted}, not {kind_of(value)}")
    elif not value:
        fields.fault("input", "must not be empty")
    elif len(value) > MAX_MESSAGES:
        fields.fault("input", f"must have at most {MAX_MESSAGES} items, not {len(value)}")
    else:
        read = [_read_item(fields, f"input[{index}]", item) for index, item in enumerate(value)]
        return [item for item in read if item is not None]
    return []


def message_item(role: str, texts: list[str]) -> Item:
    """A message as the API shows it, without an id."""
    if role == "assistant":
        parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    else:
        parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "status": "completed", "content": parts}


def with_ids(items: list[Item], stem: str) -> list[Item]:
    """The items with ids of their own, made from a stem that is unique."""
    return [{"id": f"msg_{stem}_{index}"} | item for index, item in enumerate(items)]


def chat_messages(instructions: str | None, items: list[Item]) -> list[dict[str, Any]]:
    """What the chat template is given; parts are joined as those of a chat are."""
    messages = [
        {"role": item["role"], "content": "\n".join(part["text"] for part in item["content"])}
        for item in items
    ]
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    return messages


def _read_item(fields: Fields, path: str, item: Any) -> Item | None:
    if not isinstance(item, dict):
        fields.fault(path, f"must be an object, not {kind_of(item)}")
        return None
    kind = item.get("type")
    if kind not in (None, "message"):
        fields.fault(f"{path}.type", f"{shown(kind)} is not supported; only messages are")
        return None
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        fields.fault(f"{path}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
        return None
    texts = _read_content(fields, f"{path}.content", item.get("content"))
    return message_item(role, texts) if texts is not None else None


def _read_content(fields: Fields, path: str, content: Any) -> list[str] | None:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        fields.fault(path, f"must be a string or an array of parts, not {kind_of(content)}")
        return None
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            fields.fault(f"{path}[{index}]", f"must be an object, not {kind_of(part)}")
        elif part.get("type") not in TEXT_PARTS:
            kind = shown(part.get("type"))
            fields.fault(f"{path}[{index}].type", f"{kind} is not supported; only text is")
        elif not isinstance(part.get("text"), str):
            fields.fault(
                f"{path}[{index}].text", f"must be a string, not {kind_of(part.get('text'))}"
            )
        else:
            texts.append(part["text"])
    return texts
