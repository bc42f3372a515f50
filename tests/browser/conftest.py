"""A real browser, and pages in it that note all they ask for and all they complain about.

Needs chromium; where there is none the tests are skipped, or fail if NEED_BROWSER is set.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from ..e2e.server import Server, running

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PATIENCE_MS = 10_000  # only ever used up by a failing test
SIMULATED: dict[str, dict[str, Any]] = {
    "model": {"source": "random:llama?num_layers=1&hidden_size=32", "served_names": ["tiny"]},
    "device": {"kind": "simulated", "simulated_step_s": 0.005},
}


@attrs.define
class Visit:
    """One page with a storage of its own."""

    page: Page
    requests: list[Request] = attrs.field(factory=list)
    complaints: list[str] = attrs.field(factory=list)

    def paths(self) -> list[str]:
        """What was asked for, without data: URLs, which ask nobody."""
        asked = [request.url for request in self.requests if not request.url.startswith("data:")]
        return ["/" + url.split("/", 3)[3] for url in asked]

    def note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def find_browser() -> str:
    for name in (os.environ.get("CHROMIUM"), *NAMES):
        if name and (path := shutil.which(name)):
            return path
    missing = "no browser: install chromium (Debian: apt-get install chromium) to test the page"
    if os.environ.get("NEED_BROWSER"):
        pytest.fail(missing)
    pytest.skip(f"NOT TESTED: {missing}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Makes visits; at the end none may have had an error of its own script."""
    contexts = []
    faults: list[Exception] = []

    def make(**options: Any) -> Visit:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        visit = Visit(context.new_page())
        visit.page.on("request", lambda request: visit.requests.append(request))
        visit.page.on("console", lambda message: visit.note(message))
        visit.page.on("pageerror", lambda fault: faults.append(fault))
        return visit

    yield make
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    find_browser()  # no server where there is nobody to look at it
    folder: Path = tmp_path_factory.mktemp("page")
    with running(folder, **SIMULATED) as server:
        yield server
