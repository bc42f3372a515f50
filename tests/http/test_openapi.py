"""/openapi.json says what the code does: routes, fields, answers, events, errors."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
from jsonschema import Draft202012Validator

from trioserve.config.schema import Config
from trioserve.engine.api import Phase
from trioserve.errors import QueueFull, RequestFailed
from trioserve.http import refused
from trioserve.http.app import make_app
from trioserve.http.errors import InvalidBody
from trioserve.http.fields import Fields
from trioserve.http.messages import schema as messages
from trioserve.http.openapi.document import MODULES, PATHS, path_of
from trioserve.http.responses import schema as responses
from trioserve.http.routes.tokenization import parse_detokenize, parse_tokenize
from trioserve.http.sampling_fields import Rules
from trioserve.http.schema import parse_chat, parse_completion

from .client import serving
from .fake_engine import FakeEngine, FakeStream
from .openapi_checks import EVERYTHING, check_answer, document_of, events_of, everything_on

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
COMPLETION: dict[str, Any] = {"prompt": "a"}
CHAT: dict[str, Any] = {"messages": USER}
SHOW = {"return_token_ids": True, "include_timings": True, "return_tokens_as_token_ids": True}


def registered(config: Config) -> set[tuple[str, str]]:
    app = make_app(FakeEngine(), config, trio.Event())
    return {
        (path_of(rule.rule), method.lower())
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or ())
        if method not in ("HEAD", "OPTIONS")
    }


async def test_every_route_is_described_and_every_description_has_its_route() -> None:
    described = {(path, method) for path, methods in PATHS.items() for method in methods}
    assert registered(everything_on()) == described


async def test_only_what_is_registered_is_told() -> None:
    async with serving() as served:
        document = await document_of(served)
    told = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert told == registered(Config())


async def test_document_is_well_formed() -> None:
    async with serving() as served:
        document = await document_of(served)
    assert document["openapi"].startswith("3.1.")
    names = [op["operationId"] for ops in document["paths"].values() for op in ops.values()]
    assert len(set(names)) == len(names)
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        Draft202012Validator.check_schema(schema)
        assert re.fullmatch(r"[A-Z][A-Za-z]*", name)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == set(schemas)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            given = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert given == set(re.findall(r"\{(\w+)\}", path))
            assert all("description" in answer for answer in operation["responses"].values())


def test_no_name_is_described_twice() -> None:
    for names in (
        [path for module in MODULES for path in module.PATHS],
        [name for module in MODULES for name in module.schemas(Rules())],
    ):
        assert len(set(names)) == len(names)


async def test_limits_are_the_operators() -> None:
    async with serving(max_n=3, max_logprobs=4, max_stop_strings=5) as served:
        schemas = (await document_of(served))["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["n"]["maximum"] == fields["best_of"]["maximum"] == 3
    assert fields["logprobs"]["maximum"] == fields["prompt_logprobs"]["maximum"] == 4
    assert fields["stop"]["anyOf"][1]["maxItems"] == 5


async def test_keys_are_told_where_they_are_asked_for() -> None:
    async with serving(api_keys=("k" * 32,), open_routes=("/openapi.json",)) as served:
        document = await document_of(served)
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = path in ("/health", "/health/live", "/health/ready", "/ping", "/openapi.json")
            assert ("security" in operation) == (not is_open)
            assert ("401" in operation["responses"]) == (not is_open)


# ------------------------------------------------------------------------ fields of bodies


def documented(document: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields, through references and choices but not into arrays."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from documented(document, document["components"]["schemas"][name], prefix)
    for choice in schema.get("anyOf", ()):
        yield from documented(document, choice, prefix)
    for name, field in schema.get("properties", {}).items():
        yield prefix + name
        yield from documented(document, field, f"{prefix}{name}.")


class Watched(dict[str, Any]):
    """An object of a body that notes which fields it is asked for."""

    def __init__(self, body: dict[str, Any], path: str, asked: set[str]) -> None:
        super().__init__(body)
        self._path, self._asked = path, asked

    def __contains__(self, name: object) -> bool:
        self._asked.add(re.sub(r"\[\d+\]", "", f"{self._path}{name}"))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401


def fields_read(parse: Callable[[bytes], Any], body: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Names of the fields a parser asked for, and those it left."""
    asked: set[str] = set()
    make = Fields.__init__

    def watched(self: Fields, body: dict[str, Any], path: str = "", *more: Any) -> None:
        make(self, Watched(body, path and f"{path}.", asked), path, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fields, "__init__", watched)
        left = list(parse(json.dumps(body).encode()).ignored)
    return asked, left


BODIES: dict[str, tuple[Callable[[bytes], Any], list[dict[str, Any]]]] = {
    "/v1/completions": (
        parse_completion,
        [COMPLETION | {"stream": True, "stream_options": {"include_usage": True}}],
    ),
    "/v1/chat/completions": (
        parse_chat,
        [CHAT | {"stream": True, "stream_options": {"include_usage": True}}],
    ),
    "/v1/responses": (
        responses.parse_responses,
        [
            {
                "input": "a",
                "stream": True,
                "stream_options": {},
                "reasoning": {},
                "text": {"format": {"type": "text"}},
            }
        ],
    ),
    "/v1/messages": (messages.parse_messages, [CHAT | {"model": "fake", "max_tokens": 1}]),
    "/v1/messages/count_tokens": (messages.parse_count, [CHAT | {"model": "fake"}]),
    "/tokenize": (parse_tokenize, [COMPLETION, CHAT]),
    "/detokenize": (parse_detokenize, [{"tokens": [1]}]),
}


@pytest.mark.parametrize("path", BODIES)
async def test_api_15_fields_of_bodies_are_those_that_are_read(path: str) -> None:
    async with serving() as served:
        document = await document_of(served)
    media = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    described = set(documented(document, media["schema"]))
    parse, bodies = BODIES[path]
    outer = {name for name in described if "." not in name}
    read: set[str] = set()
    lefts: list[set[str]] = []
    for body in bodies:
        fields, left = fields_read(parse, dict.fromkeys(outer) | body)
        read |= fields
        lefts.append(set(left))
    assert set.intersection(*lefts) == set(), "described, but not read"
    assert {name for name in read if "." not in name} == outer
    free = ("messages.", "metadata.", "logit_bias.")
    inner = {name for name in read if "." in name and not name.startswith(free)}
    objects = {name.partition(".")[0] for name in inner}
    assert inner == {name for name in described - outer if name.partition(".")[0] in objects}


async def test_api_15_fields_that_are_refused_or_ignored_are_described() -> None:
    async with serving() as served:
        schemas = (await document_of(served))["components"]["schemas"]
    for name, tables in (
        ("CompletionRequest", (refused.COMPLETION_NEUTRAL,)),
        ("ChatRequest", (refused.CHAT_NEUTRAL,)),
        ("ResponsesRequest", (responses.NEUTRAL, responses.WITHOUT_EFFECT)),
        ("MessagesRequest", (messages.NEUTRAL, messages.WITHOUT_EFFECT)),
        ("CountRequest", (messages.COUNT_NEUTRAL, messages.WITHOUT_EFFECT)),
    ):
        known = schemas[name]["properties"].keys()
        for table in (refused.SHARED_NEUTRAL, refused.WITHOUT_EFFECT, *tables):
            assert set(table) - known == set()


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 7, -1, "", "x", "auto", "default", "none", "medium", "standard"),
    *("in_memory", [], [7], ["text"], {}, {"x": 7}, {"type": None}, {"type": "x"}),
    *({"type": "text"}, {"type": "disabled"}, {"type": "auto"}, {"type": "none"}),
]
"""What a field may be that is not supported, and much that others may not be."""

DEPENDENT = ("stream", "prompt_logprobs", "best_of", "top_logprobs", "min_tokens", "max_tokens")
"""Fields of which some values need others beside them: so much is told in words alone."""


def edges(field: dict[str, Any]) -> Iterator[Any]:
    """What just fits a field, and what just does not."""
    for name, step in (("minimum", -1), ("maximum", 1)):
        if abs(field.get(name, 2**63)) < 2**62:
            yield from (field[name], field[name] + step)
    if (most := field.get("maxItems", 5000)) < 5000:
        item = 1 if field["items"].get("type") == "integer" else "x"
        yield from ([item] * most, [item] * (most + 1))
    if (most := field.get("maxLength")) is not None:
        yield from ("x" * most, "x" * (most + 1))
    for choice in field.get("anyOf", ()):
        yield from edges(choice)


@pytest.mark.parametrize("trusting", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_api_15_what_the_document_says_of_a_field_is_so(path: str, trusting: bool) -> None:
    http = {"trust_request_chat_template": trusting, "max_n": 3, "max_stop_strings": 2}
    async with serving(**http) as served:
        document = await document_of(served)
    rules = Rules(trust_chat_template=trusting, max_n=3, max_stop_strings=2)
    parse, bodies = BODIES[path]
    if "rules" in inspect.signature(parse).parameters:
        parse = functools.partial(parse, rules=rules)  # type: ignore[call-arg]
    media = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][media["schema"]["$ref"].rpartition("/")[2]]
    for form, body in zip(schema.get("anyOf", [schema]), bodies, strict=True):
        for name, field in form["properties"].items():
            whole = {"allOf": [field], "components": document["components"]}
            says = Draft202012Validator(whole).is_valid
            for value in (*VALUES, *edges(field)):
                taken = is_taken(parse, body | {name: value})
                if name not in DEPENDENT or not says(value):
                    assert taken == says(value), (name, value)


def is_taken(parse: Callable[[bytes], Any], body: dict[str, Any]) -> bool:
    try:
        parse(json.dumps(body).encode())
    except InvalidBody:
        return False
    return True


# ------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("strict", [False, True])
async def test_whole_answers(strict: bool) -> None:
    async with serving(strict_fields=strict) as served:
        document = await document_of(served)
        for path, fields in (
            ("/v1/completions", COMPLETION),
            ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 2}),
            ("/v1/completions", COMPLETION | {"echo": True, "max_tokens": 3}),
            ("/v1/completions", COMPLETION | {"echo": True, "max_tokens": 0, "logprobs": 1}),
            ("/v1/completions", COMPLETION | SHOW | {"prompt_logprobs": 2}),
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", CHAT | SHOW | {"prompt_logprobs": 1}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/responses", {"input": USER, "metadata": {"a": "b"}, "top_logprobs": 2}),
            ("/v1/responses", {"input": "a", "background": True}),
            ("/v1/messages", CHAT | {"model": "fake", "max_tokens": 3}),
            ("/v1/messages/count_tokens", CHAT | {"model": "fake"}),
            ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2}),
            ("/tokenize", COMPLETION),
            ("/tokenize", CHAT | {"return_token_strs": True}),
            ("/detokenize", {"tokens": [104, 105]}),
        ):
            answer = await served.call("POST", path, fields)
            assert answer.status == 200, answer.body
            assert "x-trioserve-ignored-fields" not in answer.headers
            check_answer(document, "POST", path, answer)


async def test_api_15_unknown_fields_are_refused_where_the_document_says_so() -> None:
    async with serving(strict_fields=True) as served:
        document = await document_of(served)
        for path in BODIES:
            media = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            name = media["schema"]["$ref"].rpartition("/")[2]
            schema = document["components"]["schemas"][name]
            forms = schema.get("anyOf", [schema])
            assert all(form["additionalProperties"] is False for form in forms)
            body = BODIES[path][1][0] | {"colour": "red"}
            answer = await served.call("POST", path, body)
            assert answer.status == 400
            assert "colour" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"continuous_usage_stats": True}]
)
async def test_streamed_answers(options: Any) -> None:
    async with serving() as served:
        document = await document_of(served)
        for path, fields in (
            ("/v1/completions", COMPLETION | {"n": 2, "logprobs": 2}),
            ("/v1/completions", COMPLETION | {"echo": True}),
            ("/v1/completions", COMPLETION | SHOW | {"echo": True}),
            ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 1}),
            ("/v1/chat/completions", CHAT | SHOW),
            ("/v1/chat/completions", CHAT),
        ):
            fields = fields | {"stream": True, "stream_options": options}
            answer = await served.call("POST", path, fields)
            assert answer.status == 200, answer.body
            assert answer.body.endswith(b"data: [DONE]\n\n")
            check_answer(document, "POST", path, answer)


async def test_streams_of_other_apis() -> None:
    async with serving() as served:
        document = await document_of(served)
        for path, fields in (
            ("/v1/responses", {"input": "a"}),
            ("/v1/responses", {"input": "a", "max_output_tokens": 2, "top_logprobs": 1}),
            ("/v1/responses", {"input": "a", "background": True}),
            ("/v1/messages", CHAT | {"model": "fake", "max_tokens": 3}),
        ):
            answer = await served.call("POST", path, fields | {"stream": True})
            assert answer.status == 200, answer.body
            check_answer(document, "POST", path, answer)


async def test_stored_responses() -> None:
    async with serving() as served:
        document = await document_of(served)
        made = await served.call("POST", "/v1/responses", {"input": USER})
        one = f"/v1/responses/{made.json['id']}"

        async def check(method: str, path: str, status: int = 200) -> None:
            answer = await served.call(method, path)
            assert answer.status == status
            check_answer(document, method, path, answer)

        await check("GET", one)
        await check("GET", f"{one}/input_items")
        await check("GET", f"{one}/input_items?limit=1&order=asc")
        await check("GET", f"{one}/input_items?limit=0", 400)
        await check("GET", f"{one}?stream=true", 400)
        await check("POST", f"{one}/cancel", 400)
        await check("DELETE", one)
        for method, path in (("GET", one), ("DELETE", one), ("POST", f"{one}/cancel")):
            await check(method, path, 404)


@pytest.mark.parametrize("phase", list(Phase))
async def test_everything_that_can_be_asked_for(phase: Phase) -> None:
    engine = FakeEngine(phase=phase)
    engine.cause = "the worker died" if phase is Phase.FAILED else None
    async with serving(engine) as served:
        document = await document_of(served)
        for path, operations in document["paths"].items():
            if "get" in operations:
                asked = path.replace("{name}", "fake")
                check_answer(document, "GET", asked, await served.call("GET", asked))


async def test_draining() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        document = await document_of(served)
        running = await served.connect()
        await running.send("POST", "/v1/completions", COMPLETION | {"stream": True})
        await engine.submitted()
        served.stopping.set()
        answer = await served.call("GET", "/health/ready")
        check_answer(document, "GET", "/health/ready", answer)
        assert answer.json["status"] == "draining"
        assert answer.json["stage"] is None
        assert answer.json["open_requests"] == 1
        load = await served.call("GET", "/load")
        assert load.json == {"server_load": 1}
        engine.streams[0].say("a", finish="stop")
        await running.answer()


async def test_control_routes() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, **EVERYTHING) as served:
        document = await document_of(served)

        async def check(method: str, path: str, status: int = 200) -> None:
            answer = await served.call(method, path)
            assert answer.status == status
            check_answer(document, method, path, answer)

        running = await served.connect()
        await running.send("POST", "/v1/completions", COMPLETION, X_Request_Id="one")
        await engine.submitted()
        await check("GET", "/v1/requests?limit=1")
        await check("GET", "/v1/requests?limit=0", 400)
        await check("GET", "/v1/requests/one")
        await check("GET", "/v1/requests/two", 404)
        for name in ("pause", "resume", "reset_prefix_cache"):
            await check("POST", f"/admin/{name}")
        await check("DELETE", "/v1/requests/one")
        await check("DELETE", "/v1/requests/two", 404)
        await running.answer()
        engine.phase = Phase.RESTARTING
        await check("POST", "/admin/pause", 503)
        await check("POST", "/admin/drain")


async def test_errors() -> None:
    def script(stream: FakeStream) -> None:
        stream.fail(RequestFailed("the worker died"))

    engine = FakeEngine(script=script)
    async with serving(engine, max_body_bytes=1000) as served:
        document = await document_of(served)

        async def check(status: int, path: str, body: Any, **headers: str) -> None:
            answer = await served.call("POST", path, body, **headers)
            assert answer.status == status
            check_answer(document, "POST", path, answer)
            assert answer.json["error"]["message"]

        for path, body in (
            ("/v1/completions", COMPLETION),
            ("/v1/chat/completions", CHAT),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", CHAT | {"model": "fake", "max_tokens": 3}),
            ("/tokenize", COMPLETION),
            ("/detokenize", {"tokens": [1]}),
        ):
            await check(400, path, body | {"model": 1})
            await check(400, path, b"{")
            await check(404, path, body | {"model": "gpt-5"})
            await check(413, path, b" " * 2000)
            await check(415, path, body, Content_Type="text/plain")
            engine.phase = Phase.LOADING
            await check(503, path, body)
            engine.phase = Phase.READY
            if path.startswith("/v1"):
                await check(500, path, body)
                engine.refuse = QueueFull("full")
                await check(429, path, body)
                engine.refuse = None


async def test_failed_streams() -> None:
    def script(stream: FakeStream) -> None:
        stream.say("a")
        stream.fail(RequestFailed("the worker died"))

    async with serving(FakeEngine(script=script)) as served:
        document = await document_of(served)
        for path, body in (
            ("/v1/completions", COMPLETION),
            ("/v1/chat/completions", CHAT),
            ("/v1/messages", CHAT | {"model": "fake", "max_tokens": 3}),
            ("/v1/responses", {"input": "a"}),
        ):
            answer = await served.call("POST", path, body | {"stream": True})
            last = events_of(answer)[-1]
            error = last["response"]["error"] if "response" in last else last["error"]
            assert error["message"] == "the worker died"
            check_answer(document, "POST", path, answer)
