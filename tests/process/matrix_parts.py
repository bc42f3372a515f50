"""What a run of the kill matrix is made of: answers, results, and small readers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import trio

from .matrix_cases import Case


class Wrong(AssertionError):
    """The case is not as it should be."""


@attrs.define
class Answer:
    """What a client got. ``kind``: "complete", "error", or "cut" where the connection ended."""

    who: str
    kind: str = ""
    text: str = ""
    came: trio.Event = attrs.field(factory=trio.Event, repr=False)


@attrs.define
class Result:
    """How a case went; ``problems`` is empty if well."""

    case: Case
    problems: list[str] = attrs.field(factory=list)
    exit_code: int | None = None
    outcome_s: float = math.nan  # from the event to the end of the parent
    log: str = ""

    def describe(self) -> str:
        """For people: the problems, and the log that shows them."""
        return "\n".join([f"=== {self.case.name}", *self.problems, self.log[-6000:]])


def flat(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    errors: list[BaseException] = []
    for error in group.exceptions:
        errors += flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return errors


def written(fault: str) -> str:
    """A fault as the configuration has it."""
    numbers = {"exit": "exit:3", "signal": "signal:11", "device-memory": "device-memory:1000"}
    return numbers.get(fault, fault)


def unchunk(raw: bytes) -> bytes:
    """The body of a chunked answer, as far as it came."""
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        try:
            length = int(size, 16)
        except ValueError:
            break
        body, raw = body + raw[:length], raw[length + 2 :]
    return body


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def to_toml(sections: dict[str, dict[str, Any]]) -> str:
    """JSON's values are TOML's, for what is used here."""
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


async def never_answer(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()
