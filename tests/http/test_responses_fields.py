"""Which fields of /v1/responses are honoured, refused and passed over."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.config.schema import SchedulerConfig

from .client import serving
from .fake_engine import FakeEngine

PATH = "/v1/responses"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["x"]}, "include"),
        ({"include": 5}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"background": True, "store": False}, "background"),
        ({"background": "yes"}, "background"),
        ({"n": 2}, "n"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"echo": True}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"temperature": "hot"}, "temperature"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
async def test_api_10_faults_are_named(fields: dict[str, Any], path: str) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        answer = await served.call("POST", PATH, {"input": "hi"} | fields)
        assert answer.status == 400
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert path in answer.json["error"]["message"]
        assert answer.json["error"]["param"].endswith(path) or path in answer.json["error"]["param"]
        assert engine.streams == []


async def test_several_faults_are_listed_at_once() -> None:
    async with serving() as served:
        asked = {"input": 5, "temperature": -1, "tools": [1]}
        message = (await served.call("POST", PATH, asked)).json["error"]["message"]
        assert all(name in message for name in asked)


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ("hi", [("user", "hi")]),
        ("", [("user", "")]),
        ([{"role": "user", "content": "hi"}], [("user", "hi")]),
        ([{"type": "message", "role": "developer", "content": "hi"}], [("developer", "hi")]),
        (
            [
                {"role": "system", "content": [{"type": "input_text", "text": "a"}]},
                {
                    "id": "msg_1",
                    "type": "message",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "b", "annotations": []}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "c"},
                        {"type": "text", "text": "d"},
                    ],
                },
            ],
            [("system", "a"), ("assistant", "b"), ("user", "c\nd")],
        ),
    ],
)
async def test_api_12_legal_shapes_of_the_input(
    given: Any, rendered: list[tuple[str, str]]
) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        answer = await served.call("POST", PATH, {"input": given, "instructions": "i"})
        assert answer.status == 200
        messages = [(message["role"], message["content"]) for message in engine.rendered[0]]
        assert messages == [("system", "i"), *rendered]


async def test_sampling_fields_arrive() -> None:
    engine = FakeEngine()
    async with serving(engine, scheduler=SchedulerConfig(policy="priority")) as served:
        asked = {
            "input": "hi",
            "max_output_tokens": 9,
            "top_k": 5,
            "min_p": 0.1,
            "seed": 3,
            "stop": ["a", "b"],
            "min_tokens": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": 1.5},
            "logprob_token_ids": [5],
            "cache_salt": "salt",
            "priority": -1,
            "reasoning": {"effort": "none", "summary": "auto"},
            "chat_template_kwargs": {"x": 1},
            "prompt_cache_retention": "24h",
            "stream_options": None,
        }
        answer = await served.call("POST", PATH, asked)
        assert answer.status == 200, answer.body
        assert "x-trioserve-ignored-fields" not in answer.headers
        [work] = engine.streams
        sampling = work.sampling
        assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (9, 2, 5)
        assert (sampling.min_p, sampling.seed, sampling.stop) == (0.1, 3, ("a", "b"))
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
        assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, {5: 1.5})
        assert work.extra == {"cache_salt": "salt", "priority": -1}
        assert engine.template_kwargs == {
            "reasoning_effort": "none",
            "enable_thinking": False,
            "x": 1,
        }
        assert answer.json["reasoning"] == {"effort": "none", "summary": None}
        [part] = answer.json["output"][0]["content"]
        assert [len(token["top_logprobs"]) for token in part["logprobs"]] == [1, 1]


async def test_the_models_own_defaults_hold_and_are_shown() -> None:
    engine = FakeEngine()
    engine.defaults = type(engine.defaults)(temperature=0.6, top_p=0.95, max_tokens=50)
    async with serving(engine) as served:
        response = (await served.call("POST", PATH, {"input": "hi"})).json
        assert (response["temperature"], response["top_p"]) == (0.6, 0.95)
        assert response["max_output_tokens"] is None
        assert engine.streams[0].sampling.max_tokens == 50
        response = (await served.call("POST", PATH, {"input": "hi", "temperature": 1})).json
        assert response["temperature"] == 1.0


async def test_nested_unknown_fields_are_reported() -> None:
    async with serving() as served:
        asked = {"input": "hi", "text": {"sloth": 1}, "reasoning": {"ape": 1}, "ox": 1}
        answer = await served.call("POST", PATH, asked)
        assert answer.status == 200
        names = set(answer.headers["x-trioserve-ignored-fields"].split(", "))
        assert names == {"text.sloth", "reasoning.ape", "ox"}
