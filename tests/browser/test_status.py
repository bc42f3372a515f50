"""What the page says of a server: loading, ready, restarting, draining, gone; and how it looks."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from ..e2e.server import Server, running, start
from .conftest import SIMULATED, Visit

expect.set_options(timeout=10_000)

NONE = "\N{EN DASH}"
NASTY = '<img src="/nasty" onerror="window.hit = 1"><script>window.hit = 2</script>'


def phase(page: Page) -> Any:
    return expect(page.locator("#phase"))


def test_the_stages_are_shown_while_the_model_loads(
    tmp_path: Path, visit: Callable[..., Visit]
) -> None:
    visited = visit()
    page = visited.page
    device = {**SIMULATED["device"], "simulated_load_s": 3.0}
    with starting(tmp_path, model=SIMULATED["model"], device=device) as server:
        open_page(page, server)
        phase(page).to_have_text("Loading")
        running_stage = page.locator("#stages li[data-state=running]")
        expect(running_stage.locator(".name")).to_have_text("weights")
        bar = running_stage.get_by_role("progressbar", name="weights")
        expect(bar).to_have_attribute("aria-valuenow", re.compile(r"[1-9]\d?"))
        assert 0 < bar.locator("i").bounding_box()["width"] < bar.bounding_box()["width"]  # type: ignore[index]
        expect(page.locator("#stages li")).to_have_count(14)
        expect(page.locator("#stages li[data-state=done] .name").first).to_have_text("resolve")
        expect(page.locator("#stages li[data-state=pending] .name").last).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("tiny")
        page.fill("#prompt", "hello")
        expect(page.locator("#send")).to_be_disabled()
        expect(page.locator("#hint")).to_have_text("The model is not ready.")
        phase(page).to_have_text("Ready")
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("#starting")).to_be_hidden()
        expect(page.locator("#started-in")).to_have_text(re.compile(r"ready after [\d.]+ s"))
        page.locator("#started summary").click()
        weights = page.locator("#stages-done li", has_text="weights")
        expect(weights.locator(".took")).to_have_text(re.compile(r"3\.\d\d s"))
        assert page.title() == "tiny · Ready"
        assert not visited.complaints


def test_a_drain_and_the_end_and_a_new_server_are_told(
    tmp_path: Path, visit: Callable[..., Visit]
) -> None:
    page = visit().page
    with running(tmp_path, **SIMULATED) as server:
        page.goto(server.url)
        phase(page).to_have_text("Ready")
        with server.stream(
            "/v1/completions", prompt="x", max_tokens=1900, ignore_eos=True
        ) as events:
            next(events)
            server.signal(signal.SIGTERM)
            phase(page).to_have_text("Shutting down")
            expect(page.locator("#notice")).to_contain_text("new ones are refused")
        phase(page).to_have_text("No answer")
        notice = page.locator("#notice")
        expect(notice).to_have_text(
            re.compile(
                rf"127.0.0.1:{server.port} has not answered since \d\d:\d\d:\d\d\."
                r" It was shutting down\. Trying again every second\."
            )
        )
        expect(page.locator("#model")).to_have_text("tiny")  # what was last known stays, paler
        assert server.wait() == 0
    http = {"port": server.port}
    with running(
        tmp_path,
        **{**SIMULATED, "http": http, "model": {**SIMULATED["model"], "served_names": ["other"]}},
    ):
        phase(page).to_have_text("Ready")
        expect(page.locator("#model")).to_have_text("other")
        expect(notice).to_be_empty()


def test_a_worker_that_died_is_told_with_the_cause(
    tmp_path: Path, visit: Callable[..., Visit]
) -> None:
    page = visit().page
    device = {**SIMULATED["device"], "simulated_load_s": 1.2}
    sections = {**SIMULATED, "device": device, "engine": {"on_death": "restart"}}
    with running(tmp_path, **sections) as server:
        page.goto(server.url)
        phase(page).to_have_text("Ready")
        server.worker().kill()
        phase(page).to_have_text("Restarting")
        expect(page.locator("#notice")).to_contain_text("another is being started: ")
        expect(page.locator("#notice")).to_contain_text("SIGKILL")
        expect(page.locator("#stages li[data-state=running]")).to_be_visible()
        phase(page).to_have_text("Ready")
        expect(page.locator("#restarts")).to_have_text("worker restarted once")


# ------------------------------------------------------------------ with answers made up here


@pytest.fixture
def startup(server: Server) -> dict[str, Any]:
    document = server.get("/startup").json()
    assert isinstance(document, dict)
    return document


def freeze(page: Page) -> None:
    """From here on time in the page passes only when it is told to."""
    page.clock.install(time=0)
    page.clock.pause_at(1000)


def pass_time(page: Page, until: Callable[[], bool]) -> float:
    """Let time pass in the page until something is so; returns how much did, in s."""
    for tenths in range(100):
        if until():
            return tenths / 10
        page.clock.run_for(100)
        page.wait_for_timeout(40)  # answers come meanwhile
    raise AssertionError("not in 10 s of the page's time")


def pretend(page: Page, path: str, answer: Callable[[], Any]) -> None:
    def fulfill(route: Route) -> None:
        body = answer()
        if isinstance(body, str):
            route.fulfill(body=body, content_type="text/plain")
        else:
            route.fulfill(json=body)

    page.route(f"**{path}", fulfill)


def test_figures_are_those_of_the_counters(
    server: Server, visit: Callable[..., Visit], startup: dict[str, Any]
) -> None:
    page = visit().page
    freeze(page)
    startup["info"] |= {"num_blocks": 100, "block_size": 16, "weight_bytes": 271_000_000}
    moment = {"seconds": 0}

    def metrics() -> str:
        n = moment["seconds"]
        moment["seconds"] += 1
        return f"""# HELP a "quoted" \\n line
trioserve_generation_tokens_total {1000 + 50 * n}.0
trioserve_prefill_tokens_total {2.5e3 * n}
trioserve_requests_running 3
trioserve_requests_waiting 2.0
trioserve_kv_cache_usage_ratio 0.42
trioserve_prefix_cache_queries_total {100 * n}
trioserve_prefix_cache_hits_total {25 * n}
trioserve_preemptions_total 7
trioserve_engine_restarts_total 0
trioserve_choices_finished_total{{reason="stop"}} 1200
trioserve_choices_finished_total{{reason="length"}} 34
trioserve_choices_finished_total{{reason="gone"}} 5
trioserve_choices_finished_total{{reason="error"}} 1
trioserve_choices_finished_total{{reason="timeout"}} 1
trioserve_time_to_first_token_seconds_bucket{{le="0.1"}} 50
trioserve_time_to_first_token_seconds_bucket{{le="0.2"}} {50 + 10 * n}
trioserve_time_to_first_token_seconds_bucket{{le="+Inf"}} {50 + 10 * n}
trioserve_inter_token_seconds_bucket{{le="0.01"}} {10 * n}
trioserve_inter_token_seconds_bucket{{le="0.02"}} {20 * n}
trioserve_inter_token_seconds_bucket{{le="+Inf"}} {20 * n}
trioserve_request_seconds_bucket{{le="600"}} 0
trioserve_request_seconds_bucket{{le="+Inf"}} 0
trioserve_process_resident_memory_bytes{{process="server"}} 88000000
trioserve_process_resident_memory_bytes{{process="worker"}} 755000000
"""

    pretend(page, "/metrics", metrics)
    pretend(page, "/startup", lambda: startup | {"uptime_s": 93784 + moment["seconds"]})
    page.goto(server.url)
    shown = {
        "running": "3", "waiting": "2", "complete": "1,234",
        "incomplete": "2 failed, 5 abandoned", "cache": "42 %", "cache-size": "of 1,600 tokens",
        "preemptions": "7 preemptions", "memory": "843.0 MB", "output": NONE, "prompts": NONE,
    }  # fmt: skip
    for name, text in shown.items():
        expect(page.locator(f"#{name}")).to_have_text(text)
    for seconds in range(1, 4):
        assert pass_time(page, lambda s=seconds: moment["seconds"] > s) > 0  # type: ignore[misc]
    shown = {
        "output": "50.0", "prompts": "2,500", "hits": "25 %", "first": "150 ms",
        "first-tail": "99 % below 199 ms", "next": "10 ms", "next-tail": "99 % below 20 ms",
        "whole": NONE, "whole-tail": "no requests",
        "uptime": re.compile(r"up 1 d 2 h"),
    }  # fmt: skip
    for name, text in shown.items():
        expect(page.locator(f"#{name}")).to_have_text(text)


def test_text_of_the_server_is_never_markup(
    server: Server, visit: Callable[..., Visit], startup: dict[str, Any]
) -> None:
    visited = visit()
    page = visited.page
    startup |= {"model": NASTY, "phase": "restarting", "cause": NASTY}
    for stage in startup["stages"]:
        stage |= {"name": NASTY, "detail": NASTY, "state": "running", "fraction": 0.5}
    pretend(page, "/startup", lambda: startup)
    pretend(page, "/version", lambda: {"version": NASTY})
    page.goto(server.url)
    for place in ("#model", "#version", "#stages .name >> nth=0", "#stages .detail >> nth=0"):
        expect(page.locator(place)).to_have_text(NASTY)
    expect(page.locator("#notice")).to_contain_text(NASTY)
    assert page.evaluate("window.hit") is None
    assert "/nasty" not in visited.paths()
    # Were there a way in all the same, the policy would stop what came through it.
    attempt = "document.body.appendChild(document.createElement('script')).text = 'window.hit = 3'"
    with pytest.raises(Exception, match="TrustedScript"):
        page.evaluate(attempt)
    page.evaluate("document.body.appendChild(new Image()).src = '/nasty'")
    page.wait_for_timeout(50)
    assert page.evaluate("window.hit") is None
    assert any(
        "/nasty" in text and "Content Security Policy" in text for text in visited.complaints
    )


def test_a_paused_server_is_not_taken_for_an_idle_one(
    server: Server, visit: Callable[..., Visit]
) -> None:
    page = visit().page
    pretend(page, "/metrics", lambda: "trioserve_engine_paused 1\ntrioserve_requests_waiting 2\n")
    page.goto(server.url)
    phase(page).to_have_text("Paused")
    expect(page.locator("#notice")).to_contain_text("nothing is computed until it is resumed")
    expect(page.locator("#waiting")).to_have_text("2")


def test_what_is_no_trioserve_is_not_taken_for_one(
    server: Server, visit: Callable[..., Visit]
) -> None:
    page = visit().page
    page.goto(server.url)
    phase(page).to_have_text("Ready")
    for answer in ("<html>a proxy's page</html>", {"status": "ok"}):
        pretend(page, "/startup", lambda answer=answer: answer)  # type: ignore[misc]
        phase(page).to_have_text("No answer")
        expect(page.locator("#notice")).to_contain_text("is not a trioserve server since")
        page.unroute("**/startup")
    phase(page).to_have_text("Ready")


def test_a_server_of_another_version_asks_for_a_reload(
    server: Server, visit: Callable[..., Visit], startup: dict[str, Any]
) -> None:
    page = visit().page
    page.goto(server.url)
    phase(page).to_have_text("Ready")
    pretend(page, "/version", lambda: {"version": "9.9"})
    pretend(page, "/startup", lambda: startup | {"uptime_s": 0.1})  # started anew
    expect(page.locator("#version")).to_have_text("9.9 · reload for its page")
    pretend(page, "/startup", lambda: startup | {"stages": [{"title": "of another kind"}]})
    expect(page.locator("#notice")).to_have_text(
        "The server's answers are not understood. Reload the page."
    )
    page.unroute("**/startup")
    phase(page).to_have_text("Ready")  # it goes on looking


def test_nobody_is_asked_while_nobody_looks(server: Server, visit: Callable[..., Visit]) -> None:
    visited = visit()
    page = visited.page
    page.add_init_script(
        "window.away = false;Object.defineProperty(document, 'hidden', { get: () => window.away });"
    )
    freeze(page)
    page.goto(server.url)
    phase(page).to_have_text("Ready")
    turn = "window.away = {}; document.dispatchEvent(new Event('visibilitychange'))"

    def looks() -> int:
        return visited.paths().count("/startup")

    before = looks()
    for n in range(1, 4):
        took_s = pass_time(page, lambda n=n: looks() == before + n)  # type: ignore[misc]
        assert 0.5 <= took_s <= 1.5  # the test learns of a request a little after it is made
    page.wait_for_timeout(200)  # the last answer is in
    page.evaluate(turn.format("true"))
    page.clock.run_for(5000)
    page.wait_for_timeout(200)
    assert looks() == before + 3
    with page.expect_response("**/metrics"):
        page.evaluate(turn.format("false"))  # at once
    assert looks() == before + 4


# --------------------------------------------------------------------------------- the looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_it_fits_and_can_be_read(
    server: Server, visit: Callable[..., Visit], scheme: Any, width: int
) -> None:
    page = visit(viewport={"width": width, "height": 800}, color_scheme=scheme).page
    page.goto(server.url)
    phase(page).to_have_text("Ready")
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALL_TARGETS) == []
    assert page.evaluate(UNREADABLE) == []
    assert page.evaluate(NAMELESS) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background))) > 3 * 128
    assert light == (scheme == "light")


def test_nothing_moves_for_those_who_do_not_want_it(
    server: Server, visit: Callable[..., Visit], startup: dict[str, Any]
) -> None:
    startup["phase"] = "loading"
    for stage in startup["stages"]:
        stage |= {"state": "running", "fraction": None}
    for reduced_motion, moving in (("reduce", False), ("no-preference", True)):
        page = visit(reduced_motion=reduced_motion).page
        pretend(page, "/startup", lambda: startup)
        page.goto(server.url)
        phase(page).to_have_text("Loading")
        expect(page.locator("#stages .bar").first).to_be_visible()
        assert bool(page.evaluate("document.getAnimations().length")) == moving


# What is pressed is large enough for a finger: 24 px at least, as WCAG 2.2 has it.
SMALL_TARGETS = """[...document.querySelectorAll('button, input, textarea, summary')]
  .filter(node => node.checkVisibility())
  .map(node => [node.id || node.textContent, node.getBoundingClientRect().height])
  .filter(([, height]) => height < 24)"""

# Texts whose contrast with what is behind them is below 4.5.
UNREADABLE = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].reduce((sum, part, i) => {
    const c = part / 255;
    const linear = c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return sum + linear * [0.2126, 0.7152, 0.0722][i];
  }, 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
  };
  const bad = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !node.checkVisibility() || node.closest('button:disabled, noscript')) continue;
    const [a, b] = [luminance(parse(getComputedStyle(node).color)), luminance(behind(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) bad.push([node.textContent.slice(0, 40), contrast]);
  }
  return bad;
})()"""

# Controls that a screen reader has no name for.
NAMELESS = """[...document.querySelectorAll('button, input, textarea, summary, [tabindex]')]
  .filter(node => !(node.labels?.length || node.textContent.trim() || node.ariaLabel))
  .map(node => node.outerHTML)"""


def open_page(page: Page, server: Server) -> None:
    """Open it as soon as the server listens."""
    server.wait_until(lambda: listens(server), "listening")
    page.goto(server.url)


def listens(server: Server) -> bool:
    try:
        return server.get("/health/live").status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def starting(folder: Path, **sections: Any) -> Iterator[Server]:
    """A server that need not be ready; ended in order with the block."""
    server = start(folder, **sections)
    try:
        yield server
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
        server.assert_nothing_left()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
