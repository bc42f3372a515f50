"""Streams that fail or end; names carry ids of field failures."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trioserve.engine.api import TextDelta
from trioserve.errors import RequestFailed
from trioserve.http.render import OpenAIRenderer

from .bodies import BOTH, COMPLETION, is_error
from .client import serving
from .fake_engine import FakeEngine, FakeStream

# -------------------------------------------------------------------------------- API-14


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("n", [1, 2])
async def test_api_14_error_before_the_first_token_has_a_status(
    path: str, body: dict[str, Any], n: int
) -> None:
    engine = FakeEngine(script=lambda stream: stream.fail(RequestFailed("cannot")))
    async with serving(engine) as served:
        answer = await served.call("POST", path, body | {"stream": True, "n": n})
        assert answer.status == 500
        assert answer.json["error"]["message"] == "cannot"


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("error", [RequestFailed("worker died"), RuntimeError("secret detail")])
@pytest.mark.parametrize("n", [1, 2])
async def test_api_14_error_in_mid_stream(
    path: str, body: dict[str, Any], error: Exception, n: int
) -> None:
    def script(stream: FakeStream) -> None:
        stream.say("a", "b")
        stream.fail(error)

    async with serving(FakeEngine(script=script)) as served:
        answer = await served.call("POST", path, body | {"stream": True, "n": n})
        assert answer.status == 200
        assert is_error(answer.events[-1])
        assert "[DONE]" not in answer.events
        assert b"secret" not in answer.body
        finishes = [c["finish_reason"] for e in answer.events[:-1] for c in e["choices"]]
        assert set(finishes) == {None}
        for stream in served.engine.streams:
            await stream.closed.wait()


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_02_a_first_delta_without_text_does_not_end_the_stream(
    path: str, body: dict[str, Any]
) -> None:
    """The first token of an answer may be half a character."""

    def script(stream: FakeStream) -> None:
        stream.push(TextDelta("", [7]))
        stream.say("é", "", finish="stop")

    async with serving(FakeEngine(script=script)) as served:
        # Byte by byte deltas: the first is rendered alone before the response begins.
        answer = await served.call("POST", path, body | {"stream": True})
        choices = [c for e in answer.events if e != "[DONE]" for c in e["choices"]]
        text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
        assert text == "é"
        assert choices[-1]["finish_reason"] == "stop"
        assert answer.events[-1] == "[DONE]"


async def test_api_14_aborted_answer_does_not_look_whole() -> None:
    def script(stream: FakeStream) -> None:
        stream.say("a", "", finish="abort")

    async with serving(FakeEngine(script=script)) as served:
        answer = await served.call("POST", "/v1/completions", COMPLETION | {"stream": True})
        assert is_error(answer.events[-1])
        answer = await served.call("POST", "/v1/completions", COMPLETION)
        assert answer.status == 500


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_14_every_good_stream_ends_with_one_marker(
    path: str, body: dict[str, Any]
) -> None:
    def script(stream: FakeStream) -> None:
        stream.say(*["w"] * (stream.id % 7), "", finish="stop")

    engine = FakeEngine(script=script)
    async with serving(engine) as served:
        client = await served.connect()
        for _ in range(50):
            await client.send("POST", path, body | {"stream": True})
            events = (await client.answer()).events
            assert events.count("[DONE]") == 1
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_tr_2_bug_in_a_handler_is_a_500_with_an_id(caplog: pytest.LogCaptureFixture) -> None:
    def script(stream: FakeStream) -> None:
        raise RuntimeError("secret detail")

    engine = FakeEngine(script=script)
    async with serving(engine) as served:
        for body in (COMPLETION, COMPLETION | {"stream": True}, COMPLETION | {"n": 2}):
            answer = await served.call("POST", "/v1/completions", body, X_Request_Id="abc.1")
            assert answer.status == 500
            assert is_error(answer.json)
            assert b"secret" not in answer.body
            assert answer.headers["x-request-id"] == "abc.1"
        assert any("abc.1" in record.getMessage() for record in caplog.records)
        engine.script = None
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION | {"n": 2, "stream": True})
        streams = await engine.submitted(5)
        streams[-1].fail(RuntimeError("bug in a pump"))
        assert (await client.answer()).status == 500
        for stream in streams[-2:]:
            await stream.closed.wait()
        assert (await served.call("GET", "/version")).status == 200


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("nth", [1, 2])
async def test_api_14_a_bug_in_a_renderer_is_an_error_event(
    path: str,
    body: dict[str, Any],
    nth: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also while the first delta is rendered, whose status is sent already."""
    deltas = []

    def note(self: Any, delta: TextDelta) -> bool:
        deltas.append(delta)
        if len(deltas) == nth:
            raise KeyError("secret")
        return True

    monkeypatch.setattr(OpenAIRenderer, "_shows", note)
    async with serving() as served:
        asked = body | {"stream": True, "return_token_ids": True}
        answer = await served.call("POST", path, asked)
        assert answer.status == 200
        *_, last = answer.events
        assert last["error"]["code"] == "internal_error"
        assert b"secret" not in answer.body
        with trio.fail_after(1):
            await served.engine.streams[0].closed.wait()
    assert "secret" in caplog.text
