"""The status page as bytes and headers; tests/browser has it in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.metadata import version

import pytest

from trioserve.http.page import FOLDER, SCRIPTS, STYLES, make_document

from .client import serving

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def policy(headers: dict[str, str]) -> dict[str, list[str]]:
    rules = (rule.split() for rule in headers["content-security-policy"].split(";"))
    return {name: values for name, *values in rules}


def inline(body: str, tag: str) -> str:
    [text] = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", body, re.DOTALL)
    return text


async def test_the_page_may_run_its_own_script_and_nothing_else() -> None:
    async with serving() as served:
        answer = await served.call("GET", "/", **HTML)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    body = answer.body.decode()
    rules = policy(answer.headers)
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        digest = hashlib.sha256(inline(body, tag).encode()).digest()
        assert rules[rule] == [f"'sha256-{base64.b64encode(digest).decode()}'"]
    assert rules["default-src"] == ["'none'"]
    assert rules["connect-src"] == ["'self'"]
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["require-trusted-types-for"] == ["'script'"]


def test_nothing_is_asked_of_anybody_else_and_no_text_becomes_markup() -> None:
    body = make_document().body.decode()
    for url in re.findall(r"(?:https?:)?//[\w.-]+", re.sub(r"(?m)^\s*//.*$", "", body)):
        assert url == "http://www.w3.org", url  # the name of a language, in the icon
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in body, way
    assert not re.search(r"<[^>]+\son\w+=", body)  # no handlers in markup, which the policy forbids
    assert not re.search(r"<[^>]+\sstyle=", body)


def test_all_parts_are_in_the_document_and_packaged() -> None:
    body = make_document().body.decode()
    parts = {path.name for path in FOLDER.iterdir() if path.suffix in (".css", ".js", ".html")}
    assert parts == {*STYLES, *SCRIPTS, "page.html"}
    for name in (*STYLES, *SCRIPTS):
        assert (FOLDER / name).read_text() in body
    assert "{" + "script}" not in body
    assert "{" + "locked}" not in body


async def test_every_series_that_is_read_is_there() -> None:
    scripts = "".join((FOLDER / name).read_text() for name in SCRIPTS)
    read = set(re.findall(r'(?:total|gained|rate|quantiles)\("([a-z_]+)"', scripts))
    assert len(read) > 12
    async with serving() as served:
        text = (await served.call("GET", "/metrics")).body.decode()
        startup = (await served.call("GET", "/startup")).json
    there = set(re.findall(r"(?m)^trioserve_([a-z_]+)", text))
    assert {name for name in read if name not in there and f"{name}_bucket" not in there} == set()
    assert {"phase", "model", "uptime_s", "cause", "stages", "info"} <= startup.keys()
    assert set(startup["stages"][0]) >= {"name", "state", "fraction", "seconds", "bytes", "detail"}


async def test_who_has_the_page_already_gets_304() -> None:
    async with serving() as served:
        first = await served.call("GET", "/")
        etag = first.headers["etag"]
        assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
        assert first.headers["cache-control"] == "private, no-cache"
        for given in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            again = await served.call("GET", "/", **{"if-none-match": given})
            assert (again.status, again.body) == (304, b""), given
            assert again.headers["etag"] == etag
            for name in ("cache-control", "content-security-policy"):
                assert again.headers[name] == first.headers[name]
        other = await served.call("GET", "/", **{"if-none-match": '"other"'})
        assert (other.status, other.body) == (200, first.body)


async def test_head_is_get_without_the_body() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send("GET", "/")
        got = await client.answer()
        await client.send("HEAD", "/")
        head = await client.head()
        await client.send("GET", "/health/live")  # the connection is still in step
        assert (await client.answer()).status == 200
    assert (head.status, head.body) == (200, b"")
    for name in ("etag", "content-type", "content-length", "cache-control"):
        assert head.headers[name] == got.headers[name], name


async def test_other_methods_are_refused() -> None:
    async with serving() as served:
        answer = await served.call("POST", "/", {})
    assert answer.status == 405
    assert "GET" in answer.headers["allow"]


async def test_the_page_can_be_turned_off() -> None:
    async with serving(page=False) as served:
        answer = await served.call("GET", "/", **HTML)
        assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
        locked = await served.call("GET", "/health/live")
        assert locked.status == 200


async def test_op_02_the_page_tells_nothing_without_the_key() -> None:
    async with serving(api_keys=("secret-key",)) as served:
        bare = await served.call("GET", "/")
        assert (bare.status, bare.headers["content-type"]) == (401, "application/json")
        anything = await served.call("GET", "/", accept="*/*")
        assert anything.headers["content-type"] == "application/json"
        wrong = await served.call("GET", "/", authorization="Bearer other", **HTML)
        form = await served.call("GET", "/", **HTML)
        for answer in (wrong, form):
            assert answer.status == 401
            assert answer.headers["cache-control"] == "no-store"
            assert "etag" not in answer.headers
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.body == make_document(locked=True).body
            assert policy(answer.headers)["frame-ancestors"] == ["'none'"]
        text = form.body.decode()
        for name in (*served.engine.served_names, version("trioserve"), "secret-key"):
            assert name not in text
        head = await served.call("POST", "/", {}, **HTML)
        assert (head.status, head.headers["content-type"]) == (401, "application/json")
        for headers in ({"authorization": "Bearer secret-key"}, {"x-api-key": "secret-key"}):
            opened = await served.call("GET", "/", **headers, **HTML)
            assert opened.status == 200
            assert b"data-locked>" not in opened.body
            assert "private" in opened.headers["cache-control"]


@pytest.mark.parametrize("path", ["/startup", "/metrics", "/version"])
async def test_op_02_the_pages_data_needs_the_key_whatever_is_accepted(path: str) -> None:
    async with serving(api_keys=("secret-key",)) as served:
        answer = await served.call("GET", path, **HTML)
        assert (answer.status, answer.headers["content-type"]) == (401, "application/json")
