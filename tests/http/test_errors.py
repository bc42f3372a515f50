"""Errors have one shape, whatever they come from and whichever route they are about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trio

from trioserve.engine.api import Phase
from trioserve.http.app import make_app
from trioserve.http.errors import HTTP_ERRORS

from .client import Answer, Client, serving
from .fake_engine import FakeEngine
from .openapi_checks import EVERYTHING, everything_on

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")


def error_of(answer: Answer) -> dict[str, Any]:
    """The error, in OpenAI's shape or, for Anthropic's routes, in theirs."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    error = body["error"]
    if body.get("type") == "error":
        assert {"type", "message"} <= error.keys()
    else:
        assert body.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"]
    assert error["type"]
    assert error["message"]
    assert "\n" not in error["message"]
    assert isinstance(error, dict)
    return error


async def test_api_10_every_route_with_every_method() -> None:
    routes: dict[str, set[str]] = {}
    for rule in make_app(FakeEngine(), everything_on(), trio.Event()).url_map.iter_rules():
        path = re.sub(r"<.*?>", "fake", rule.rule)
        routes.setdefault(path, set()).update(rule.methods or ())
    async with serving(**EVERYTHING) as served:
        for path, taken in routes.items():
            for method in METHODS:
                if path == "/admin/drain" and method == "POST":
                    continue  # it would end the server
                client = await served.connect()
                async with client.stream:
                    await client.send(method, path, b"" if method == "POST" else None)
                    answer = await (client.head() if method == "HEAD" else client.answer())
                known = method in taken
                assert (answer.status == 405) == (not known), (method, path, answer.status)
                assert answer.status < 500, (method, path)
                if method == "OPTIONS":
                    assert answer.status == 200
                    assert answer.body == b""
                    allowed = set(answer.headers["allow"].split(", "))
                    assert allowed == taken
                elif not known and method == "HEAD":
                    assert "allow" in answer.headers
                elif not known:
                    error = error_of(answer)
                    assert answer.headers["allow"] == ", ".join(sorted(taken))
                    assert f"{method} {path}" in error["message"]
                    assert answer.headers["allow"] in error["message"]
                elif answer.status >= 400 and method != "HEAD":
                    error_of(answer)


async def test_head_is_get_without_a_body() -> None:
    async with serving() as served:
        for path in ("/health", "/v1/models", "/v1/models/fake", "/version", "/docs", "/ping"):
            got, head = await served.call("GET", path), await served.connect()
            async with head.stream:
                await head.send("HEAD", path)
                answer = await head.head()
                assert answer.status == got.status
                assert int(answer.headers["content-length"]) == len(got.body)
                await head.send("GET", "/version")  # nothing is left over on the connection
                assert (await head.answer()).status == 200


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/nothing", "GET /nothing"),
        ("/a%0d%0aSet-Cookie:x", "GET /a\\r\\nSet-Cookie:x"),
        ("/%F0%9F%98%80", "GET /\\U0001f600"),
        ("/%1b%5b31m", "GET /\\x1b[31m"),
        ("/" + "x" * 5000, "x..."),
        ("/v1/models/" + "x" * 5000, "x..."),
    ],
)
async def test_what_was_asked_for_is_shown_escaped_and_cut(path: str, shown: str) -> None:
    async with serving() as served:
        answer = await served.call("GET", path)
        assert answer.status == 404
        message = error_of(answer)["message"]
        assert shown in message
        assert message.isascii()
        assert message.isprintable()
        assert len(message) < 300


async def test_a_method_of_any_length_is_cut() -> None:
    async with serving() as served:
        answer = await served.call("X" * 3000, "/version")
        assert answer.status == 405
        assert len(error_of(answer)["message"]) < 200


async def raw_answer(client: Client, data: bytes) -> tuple[bytes, Answer]:
    await client.stream.send_all(data)
    head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    status, _, rest = head.partition(b"\r\n")
    headers = {}
    for line in rest.decode().split("\r\n"):
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    return status, Answer(int(status.split()[1]), headers, body)


@pytest.mark.parametrize(
    ("data", "line", "code"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, "431 Request Header Fields", "headers_too"),
        (b"GET /" + b"y" * 100_000, "414 Request-URI Too Long", "target_too_long"),
        (b"\0\0\r\n\r\n", "400 Bad Request", "invalid_http"),
        (b"GET / HTTP/3.0\r\nHost: x\r\n\r\n", "505 HTTP Version", "version_not"),
    ],
)
async def test_errors_before_there_is_a_request(data: bytes, line: str, code: str) -> None:
    async with serving() as served:
        status, answer = await raw_answer(await served.connect(), data)
        assert status.decode().startswith(f"HTTP/1.1 {line}")
        assert error_of(answer)["code"].startswith(code)


@pytest.mark.parametrize(
    ("request_line", "line"),
    [
        ("GET /version", "200 OK"),
        ("GET /nothing", "404 Not Found"),
        ("DELETE /version", "405 Method Not Allowed"),
        ("POST /v1/completions", "503 Service Unavailable"),
    ],
)
async def test_status_lines_have_reasons(request_line: str, line: str) -> None:
    async with serving(FakeEngine(phase=Phase.LOADING)) as served:
        head = f"{request_line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        status, _ = await raw_answer(await served.connect(), head.encode())
        assert status.decode() == f"HTTP/1.1 {line}"


def test_every_code_is_in_the_table() -> None:
    section = Path("docs/http.md").read_text().split("## Errors\n")[1].split("\n## ")[0]
    cells = "".join(line.split(" | ")[2] for line in section.splitlines() if line.startswith("| "))
    told = set(re.findall(r"`([a-z_]+)`", cells)) - {"code"}
    used = {code for code, _ in HTTP_ERRORS.values()}
    for path in Path("trioserve").rglob("*.py"):
        given = r'\b(?:code=|code = |default_code: ClassVar\[str\] = |default_code = )"([a-z_]+)"'
        used |= set(re.findall(given, path.read_text()))
    used.discard("invalid")  # between worker and parent
    used.discard("server_error")  # inside a response
    assert told == used
