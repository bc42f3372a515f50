"""/v1/messages as the official client and raw bytes see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anthropic
import pytest
import trio
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from trioserve.config.schema import SchedulerConfig
from trioserve.engine.api import TextDelta, Usage
from trioserve.errors import QueueFull, RequestFailed

from .client import Served, serving
from .fake_engine import FakeEngine, FakeStream
from .protocols import named_events

T = TypeVar("T")
PATH = "/v1/messages"
USER: Any = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 100, "messages": USER}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


async def with_client(served: Served, use: Callable[[anthropic.Anthropic], T]) -> T:
    def run() -> T:
        base_url = f"http://127.0.0.1:{served.port}"
        with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as client:
            return use(client)

    return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


async def made(served: Served, **fields: Any) -> dict[str, Any]:
    answer = await served.call("POST", PATH, ASKED | fields)
    assert answer.status == 200, answer.body
    message: dict[str, Any] = answer.json
    Message.model_validate(message, strict=True)
    return message


# ------------------------------------------------------------------------------ the object


async def test_whole_message_has_the_official_shape() -> None:
    async with serving() as served:
        answer = await served.call("POST", PATH, ASKED, X_Request_Id="r1")
        assert answer.json == {
            "id": "msg_r1",
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [{"type": "text", "text": "Hello world"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 2,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 2,
            },
        }
        assert answer.headers["request-id"] == "r1"


@pytest.mark.parametrize(
    ("delta", "reason", "sequence"),
    [
        (TextDelta("a", [1], finish_reason="stop"), "end_turn", None),
        (TextDelta("a", [1], finish_reason="stop", stop_reason=5), "end_turn", None),
        (TextDelta("a", [1], finish_reason="length"), "max_tokens", None),
        (TextDelta("a", [1], finish_reason="stop", stop_reason="END"), "stop_sequence", "END"),
    ],
)
async def test_why_it_ended(delta: TextDelta, reason: str, sequence: str | None) -> None:
    async with serving(FakeEngine(script=lambda work: work.push(delta))) as served:
        message = await made(served)
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        events = named_events((await served.call("POST", PATH, ASKED | {"stream": True})).body)
        assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_what_was_cached_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "usage", property(lambda self: Usage(50, 7, 32)))
    async with serving() as served:
        usage = {
            "input_tokens": 18,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 32,
            "output_tokens": 7,
        }
        assert (await made(served))["usage"] == usage
        events = named_events((await served.call("POST", PATH, ASKED | {"stream": True})).body)
        assert events[0]["message"]["usage"] == usage
        assert events[-2]["usage"] == usage


# ------------------------------------------------------------------------------ the prompt


@pytest.mark.parametrize(
    ("fields", "rendered", "prefill"),
    [
        ({"system": "be brief"}, [("system", "be brief"), ("user", "hi")], False),
        (
            {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            [("system", "a\nb"), ("user", "hi")],
            False,
        ),
        ({"system": ""}, [("user", "hi")], False),
        (
            {"messages": [*USER, {"role": "assistant", "content": "The answer is ("}]},
            [("user", "hi"), ("assistant", "The answer is (")],
            True,
        ),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, [("user", "hi")], False),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "text", "text": "ho"}]}]},
            [("user", "hi\n\nho")],
            False,
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
                        ],
                    }
                ]
            },
            [("user", "x")],
            False,
        ),
    ],
)
async def test_what_the_template_is_given(
    fields: dict[str, Any], rendered: list[tuple[str, str]], prefill: bool
) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        await made(served, **fields)
        given = [(message["role"], message["content"]) for message in engine.rendered[0]]
        assert given == rendered
        assert engine.rendering["continue_final_message"] is prefill
        assert engine.rendering["add_generation_prompt"] is not prefill
        counted = await served.call("POST", f"{PATH}/count_tokens", _countable(ASKED | fields))
        assert counted.json == {"input_tokens": sum(len(text) for _, text in rendered)}
        MessageTokensCount.model_validate(counted.json, strict=True)
        assert engine.rendered[1] == engine.rendered[0]
        assert "x-trioserve-ignored-fields" not in counted.headers


def _countable(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "max_tokens"}


async def test_sampling_fields_arrive() -> None:
    engine = FakeEngine()
    async with serving(engine, scheduler=SchedulerConfig(policy="priority")) as served:
        await made(
            served,
            temperature=0.25,
            top_p=0.5,
            top_k=7,
            stop_sequences=["END", "STOP"],
            seed=3,
            metadata={"user_id": "u"},
            service_tier="standard_only",
            thinking={"type": "disabled"},
            tools=[],
            tool_choice={"type": "auto"},
            cache_salt="salt",
            priority=2,
        )
        sampling = engine.streams[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
        assert sampling.stop == ("END", "STOP")
        assert (sampling.seed, sampling.max_tokens) == (3, 100)
        assert engine.streams[0].extra == {"cache_salt": "salt", "priority": 2}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_result"),
        ({"system": 1}, "system"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"tools": [{"name": "x", "input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"effort": "low"}}, "output_config"),
        ({"container": "c"}, "container"),
        ({"stop_sequences": "x" * 2000}, "stop"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"stop": "x"}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_api_10_faults_are_named(fields: dict[str, Any], path: str) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        answer = await served.call("POST", PATH, ASKED | fields)
        assert answer.status == 400
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert path in answer.json["error"]["message"]
        assert answer.json["request_id"] == answer.headers["request-id"]
        assert engine.streams == []
        assert (await made(served))["type"] == "message"


# --------------------------------------------------------------------------------- streams


async def test_events_come_in_the_official_order() -> None:
    async with serving() as served:
        answer = await served.call("POST", PATH, ASKED | {"stream": True}, X_Request_Id="r2")
        events = named_events(answer.body)
        assert [event["type"] for event in events] == [
            "message_start",
            "content_block_start",
            "ping",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        for event in events:
            if event["type"] != "ping":
                EVENT.validate_python(event, strict=True)
        start = events[0]["message"]
        assert (start["id"], start["content"], start["stop_reason"]) == ("msg_r2", [], None)
        assert events[-2]["usage"]["output_tokens"] == 2
        assert answer.headers["request-id"] == "r2"
        assert b"[DONE]" not in answer.body


async def test_official_client_creates_streams_and_counts() -> None:
    def use(client: anthropic.Anthropic) -> tuple[Any, Any, str, Any]:
        whole = client.messages.create(**ASKED)
        with client.messages.stream(**ASKED) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        count = client.messages.count_tokens(model="fake", messages=USER)
        return whole, final, text, count

    async with serving() as served:
        whole, final, text, count = await with_client(served, use)
        assert whole.content[0].text == text == final.content[0].text == "Hello world"
        assert whole.stop_reason == final.stop_reason == "end_turn"
        assert whole.usage == final.usage
        assert whole._request_id == whole.id.removeprefix("msg_")
        assert count.input_tokens == 2


async def test_errors_are_the_clients_own_classes() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:

        async def fails(kind: type[anthropic.APIStatusError], **fields: Any) -> Any:
            def use(client: anthropic.Anthropic) -> Any:
                with pytest.raises(kind) as caught:
                    client.messages.create(**ASKED, extra_body=fields)
                return caught.value

            return await with_client(served, use)

        missing = await fails(anthropic.NotFoundError, model="claude")
        assert missing.type == "not_found_error"
        assert missing.request_id
        too_hot = await fails(anthropic.BadRequestError, temperature=-1)
        assert too_hot.type == "invalid_request_error"
        engine.refuse = QueueFull("full")
        full = await fails(anthropic.RateLimitError)
        assert full.response.headers["retry-after"] == "1"


async def test_error_in_a_stream_is_raised() -> None:
    def script(stream: FakeStream) -> None:
        stream.say("a")
        stream.fail(RequestFailed("the worker died"))

    def use(client: anthropic.Anthropic) -> None:
        with (
            client.messages.stream(**ASKED) as stream,
            pytest.raises(anthropic.APIStatusError, match="the worker died") as caught,
        ):
            stream.get_final_message()
        assert caught.value.type == "api_error"

    async with serving(FakeEngine(script=script)) as served:
        await with_client(served, use)


# ---------------------------------------------------------------------------------- errors


async def test_every_error_has_anthropics_shape() -> None:
    async with serving(max_body_bytes=1000) as served:
        large = ASKED | {"system": "x" * 2000}
        for status, kind, call in (
            (404, "not_found_error", ("POST", f"{PATH}/batches", ASKED)),
            (405, "invalid_request_error", ("GET", PATH)),
            (413, "request_too_large", ("POST", PATH, large)),
            (400, "invalid_request_error", ("POST", PATH, b"{")),
            (400, "invalid_request_error", ("POST", f"{PATH}/count_tokens", {})),
        ):
            answer = await served.call(*call)
            assert answer.status == status
            assert set(answer.json) == {"type", "error", "request_id"}
            assert answer.json["type"] == "error"
            assert set(answer.json["error"]) == {"type", "message"}
            assert answer.json["error"]["type"] == kind
            assert answer.json["request_id"] == answer.headers["x-request-id"]
        other = await served.call("POST", PATH, b"x", Content_Type="text/plain")
        assert (other.status, other.json["error"]["type"]) == (415, "invalid_request_error")
        elsewhere = await served.call("GET", "/v1/messagesx")
        assert "type" not in elsewhere.json


async def test_a_key_is_asked_for_in_anthropics_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(client: anthropic.Anthropic) -> str:
        message = client.messages.create(**ASKED)
        return message.content[0].text  # type: ignore[union-attr]

    async with serving(api_keys=("none",)) as served:
        answer = await served.call("POST", PATH, ASKED)
        assert answer.status == 401
        assert answer.json["error"]["type"] == "authentication_error"
        assert await with_client(served, use) == "Hello world"
