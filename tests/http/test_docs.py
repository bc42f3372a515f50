"""docs/http.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from trioserve.config.schema import HttpConfig
from trioserve.http.app import ROUTES
from trioserve.http.sampling_fields import Rules
from trioserve.http.schema import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    SHARED_NEUTRAL,
    WITHOUT_EFFECT,
)
from trioserve.http.timings import NAMES

from . import honoured

TEXT = Path("docs/http.md").read_text()


def section(heading: str) -> str:
    return TEXT.split(f"### {heading}\n")[1].split("\n#")[0]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def rows_in(text: str) -> set[str]:
    """Names in the first column of a table."""
    return {name for line in text.splitlines() for name in names_in(line[1:].split("|")[0])}


def test_api_15_table_of_fields_is_the_schemas() -> None:
    _intro, both, completions, chat = re.split(
        r"\n(?:Both routes|Completions|Chat):\n", section("Honoured")
    )
    assert rows_in(both) == honoured.COMPLETION & honoured.CHAT
    shared = {"max_tokens", "logprobs", "echo"}  # have something to say for each route as well
    assert rows_in(completions) - shared == honoured.COMPLETION - honoured.CHAT
    assert rows_in(chat) - shared == honoured.CHAT - honoured.COMPLETION
    refused = section("Refused unless neutral")
    neutral = {*SHARED_NEUTRAL, *COMPLETION_NEUTRAL, *CHAT_NEUTRAL}
    assert names_in(refused) == neutral | {"param"}
    assert names_in(section("Ignored")) == set(WITHOUT_EFFECT)


def test_no_field_is_in_two_tables() -> None:
    assert not (honoured.COMPLETION | honoured.CHAT) & {*SHARED_NEUTRAL, *WITHOUT_EFFECT}
    assert not honoured.COMPLETION & {*COMPLETION_NEUTRAL}
    assert not honoured.CHAT & {*CHAT_NEUTRAL}


def test_limits_of_the_configuration_are_the_samplers() -> None:
    """The configuration does not import the sampler's module, so its numbers stand twice."""
    default, http = Rules(), HttpConfig()
    assert http.max_n == default.max_n
    assert http.max_logprobs == default.max_logprobs
    assert http.max_stop_strings == default.max_stop_strings


def test_timings_are_listed() -> None:
    assert all(f"`{name}`" in TEXT for name in NAMES)


def test_routes_are_listed() -> None:
    for route in ROUTES:
        assert re.sub(r"<(?:path:)?(\w+)>", r"{\1}", route) in TEXT
