"""/docs: the document as a page of its own."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import trio

from trioserve.http.openapi.page import render
from trioserve.http.openapi.shapes import obj, operation, string

from .client import serving
from .openapi_checks import document_of

VOID = {"meta", "br"}
OPTIONAL_ENDS = {"tr", "td", "th", "html"}


class Page(HTMLParser):
    """Collects anchors and links, and what is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")
        if tag not in VOID | OPTIONAL_ENDS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in OPTIONAL_ENDS:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page


async def test_page_shows_all_and_asks_for_nothing_else() -> None:
    async with serving() as served:
        document = await document_of(served)
        answer = await served.call("GET", "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = read(answer.body.decode())
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    for path, operations in document["paths"].items():
        assert path in page.text
        assert {operation["operationId"] for operation in operations.values()} <= set(page.ids)
    for name in document["components"]["schemas"]:
        assert f"shape-{name}" in page.ids
    assert all(link == "openapi.json" or link[0] == "#" for link in page.links)
    assert {link[1:] for link in page.links if link[0] == "#"} <= set(page.ids)
    assert not page.tags & {"script", "img", "link", "iframe", "object"}
    assert "prefers-color-scheme: dark" in answer.body.decode()
    assert not re.search(r"url\(|@import", answer.body.decode())


async def test_off_by_setting() -> None:
    async with serving(docs=False) as served:
        for path in ("/docs", "/openapi.json"):
            assert (await served.call("GET", path)).status == 404


def test_what_is_described_is_escaped() -> None:
    evil = '<script>"`&'
    text = render(
        {
            "info": {"title": evil, "version": evil, "description": evil},
            "tags": [{"name": "T", "description": evil}],
            "paths": {"/x": {"get": operation("x", "T", evil, {200: {"description": evil}})}},
            "components": {"schemas": {"S": obj({evil: string(evil, default=evil, enum=[evil])})}},
        }
    )
    assert "<script" not in text
    assert read(text).open == []


async def test_both_are_made_once_and_only_when_asked_for() -> None:
    in_a_new_process = (
        "import sys, trioserve.http.app;"
        "sys.exit(any(name.startswith('trioserve.http.openapi') for name in sys.modules))"
    )
    await trio.run_process([sys.executable, "-c", in_a_new_process])
    async with serving() as served:
        for path in ("/openapi.json", "/docs"):
            async with trio.open_nursery() as nursery:
                answers: list[bytes] = []

                async def ask(path: str = path, answers: list[bytes] = answers) -> None:
                    answers.append((await served.call("GET", path)).body)

                for _ in range(3):
                    nursery.start_soon(ask)
            assert len(set(answers)) == 1
