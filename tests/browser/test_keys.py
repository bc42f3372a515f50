"""The page of a server that asks for keys: nothing is told without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from ..e2e.server import Server, free_port, running
from .conftest import SIMULATED, Visit, find_browser

expect.set_options(timeout=10_000)

KEY = "sk-the-right-one"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    find_browser()
    http: dict[str, Any] = {"port": free_port(), "api_keys": [KEY]}
    with running(tmp_path_factory.mktemp("locked"), **SIMULATED, http=http) as server:
        yield server


def key_fault(page: Page) -> Locator:
    return page.locator("#key-fault")


def test_op_02_the_page_asks_for_a_key_and_tells_nothing_without(
    locked: Server, visit: Callable[..., Visit]
) -> None:
    visited = visit()
    page = visited.page
    answer = page.goto(locked.url)
    assert answer is not None
    assert answer.status == 401
    expect(page.get_by_label("API key")).to_be_focused()
    expect(page.locator("#app")).to_be_hidden()
    page.wait_for_timeout(1200)  # longer than between two looks
    assert visited.paths() == ["/"]  # nothing is asked without a key
    assert "tiny" not in page.content()
    for wrong, told in (
        ("", "Enter a key."),
        ("schlüssel", "A key has letters, digits and signs of ASCII only."),
        ("sk-wrong", "the API key is not known here"),
    ):
        page.fill("#key", wrong)
        page.press("#key", "Enter")
        expect(key_fault(page)).to_have_text(told)
        expect(page.locator("#app")).to_be_hidden()
    assert "tiny" not in page.content()


def test_op_02_a_key_opens_the_page_in_its_tab_and_can_be_forgotten(
    locked: Server, visit: Callable[..., Visit]
) -> None:
    visited = visit()
    page = visited.page
    page.goto(locked.url)
    page.fill("#key", KEY)
    page.click("text=Continue")
    expect(page.locator("#phase")).to_have_text("Ready")
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    expect(page.locator(".turn.assistant .text")).not_to_be_empty()
    assert KEY not in page.url
    assert KEY not in page.content()
    page.reload()
    expect(page.locator("#model")).to_have_text("tiny")
    page.get_by_role("button", name="Forget the key").click()
    expect(page.get_by_label("API key")).to_be_focused()
    asked = len(visited.paths())
    page.wait_for_timeout(1200)
    assert len(visited.paths()) == asked
    assert "tiny" not in page.content()
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0
    page.reload()
    expect(page.get_by_label("API key")).to_be_focused()


def test_op_02_a_key_that_is_withdrawn_shuts_the_page(
    locked: Server, visit: Callable[..., Visit]
) -> None:
    page = visit().page
    page.goto(locked.url)
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#phase")).to_have_text("Ready")
    page.evaluate("document.querySelector('.settings').open = true")
    page.fill("#system", "a secret of the one who was here")
    page.fill("#prompt", "another")
    error = {"message": "the API key is not known here", "type": "x", "param": None, "code": None}
    page.route("**/startup", lambda route: route.fulfill(status=401, json={"error": error}))
    expect(key_fault(page)).to_have_text("the API key is not known here")
    expect(page.locator("#app")).to_be_hidden()
    assert "tiny" not in page.content()
    page.unroute("**/startup")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#phase")).to_have_text("Ready")
    assert page.input_value("#system") == page.input_value("#prompt") == ""
