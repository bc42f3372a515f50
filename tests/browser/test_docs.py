"""The page of /docs in a real browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..e2e.server import Server
from .conftest import Visit


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [360, 1200])
def test_docs_are_one_document_of_any_width(
    server: Server, visit: Callable[..., Visit], scheme: str, width: int
) -> None:
    visited = visit(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = visited.page
    page.goto(f"{server.url}/docs")
    assert page.title() == "trioserve"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background.strip("rgb()").split(","))
    assert (brightness < 200) == (scheme == "dark")
    page.get_by_role("link", name="/v1/chat/completions", exact=True).click()
    assert page.url.endswith("#createChatCompletion")
    assert page.get_by_role("heading", name="ChatRequest").count() == 1
    assert [path for path in visited.paths() if path.partition("#")[0] != "/docs"] in (
        [],
        ["/favicon.ico"],
    )
    assert visited.complaints == []
