"""docs/http.md says which fields /v1/responses and /v1/messages take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from trioserve.http.call_fields import ELSEWHERE
from trioserve.http.fields import Fields
from trioserve.http.messages import schema as messages
from trioserve.http.messages.errors import TYPES
from trioserve.http.refused import SHARED_NEUTRAL
from trioserve.http.refused import WITHOUT_EFFECT as SHARED_WITHOUT_EFFECT
from trioserve.http.responses import schema as responses

from . import honoured
from .honoured import Asked
from .protocols import MESSAGES, RESPONSES

TEXT = Path("docs/http.md").read_text()


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def section(heading: str) -> str:
    return TEXT.split(f"### {heading}\n")[1].split("\n#")[0]


def listed(text: str, begin: str, end: str) -> set[str]:
    """Names between two phrases."""
    return names_in(re.split(re.escape(end), text.split(begin)[1])[0])


def read_by(module: Any, body: dict[str, Any]) -> set[str]:
    """Names of the top-level fields that a parser asks for."""
    bodies: list[Asked] = []

    def record(body: dict[str, Any], *more: Any) -> Fields:
        bodies.append(Asked(body))
        bodies[-1].names = set()
        return Fields(bodies[-1], *more)

    parse = responses.parse_responses if module is responses else messages.parse_messages
    with mock.patch.object(module, "Fields", record):
        parse(json.dumps(body).encode())
    return bodies[0].names


@pytest.mark.parametrize(
    ("heading", "module", "body", "neutral"),
    [
        ("Fields of a response", responses, RESPONSES[1], responses.NEUTRAL),
        ("Fields of a message", messages, MESSAGES[1], messages.NEUTRAL),
    ],
)
def test_api_15_tables_of_fields_are_the_schemas(
    heading: str, module: Any, body: dict[str, Any], neutral: dict[str, Any]
) -> None:
    text = section(heading)
    honoured = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in names_in(line[1:].split("|")[0])
    }
    refused = listed(text, "Refused unless neutral", "Passed over")
    passed = listed(text, "Passed over", "\n\n")
    own = {"logprob_token_ids", "stop"} if module is messages else set()
    elsewhere = set(ELSEWHERE) if module is messages else set()
    assert refused == (set(neutral) | own) - elsewhere
    assert passed == set(module.WITHOUT_EFFECT)
    assert honoured == read_by(module, body) - refused - passed
    assert not honoured & {*neutral, *SHARED_NEUTRAL, *module.WITHOUT_EFFECT}


def test_what_other_routes_honour_is_not_called_unknown() -> None:
    known = {*SHARED_NEUTRAL, *SHARED_WITHOUT_EFFECT}
    own = {"prompt", "messages", "max_tokens", "max_completion_tokens", "stream_options"}
    for module, body in ((responses, RESPONSES[1]), (messages, MESSAGES[1])):
        taken = read_by(module, body) | known | set(module.NEUTRAL) | own
        assert (honoured.COMPLETION | honoured.CHAT) - taken <= {"top_logprobs", "truncation_side"}


def test_error_types_are_listed() -> None:
    assert set(TYPES.values()) <= names_in(section("Errors of this API"))
