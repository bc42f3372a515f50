"""The playground: prompts, streams, stopping, errors, the keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect

from ..e2e.server import Server
from .conftest import Visit

expect.set_options(timeout=10_000)


@pytest.fixture
def visited(server: Server, visit: Callable[..., Visit]) -> Visit:
    visited = visit()
    visited.page.goto(server.url)
    expect(visited.page.locator("#phase")).to_have_text("Ready")
    return visited


def say(page: Page, text: str, max_tokens: str = "20") -> None:
    page.evaluate("document.querySelector('.settings').open = true")
    page.fill("#max-tokens", max_tokens)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def bodies(visited: Visit) -> list[Any]:
    posts = [request for request in visited.requests if request.method == "POST"]
    return [json.loads(request.post_data or "") for request in posts]


def total(server: Server, name: str, labels: str = "") -> float:
    found = re.findall(
        rf"(?m)^trioserve_{name}{re.escape(labels)} (\S+)$", server.get("/metrics").text
    )
    return sum(map(float, found))


def test_an_answer_is_streamed_and_the_next_one_knows_it(server: Server, visited: Visit) -> None:
    page = visited.page
    page.evaluate("document.querySelector('.settings').open = true")
    page.fill("#system", "Be brief.")
    say(page, "Hello\nthere")
    answer = page.locator(".turn.assistant")
    meta = answer.locator(".meta")
    expect(meta).to_have_text(
        re.compile(
            r"first token after [\d.]+ m?s · [\d.,]+ tokens/s · 20 tokens"
            r" · cut at the limit of tokens"
        )
    )
    text = answer.locator(".text").text_content()
    assert text
    expect(page.locator(".turn.user .text")).to_have_text("Hello\nthere", use_inner_text=True)
    expect(page.locator("#spoken")).to_have_text(text)  # told to screen readers, once
    expect(page.locator("#prompt")).to_be_focused()
    say(page, "And?")
    expect(page.locator(".turn.assistant .meta").nth(1)).to_contain_text("20 tokens")
    first, second = bodies(visited)
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\nthere"},
    ]
    assert [message["role"] for message in second["messages"]] == [
        *("system", "user", "assistant", "user")
    ]
    assert second["messages"][2]["content"] == text
    assert first["temperature"] == 0.7
    page.click("#anew")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#empty")).to_be_visible()
    assert not visited.complaints


def test_stop_ends_the_work_on_the_server(server: Server, visited: Visit) -> None:
    page = visited.page
    gone = total(server, "choices_finished_total", '{reason="gone"}')
    page.locator("#temperature").evaluate("range => range.value = 1.5")
    say(page, "Go on for ever", max_tokens="2000")
    text = page.locator(".turn.assistant .text")
    expect(text).not_to_be_empty()
    expect(page.locator("#send")).to_be_hidden()
    page.click("#stop")
    expect(page.locator(".turn.assistant .meta")).to_have_text(
        re.compile(r"first token after .* tokens/s · [\d,]+ tokens · stopped")
    )
    server.wait_until(lambda: total(server, "requests_running") == 0, "idle", 5)
    assert total(server, "choices_finished_total", '{reason="gone"}') == gone + 1
    kept = text.text_content()
    assert kept
    expect(page.locator("#send")).to_be_visible()
    say(page, "And now?", max_tokens="3")  # what came before the stop is part of the talk
    expect(page.locator(".turn.assistant .meta").nth(1)).to_contain_text("3 tokens")
    stopped, last = bodies(visited)
    assert stopped["temperature"] == 1.5
    assert last["messages"][1] == {"role": "assistant", "content": kept}


def test_an_error_is_told_in_the_servers_words_and_can_be_mended(
    server: Server, visited: Visit
) -> None:
    page = visited.page
    for max_tokens, value in (("0", 0), ("many", "many")):
        say(page, "Hello", max_tokens=max_tokens)
        refused = server.post("/v1/completions", prompt="x", max_tokens=value)
        message = refused.json()["error"]["message"]
        expect(page.locator(".turn .fault").last).to_have_text(message)
        expect(page.locator("#spoken")).to_have_text(message)
    page.fill("#max-tokens", "4")
    page.get_by_role("button", name="Try again").last.click()
    expect(page.locator(".turn.assistant .meta").last).to_contain_text("4 tokens")
    # A question that got no answer is not asked again along with the next.
    assert bodies(visited)[-1]["messages"] == [{"role": "user", "content": "Hello"}]


def test_an_error_in_mid_stream_keeps_what_came(visited: Visit) -> None:
    chunk = {"choices": [{"delta": {"content": "half an "}}], "usage": None}
    fault = {
        "error": {"message": "the worker <b>died</b>", "type": "x", "param": None, "code": None}
    }
    events = [json.dumps(chunk), json.dumps(fault)]
    answers = ["".join(f"data: {event}\n\n" for event in events), f"data: {events[0]}\n\n"]

    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=answers.pop(0))

    page = visited.page
    page.route("**/v1/chat/completions", answer)
    for told in (
        "the worker <b>died</b>",
        "The connection was lost before the answer was complete.",
    ):
        say(page, "Hello")
        last = page.locator(".turn.assistant").last
        expect(last.locator(".fault")).to_have_text(told)
        expect(last.locator(".text")).to_have_text("half an ")
    assert page.locator(".turn b").count() == 0


def test_a_whole_conversation_without_a_mouse(visited: Visit) -> None:
    page = visited.page
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".turn.assistant .meta")).to_contain_text("stopped")
    expect(page.locator(".turn.user .text")).to_have_text("One\ntwo", use_inner_text=True)
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Enter")  # nothing to send
    assert len(bodies(visited)) == 1


def test_an_address_for_clients_is_shown_and_copied(
    server: Server, visit: Callable[..., Visit]
) -> None:
    page = visit(permissions=["clipboard-read", "clipboard-write"]).page
    page.goto(server.url)
    expect(page.locator("#address")).to_have_text(f"{server.url}/v1")
    page.get_by_role("button", name="Copy").click()
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"{server.url}/v1"


def test_nobody_but_the_server_is_asked(server: Server, visited: Visit) -> None:
    say(visited.page, "Hello")
    expect(visited.page.locator(".turn.assistant .meta")).to_contain_text("20 tokens")
    asked: list[Request] = visited.requests
    assert {request.url.split("/")[2] for request in asked if request.url[:5] != "data:"} == {
        f"127.0.0.1:{server.port}"
    }
    assert set(visited.paths()) == {"/", "/startup", "/metrics", "/version", "/v1/chat/completions"}
    assert not visited.complaints
