"""Pages of other origins: off unless set, and only for the origins that are listed."""

from __future__ import annotations

import pytest

from .client import Answer, serving
from .fake_engine import FakeEngine

APP, OTHER = "https://app.example", "https://other.example:8443"
KEY = "sk-0123456789"
COMPLETION = {"prompt": "hi"}


def said(answer: Answer) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.startswith("access-control-")}


def ask(origin: str, headers: str = "authorization, content-type") -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": headers,
    }


async def test_off_unless_set() -> None:
    async with serving() as served:
        for method, path in [("GET", "/v1/models"), ("OPTIONS", "/v1/completions")]:
            answer = await served.call(method, path, **ask(APP))
            assert said(answer) == {}
            assert "vary" not in answer.headers


async def test_options_of_a_route_are_its_methods_and_nothing_else() -> None:
    async with serving() as served:
        for path, methods in [
            ("/v1/completions", {"POST", "OPTIONS"}),
            ("/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ]:
            answer = await served.call("OPTIONS", path)
            assert (answer.status, answer.body) == (200, b"")
            assert set(answer.headers["allow"].split(", ")) == methods
            assert "content-type" not in answer.headers
        assert (await served.call("OPTIONS", "/nowhere")).status == 404


async def test_off_and_with_a_key_a_preflight_learns_nothing() -> None:
    async with serving(api_keys=(KEY,)) as served:
        for path in ("/v1/completions", "/nowhere"):
            answer = await served.call("OPTIONS", path, **ask(APP))
            assert answer.status == 401
            assert said(answer) == {}
            assert "allow" not in answer.headers


async def test_preflight_of_a_listed_origin() -> None:
    async with serving(api_keys=(KEY,), cors_origins=(APP, OTHER)) as served:
        answers = [
            await served.call("OPTIONS", path, **ask(OTHER))
            for path in ("/v1/chat/completions", "/nowhere", "/admin/drain", "/health")
        ]
        for answer in answers:
            assert answer.status == 204
            assert answer.body == b""
            assert said(answer) == {
                "access-control-allow-origin": OTHER,
                "access-control-allow-methods": "GET, HEAD, POST, DELETE, OPTIONS",
                "access-control-allow-headers": "authorization, content-type",
                "access-control-max-age": "600",
            }
            assert "Origin" in answer.headers["vary"]
            assert "allow" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "https://app.example.evil.example",
        "http://app.example",
        "https://app.example:444",
        "https://APP.example",
        "https://app.example/",
        "null",
        "*",
        "",
        "https://app.example https://evil.example",
    ],
)
async def test_only_listed_origins_are_echoed(origin: str) -> None:
    async with serving(api_keys=(KEY,), cors_origins=(APP,)) as served:
        preflight = await served.call("OPTIONS", "/v1/models", **ask(origin))
        assert preflight.status == 401
        answer = await served.call("GET", "/v1/models", Origin=origin, x_api_key=KEY)
        assert answer.status == 200
        assert said(preflight) == said(answer) == {}
        assert answer.headers["vary"] == "Origin"  # or a cache would serve it to the listed ones


async def test_answers_of_every_kind_say_it() -> None:
    async with serving(api_keys=(KEY,), cors_origins=(APP,)) as served:
        for status, path, body, key in [
            (401, "/v1/completions", COMPLETION, "wrong"),
            (404, "/nowhere", COMPLETION, KEY),
            (400, "/v1/completions", {"prompt": 1}, KEY),
            (200, "/v1/completions", COMPLETION, KEY),
            (200, "/v1/completions", COMPLETION | {"stream": True}, KEY),
        ]:
            answer = await served.call("POST", path, body, Origin=APP, x_api_key=key)
            assert answer.status == status
            exposed = answer.headers["access-control-expose-headers"]
            assert {"X-Request-Id", "Retry-After"} <= set(exposed.split(", "))
            assert said(answer)["access-control-allow-origin"] == APP
            assert "access-control-allow-credentials" not in answer.headers


async def test_any_origin() -> None:
    async with serving(cors_origins=("*",)) as served:
        preflight = await served.call("OPTIONS", "/v1/completions", **ask("null"))
        assert preflight.status == 204
        answer = await served.call("POST", "/v1/completions", COMPLETION, Origin="null")
        assert answer.status == 200
        for said_of in (said(preflight), said(answer)):
            assert said_of["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in said_of


async def test_credentials_when_asked_for() -> None:
    async with serving(cors_origins=(APP,), cors_credentials=True) as served:
        answer = await served.call("GET", "/v1/models", Origin=APP)
        assert said(answer)["access-control-allow-credentials"] == "true"
        answer = await served.call("GET", "/v1/models", Origin=OTHER)
        assert said(answer) == {}


async def test_a_listed_origin_may_post_without_a_key_where_none_is_set() -> None:
    async with serving(FakeEngine(), cors_origins=(APP,)) as served:
        answer = await served.call("POST", "/v1/completions", COMPLETION, Origin=APP)
        assert answer.status == 200
        answer = await served.call("POST", "/v1/completions", COMPLETION, Origin=OTHER)
        assert answer.status == 403


@pytest.mark.parametrize(
    "headers", ["", "a b", "x: y", "a,,b", "a" * 3000, "x-ok\u00e9", "a,\x85b"]
)
async def test_header_names_are_echoed_only_if_they_are_names(headers: str) -> None:
    async with serving(cors_origins=(APP,)) as served:
        answer = await served.call("OPTIONS", "/v1/models", **ask(APP, headers))
        assert answer.status == 204
        assert "access-control-allow-headers" not in answer.headers


async def test_options_without_the_question_is_no_preflight() -> None:
    async with serving(api_keys=(KEY,), cors_origins=(APP,)) as served:
        assert (await served.call("OPTIONS", "/v1/models", Origin=APP)).status == 401
