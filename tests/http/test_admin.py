"""Control routes: there only when switched on; requests seen and ended; the server drained."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trioserve.engine.api import TextDelta
from trioserve.http.app import make_app
from trioserve.http.routes import admin

from .client import Client, Served, serving
from .fake_engine import FakeEngine, FakeStream, answer_hello

COMPLETION = {"prompt": "hi", "max_tokens": 100}
STREAM = COMPLETION | {"stream": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
KEY = "sk-0123456789"


async def ask(served: Served, path: str, body: Any, **headers: str) -> tuple[Client, FakeStream]:
    """A request that the engine has taken."""
    num = len(served.engine.streams)
    client = await served.connect()
    await client.send("POST", path, body, **headers)
    return client, (await served.engine.submitted(num + 1))[num]


async def test_off_unless_switched_on() -> None:
    async with serving() as served:
        for route in admin.ROUTES:
            path = route.replace("<id>", "x")
            for method in ("GET", "POST", "DELETE"):
                assert (await served.call(method, path)).status == 404, (method, path)
        assert not served.stopping.is_set()


def test_routes_are_those_registered() -> None:
    from .openapi_checks import everything_on

    async def templates() -> list[str]:
        app = make_app(FakeEngine(), everything_on(), trio.Event())
        return sorted({rule.rule for rule in app.url_map.iter_rules()})

    found = trio.run(templates)
    assert [path for path in found if "admin" in path or "requests" in path] == admin.ROUTES


# ------------------------------------------------------------------------------ requests


async def test_request_from_queued_to_its_end() -> None:
    async with serving(FakeEngine(script=None), admin=True) as served:
        client, stream = await ask(served, "/v1/completions", STREAM, X_Request_Id="mine:1")
        found = (await served.call("GET", "/v1/requests/mine:1")).json
        assert found.pop("seconds") >= 0
        assert found == {
            "id": "mine:1",
            "object": "request",
            "status": "queued",
            "answers": 1,
            "completion_tokens": 0,
        }
        stream.push(TextDelta("Hello", [7, 8]))
        await client.head()
        await client.event()
        found = (await served.call("GET", "/v1/requests/mine:1")).json
        assert (found["status"], found["completion_tokens"]) == ("running", 2)
        stream.say("!", finish="stop")
        while await client.chunk():
            pass
        answer = await served.call("GET", "/v1/requests/mine:1")
        assert (answer.status, answer.json["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/completions", STREAM, "cmpl-"),
        ("/v1/chat/completions", CHAT, "chatcmpl-"),
        ("/v1/responses", {"input": "hi", "stream": True}, "resp_"),
        (
            "/v1/messages",
            {"messages": CHAT["messages"], "max_tokens": 9, "model": "fake", "stream": True},
            "msg_",
        ),
    ],
)
async def test_requests_are_found_by_the_ids_of_their_answers(
    path: str, body: dict[str, Any], prefix: str
) -> None:
    async with serving(FakeEngine(script=None), admin=True) as served:
        client, stream = await ask(served, path, body)
        stream.push(TextDelta("Hello", [7]))
        head = await client.head()
        text = await client.chunk()
        answer_id = next(
            word.decode() for word in text.split(b'"') if word.startswith(prefix.encode())
        )
        for id in (answer_id, answer_id.removeprefix(prefix), head.headers["x-request-id"]):
            found = await served.call("GET", f"/v1/requests/{id}")
            assert found.json["id"] == head.headers["x-request-id"]
        assert (await served.call("DELETE", f"/v1/requests/{answer_id}")).status == 200
        assert b"aborted" in await client.chunk()
        assert stream.aborted


@pytest.mark.parametrize("body", [COMPLETION, COMPLETION | {"n": 3}, STREAM])
async def test_abort_before_the_first_token(body: dict[str, Any]) -> None:
    async with serving(FakeEngine(script=None), admin=True) as served:
        client, _ = await ask(served, "/v1/completions", body, X_Request_Id="a")
        await served.engine.submitted(body.get("n", 1))
        answer = await served.call("DELETE", "/v1/requests/a")
        assert answer.json == {"id": "a", "object": "request", "status": "aborted"}
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["code"]) == (409, "aborted")
        assert answer.headers["x-should-retry"] == "false"
        assert all(stream.aborted for stream in served.engine.streams)
        assert (await served.call("DELETE", "/v1/requests/a")).status == 404


async def test_abort_within_a_stream_is_an_event_that_says_so() -> None:
    async with serving(FakeEngine(script=None), admin=True) as served:
        client, stream = await ask(served, "/v1/completions", STREAM, X_Request_Id="a")
        other, still = await ask(served, "/v1/completions", STREAM, X_Request_Id="b")
        stream.push(TextDelta("Hello", [7]))
        await client.head()
        await client.event()
        assert (await served.call("DELETE", "/v1/requests/cmpl-a")).status == 200
        event = await client.event()
        assert event["error"]["code"] == "aborted"
        assert "operator" in event["error"]["message"]
        assert await client.chunk() == b""  # the end, without [DONE]
        assert stream.aborted
        answer_hello(still)  # another's request is untouched
        assert (await other.answer()).events[-1] == "[DONE]"


async def test_abort_while_the_prompt_is_tokenized() -> None:
    engine = FakeEngine()
    engine.encoding = trio.Event()
    async with serving(engine, admin=True) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION, X_Request_Id="a")
        await engine.encoding.wait()
        found = (await served.call("GET", "/v1/requests/a")).json
        assert (found["status"], found["answers"]) == ("queued", 0)
        assert (await served.call("DELETE", "/v1/requests/a")).status == 200
        assert (await client.answer()).status == 409
        assert engine.streams == []


async def test_one_id_for_several_requests() -> None:
    async with serving(FakeEngine(script=None), admin=True) as served:
        clients = [
            (await ask(served, "/v1/completions", STREAM, X_Request_Id="a"))[0] for _ in range(3)
        ]
        assert (await served.call("DELETE", "/v1/requests/a")).status == 200
        for client in clients:
            assert (await client.answer()).status == 409


async def test_an_id_may_look_like_that_of_an_answer() -> None:
    async with serving(FakeEngine(script=None), admin=True) as served:
        await ask(served, "/v1/completions", STREAM, X_Request_Id="x")
        await ask(served, "/v1/completions", STREAM, X_Request_Id="cmpl-x")
        for id in ("x", "cmpl-x"):
            assert (await served.call("GET", f"/v1/requests/{id}")).json["id"] == id


async def test_list_is_bounded_and_the_oldest_comes_first() -> None:
    async with serving(FakeEngine(script=None), admin=True) as served:
        assert (await served.call("GET", "/v1/requests")).json == {
            "object": "list",
            "data": [],
            "total": 0,
        }
        for number in range(5):
            await ask(served, "/v1/completions", STREAM, X_Request_Id=str(number))
        found = (await served.call("GET", "/v1/requests?limit=3")).json
        assert [request["id"] for request in found["data"]] == ["0", "1", "2"]
        assert found["total"] == 5


@pytest.mark.parametrize(
    "limit",
    ["0", "-1", "1001", "x", "", "1.5", "9" * 5000, "%D9%A3", "0" * 8 + "10" * 5, "0" * 5000 + "1"],
)
async def test_list_with_a_bad_limit(limit: str) -> None:
    async with serving(admin=True) as served:
        answer = await served.call("GET", f"/v1/requests?limit={limit}")
        assert (answer.status, answer.json["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("id", ["x" * 4000, "%00", "%0a%1b[2J", "%F0%9F%98%80", "a%2fb", ".."])
async def test_strange_ids(id: str) -> None:
    async with serving(admin=True) as served:
        answer = await served.call("DELETE", f"/v1/requests/{id}")
        assert answer.status == 404
        assert answer.json["error"]["code"] in ("request_not_found", "route_not_found")


# -------------------------------------------------------------------------------- server


async def test_drain_is_the_first_signals() -> None:
    async with serving(FakeEngine(script=None), admin=True) as served:
        client, stream = await ask(served, "/v1/completions", STREAM)
        for _ in range(2):
            answer = await served.call("POST", "/admin/drain")
            assert answer.json == {"status": "draining", "open_requests": 1}
        assert served.stopping.is_set()
        assert (await served.call("POST", "/v1/completions", COMPLETION)).status == 503
        assert not served.done.is_set()
        answer_hello(stream)
        assert (await client.answer()).events[-1] == "[DONE]"
        with trio.fail_after(5):
            await served.done.wait()
        assert served.reports[0].num_cut == 0


async def test_pause_and_resume() -> None:
    async with serving(admin=True) as served:
        assert (await served.call("POST", "/admin/pause")).json == {"paused": True}
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION)
        [stream] = await served.engine.submitted()
        assert not stream.started
        assert (await served.call("POST", "/admin/resume")).json == {"paused": False}
        assert (await client.answer()).json["choices"][0]["text"] == "Hello world"
        assert served.engine.controls == ["pause", "resume"]


@pytest.mark.parametrize("free", [True, False])
async def test_reset_of_the_prefix_cache(free: bool) -> None:
    async with serving(admin=True) as served:
        served.engine.cache_is_free = free
        answer = await served.call("POST", "/admin/reset_prefix_cache")
        assert answer.json == {"success": free}
        assert served.engine.controls == ["reset_prefix_cache"]


@pytest.mark.parametrize("action", ["pause", "resume", "reset_prefix_cache"])
async def test_control_while_not_ready_is_503(action: str) -> None:
    from trioserve.engine.api import Phase

    async with serving(FakeEngine(phase=Phase.LOADING), admin=True) as served:
        answer = await served.call("POST", f"/admin/{action}")
        assert answer.status == 503
        assert answer.headers["retry-after"]


async def test_control_takes_post_alone_and_no_page_of_another_origin() -> None:
    async with serving(admin=True) as served:
        for action in ("drain", "pause", "resume", "reset_prefix_cache"):
            assert (await served.call("GET", f"/admin/{action}")).status == 405
            answer = await served.call("POST", f"/admin/{action}", Origin="https://evil.example")
            assert answer.status == 403
        answer = await served.call("DELETE", "/v1/requests/x", Origin="https://evil.example")
        assert answer.status == 403
        assert served.engine.controls == []
        assert not served.stopping.is_set()


async def test_op_02_control_needs_the_key() -> None:
    async with serving(admin=True, api_keys=(KEY,)) as served:
        assert (await served.call("POST", "/admin/drain")).status == 401
        assert not served.stopping.is_set()
        assert (await served.call("POST", "/admin/pause", x_api_key=KEY)).status == 200
