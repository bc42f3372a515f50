"""Streamed and whole answers agree once joined, and no body is too odd for an answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from trioserve.engine.api import TextDelta, TokenLogprob
from trioserve.http.errors import InvalidBody
from trioserve.http.messages.schema import parse_count, parse_messages
from trioserve.http.responses.schema import parse_responses

from .client import Client, serving
from .fake_engine import FakeEngine
from .memory import serving_in_memory
from .protocols import BOTH, named_events

words = st.text(
    st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from('\n\r"\\\u2028\0😀')),
    max_size=6,
)
logprobs = st.floats(allow_nan=False).map(lambda value: -abs(value))


@st.composite
def scripts(draw: st.DrawFn) -> list[TextDelta]:
    """The deltas of one answer; tokens may be without text, and the last too."""
    deltas = []
    for word in draw(st.lists(words, min_size=1, max_size=6)):
        token = TokenLogprob(word, 7, word.encode(), draw(logprobs), [])
        deltas.append(TextDelta(word, [7], [token]))
    finish, reason = draw(
        st.sampled_from([("stop", None), ("stop", "END"), ("stop", 9), ("length", None)])
    )
    deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason=finish, stop_reason=reason)
    return deltas


def joined_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response as a client builds it from the deltas alone."""
    response = dict(events[-1]["response"])
    parts = [event for event in events if event["type"] == "response.output_text.delta"]
    [item] = response["output"]
    [part] = item["content"]
    part = part | {
        "text": "".join(event["delta"] for event in parts),
        "logprobs": [token for event in parts for token in event["logprobs"]],
    }
    return response | {"output": [item | {"content": [part]}]}


def joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client builds it."""
    parts = [event for event in events if event["type"] == "content_block_delta"]
    text = "".join(event["delta"]["text"] for event in parts)
    end = events[-2]
    content = [{"type": "text", "text": text}]
    return events[0]["message"] | {"content": content, "usage": end["usage"]} | end["delta"]


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between any two answers."""
    text = json.dumps(answer)
    for own in (answer["id"], answer["id"].removeprefix("resp_")):
        text = text.replace(own, "ID")
    plain: dict[str, Any] = json.loads(text)
    return {name: value for name, value in plain.items() if not name.endswith("_at")}


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(deltas=scripts())
def test_api_14_streamed_and_whole_answers_agree(deltas: list[TextDelta]) -> None:
    async def compare() -> None:
        engine = FakeEngine(script=lambda work: work.push(*deltas))
        async with serving_in_memory(engine) as served:
            client = served.connect()
            for path, body in BOTH:
                asked = body | ({"top_logprobs": 1} if path == "/v1/responses" else {})
                whole = await _answer(client, path, asked)
                events = named_events(await _body(client, path, asked | {"stream": True}))
                join = joined_response if path == "/v1/responses" else joined_message
                assert comparable(join(events)) == comparable(json.loads(whole))

    trio.run(compare, clock=MockClock(autojump_threshold=0))


async def _answer(client: Client, path: str, body: dict[str, Any]) -> bytes:
    await client.send("POST", path, body)
    answer = await client.answer()
    assert answer.status == 200
    return answer.body


_body = _answer


# ------------------------------------------------------------------------------------ fuzz

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**63, 2**64]))
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
roles = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "image"])}, optional={"text": values}
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles, "content": st.one_of(st.text(max_size=5), st.lists(parts, max_size=3))},
        optional={"type": st.sampled_from(["message", "function_call"])},
    ),
    max_size=3,
)
NAMES = [
    *("stream", "background", "store", "instructions", "previous_response_id"),
    *("truncation", "reasoning", "text", "include", "top_logprobs", "metadata", "tools"),
    *("tool_choice", "max_tool_calls", "max_output_tokens", "stream_options", "user", "stop"),
    *("system", "stop_sequences", "thinking", "temperature", "top_p", "top_k", "seed"),
    *("cache_salt", "priority", "timeout_s", "chat_template_kwargs", "output_config"),
]
bodies = st.fixed_dictionaries(
    {
        "input": st.one_of(st.text(max_size=5), messages, values),
        "messages": st.one_of(messages, values),
        "max_tokens": st.one_of(st.just(5), values),
        "model": st.one_of(st.just("fake"), values),
    },
    optional=dict.fromkeys(NAMES, values),
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(body=bodies)
def test_api_10_fuzz_parsers(body: Any) -> None:
    raw = json.dumps(body).encode(errors="surrogatepass")
    for parse in (parse_responses, parse_messages, parse_count):
        parsed: Any
        try:
            parsed = parse(raw)
        except InvalidBody as error:
            parsed = error
        if isinstance(parsed, InvalidBody):
            assert parsed.message
        elif parse is not parse_count:
            parsed.sampling.validate(2**64)


async def test_api_10_fuzz_server() -> None:
    samples: list[bytes] = []

    @settings(max_examples=40, database=None)
    @given(body=bodies)
    def collect(body: Any) -> None:
        samples.append(json.dumps(body).encode(errors="surrogatepass"))

    collect()
    async with serving() as served:
        client = await served.connect()
        for raw in samples:
            for path in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
                await client.send("POST", path, raw)
                answer = await client.answer()
                assert answer.status in (200, 400, 404), raw
                if answer.status != 200:
                    assert answer.json["error"]["message"]
        for path, body in BOTH:
            assert (await served.call("POST", path, body)).status == 200
