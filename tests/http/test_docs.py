"""docs/http.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from trioserve.http.app import ROUTES
from trioserve.http.schema import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    SHARED_NEUTRAL,
    WITHOUT_EFFECT,
)

from .test_fuzz import HONOURED

TEXT = Path("docs/http.md").read_text()


def names_in(heading: str) -> set[str]:
    section = TEXT.split(f"### {heading}\n")[1].split("\n#")[0]
    return set(re.findall(r"`([a-z_]+)`", section))


def test_api_15_table_of_fields_is_the_schemas() -> None:
    neutral = {*SHARED_NEUTRAL, *COMPLETION_NEUTRAL, *CHAT_NEUTRAL, "continuous_usage_stats"}
    assert names_in("Refused unless neutral") - neutral == {"param", "stream_options"}
    assert neutral - names_in("Refused unless neutral") == set()
    assert set(HONOURED) - names_in("Honoured") == set()
    assert names_in("Honoured") - set(HONOURED) == {"include_usage"}
    assert names_in("Ignored") == set(WITHOUT_EFFECT)


def test_routes_are_listed() -> None:
    for route in ROUTES:
        assert route.replace("<path:name>", "{name}") in TEXT
