"""API-12: every legal shape of a message reaches the model as the template would have it."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.text.chat_template import ChatTemplate

from .bodies import is_error
from .client import serving
from .fake_engine import FakeEngine

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'user' and message.content == 'refuse' %}
        {{- raise_exception('this template knows no refusals') }}
    {%- endif %}
    {{- '[' ~ message.role ~ ('/' ~ message.name if message.name else '') ~ ']' ~ message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson) ~ '>' }}
    {%- endfor %}
{%- endfor %}"""

ASK = {"role": "user", "content": "Hi"}


class TemplateEngine(FakeEngine):
    """Renders with a real template."""

    async def render_chat(self, messages: list[dict[str, Any]], **extra: Any) -> list[int]:
        text = ChatTemplate(TEMPLATE).render(messages)
        return await self.encode_prompt(text)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def said(**fields: Any) -> list[dict[str, Any]]:
    return [ASK, {"role": "assistant", **fields}]


LEGAL: dict[str, tuple[list[dict[str, Any]], str]] = {
    "null beside calls": (said(content=None, tool_calls=[call("{}")]), "[assistant]<f {}>"),
    "absent beside calls": (said(tool_calls=[call("{}")]), "[assistant]<f {}>"),
    "empty beside calls": (said(content="", tool_calls=[call("{}")]), "[assistant]<f {}>"),
    "empty assistant": (said(content=""), "[assistant]"),
    "null assistant": (said(content=None), "[assistant]"),
    "nothing but a role": (said(), "[assistant]"),
    "arguments empty": (said(tool_calls=[call("")]), "[assistant]<f {}>"),
    "arguments null text": (said(tool_calls=[call("null")]), "[assistant]<f {}>"),
    "arguments null": (said(tool_calls=[call(None)]), "[assistant]<f {}>"),
    "arguments object": (said(tool_calls=[call({"a": 1})]), '[assistant]<f {"a": 1}>'),
    "arguments json": (said(tool_calls=[call('{"a": "é"}')]), '[assistant]<f {"a": "é"}>'),
    "arguments not json": (said(tool_calls=[call("{a")]), '[assistant]<f "{a">'),
    "arguments deep": (said(tool_calls=[call("[" * 9999)]), f'[assistant]<f "{"[" * 9999}">'),
    "no calls": (said(content="x", tool_calls=[]), "[assistant]x"),
    "refusal": (said(content=[{"type": "refusal", "refusal": "No"}]), "[assistant]No"),
    "tool": ([ASK, {"role": "tool", "tool_call_id": "1", "content": "42"}], "[tool]42"),
    "tool parts": (
        [ASK, {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]}],
        "[tool]42",
    ),
    "function": ([ASK, {"role": "function", "name": "f", "content": "42"}], "[function/f]42"),
    "text parts": (
        [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
        "[user]a\nb",
    ),
    "no parts": ([{"role": "user", "content": []}], "[user]"),
    "developer": ([{"role": "developer", "content": "Be brief"}, ASK], "[system]Be brief[user]Hi"),
    "system not first": ([ASK, {"role": "system", "content": "S"}], "[user]Hi[system]S"),
    "two systems": ([{"role": "system", "content": "S"}] * 2 + [ASK], "[system]S[system]S[user]Hi"),
    "empty user": ([{"role": "user", "content": ""}], "[user]"),
    "two users": ([ASK, ASK], "[user]Hi[user]Hi"),
    "name": ([{**ASK, "name": "Ann"}], "[user/Ann]Hi"),
    "nulls": (
        [{**ASK, "name": None, "tool_calls": None, "tool_call_id": None, "refusal": None}],
        "[user]Hi",
    ),
}


@pytest.mark.parametrize("name", LEGAL)
async def test_api_12_legal_messages(name: str) -> None:
    messages, end = LEGAL[name]
    engine = TemplateEngine(max_model_len=20_000)
    async with serving(engine) as served:
        for stream in (False, True):
            body = {"messages": messages, "stream": stream}
            answer = await served.call("POST", "/v1/chat/completions", body)
            assert answer.status == 200, answer.body
            prompt = bytes(engine.streams[-1].prompt_token_ids).decode()
            assert prompt.endswith(end)
            assert "None" not in prompt


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "messages[1].content[1].type",
        ),
        ([{"type": "input_audio"}], "messages[1].content[0].type"),
        ([{"text": "a"}], "messages[1].content[0].type"),
        ([{"type": "text"}], "messages[1].content[0].text"),
        ([None], "messages[1].content[0]"),
        (3, "messages[1].content"),
    ],
)
async def test_api_12_parts_that_the_model_cannot_read(content: Any, param: str) -> None:
    async with serving(TemplateEngine()) as served:
        body = {"messages": [ASK, {"role": "user", "content": content}]}
        answer = await served.call("POST", "/v1/chat/completions", body)
        assert answer.status == 400
        assert is_error(answer.json)
        assert answer.json["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_api_12_the_templates_own_refusal_is_a_400_with_its_words(stream: bool) -> None:
    async with serving(TemplateEngine()) as served:
        body = {"messages": [{"role": "user", "content": "refuse"}], "stream": stream}
        answer = await served.call("POST", "/v1/chat/completions", body)
        assert answer.status == 400
        assert answer.json["error"]["message"] == "this template knows no refusals"
        assert answer.json["error"]["param"] == "messages"
