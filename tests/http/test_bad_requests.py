"""Requests that are wrong; names carry ids of field failures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioserve.errors import QueueFull

from .bodies import BOTH, CHAT, COMPLETION, USER, is_error
from .client import serving
from .fake_engine import FakeEngine, FakeStream

# -------------------------------------------------------------------------------- API-10


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b"1",
        b"{}",
        b'{"prompt": "a", "prompt": "b", "messages": [{"role": "user", "content": "a"}]}',
        b'{"prompt": "a", "messages": [{"role": "user", "role": "user", "content": "a"}]}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "a"',
        b'{"prompt": "a"} trailing',
        json.dumps({"prompt": "a"} | {f"k{index}": 1 for index in range(1000)}).encode(),
        '{"prompt": "a"}'.encode("utf-16"),
    ],
)
async def test_api_10_bodies_that_are_no_request(path: str, raw: bytes) -> None:
    async with serving() as served:
        answer = await served.call("POST", path, raw)
        assert answer.status == 400
        assert is_error(answer.json)
        assert answer.json["error"]["type"] == "invalid_request_error"
        good = COMPLETION if path == "/v1/completions" else CHAT
        assert (await served.call("POST", path, good)).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 1000}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": [1]}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 0.5}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": {}}, "stop"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": 1, "stream": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"model": 3}, "model"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": "x" * 1000}, "cache_salt"),
        ({"echo": "x"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 600, "best_of": 2}, "best_of"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [[1, None]]}, "prompt[0][1]"),
        ({"prompt": [1, 256]}, "prompt"),
        ({"prompt": [1, 256], "echo": True}, "prompt"),
        ({"prompt": [256], "echo": True, "logprobs": 0}, "prompt"),
        ({"prompt": [2**64 - 1]}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 2}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias.5"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.'-5'"),
        ({"logit_bias": {"five": 1}}, "logit_bias.'five'"),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias.'05'"),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias.'" + "9" * 30 + "'"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"logit_bias": {"256": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [256]}, "allowed_token_ids"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"bad_words": ["a"] * 200}, "bad_words"),
        ({"logprob_token_ids": [1] * 200}, "logprob_token_ids"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids[0]"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "up"}, "truncation_side"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"return_tokens_as_token_ids": "x"}, "return_tokens_as_token_ids"),
        ({"include_timings": 1}, "include_timings"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": 5}, "request_id"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": 0}},
            "stream_options.continuous_usage_stats",
        ),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
    ],
)
async def test_api_10_wrong_values_in_completions(fields: dict[str, Any], param: str) -> None:
    async with serving() as served:
        answer = await served.call("POST", "/v1/completions", COMPLETION | fields)
        assert answer.status == 400
        assert is_error(answer.json)
        assert answer.json["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": 1}]}, "messages[1].tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template": 1}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"documents": {}}, "documents"),
        ({"documents": ["text"]}, "documents[0]"),
        ({"documents": [{}] * 2000}, "documents"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"best_of": 2}, "best_of"),
        ({"thinking_token_budget": 10}, "thinking_token_budget"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [1]}]},
            "messages[1].tool_calls[0]",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[1].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    *USER,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": 1}}],
                    },
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_api_10_wrong_values_in_chat(fields: dict[str, Any], param: str) -> None:
    async with serving() as served:
        answer = await served.call("POST", "/v1/chat/completions", CHAT | fields)
        assert answer.status == 400
        assert is_error(answer.json)
        assert answer.json["error"]["param"] == param


async def test_api_10_all_faults_are_listed() -> None:
    async with serving() as served:
        body = {"prompt": 1, "temperature": "hot", "n": 0, "top_p": 7}
        message = (await served.call("POST", "/v1/completions", body)).json["error"]["message"]
        for part in ("prompt: ", "temperature: ", "n: ", "top_p: "):
            assert part in message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1/models", 405),
        ("GET", "/v1//models", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/V1/models", 404),
        ("BREW", "/version", 405),
    ],
)
async def test_api_10_wrong_routes_and_methods(method: str, path: str, status: int) -> None:
    async with serving() as served:
        answer = await served.call(method, path)
        assert answer.status == status
        assert is_error(answer.json)
        assert (status == 405) == ("allow" in answer.headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Content_Type": "multipart/form-data; boundary=x"},
        {"Content_Type": "application/json; charset=utf-16"},
        {"Content_Encoding": "gzip"},
    ],
)
async def test_api_10_wrong_content_type(headers: dict[str, str]) -> None:
    async with serving() as served:
        answer = await served.call("POST", "/v1/completions", COMPLETION, **headers)
        assert answer.status == 415
        assert is_error(answer.json)


async def test_api_10_body_too_large() -> None:
    async with serving(max_body_bytes=1000) as served:
        answer = await served.call("POST", "/v1/completions", {"prompt": "x" * 2_000_000})
        assert answer.status == 413
        assert is_error(answer.json)
        client = await served.connect()
        await client.stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n"
        )
        assert (await client.answer()).status == 413


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_10_null_is_absent(path: str, body: dict[str, Any]) -> None:
    names = (
        "n stream stream_options max_tokens min_tokens temperature top_p top_k min_p seed stop"
        " stop_token_ids ignore_eos include_stop_str_in_output logprobs top_logprobs echo priority"
        " cache_salt model user tools tool_choice response_format logit_bias best_of suffix"
        " frequency_penalty max_completion_tokens chat_template_kwargs"
    )
    async with serving() as served:
        answer = await served.call("POST", path, body | dict.fromkeys(names.split()))
        assert answer.status == 200


async def test_api_10_queue_full() -> None:
    engine = FakeEngine()
    engine.refuse = QueueFull("256 requests wait already; try again", code="queue_full")
    async with serving(engine) as served:
        for path, body in BOTH:
            for stream in (False, True):
                answer = await served.call("POST", path, body | {"stream": stream, "n": 2})
                assert answer.status == 429
                assert answer.headers["retry-after"] == "1"
                assert answer.json["error"]["type"] == "rate_limit_error"


async def test_refused_halfway_leaves_nothing_running() -> None:
    engine = FakeEngine(script=None)

    def refuse_next(stream: FakeStream) -> None:
        engine.refuse = QueueFull("full")

    engine.script = refuse_next
    async with serving(engine) as served:
        answer = await served.call("POST", "/v1/completions", COMPLETION | {"n": 3})
        assert answer.status == 429
        assert len(engine.streams) == 1
        await engine.streams[0].closed.wait()
        assert engine.streams[0].aborted


async def test_sa_05_errors_of_one_prompt_of_several_name_it() -> None:
    async with serving(FakeEngine(max_model_len=64)) as served:
        for prompt, param, words in [
            ([[1], [2, 999]], "prompt[1]", "prompt[1][1] is 999; token ids lie between 0 and 255"),
            (["a", ""], "prompt[1]", "prompt[1]: the prompt is empty"),
            (["a", "b", "x" * 64], "prompt[2]", "prompt[2]: the prompt is too long"),
            ([[2, 999]], "prompt", "prompt[1] is 999"),
            ([2, 999], "prompt", "prompt[1] is 999"),
            ([""], "prompt", "the prompt is empty"),
        ]:
            answer = await served.call("POST", "/v1/completions", {"prompt": prompt})
            error = answer.json["error"]
            assert (answer.status, error["param"]) == (400, param)
            assert error["message"].startswith(words)
        assert not any(not stream.closed.is_set() for stream in served.engine.streams)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *BOTH,
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "fake", "messages": USER, "max_tokens": 3}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
async def test_api_10_an_unknown_field_that_is_null_is_absent_too(
    path: str, body: dict[str, Any]
) -> None:
    async with serving(strict_fields=True) as served:
        assert (await served.call("POST", path, body | {"no_such_field": None})).status == 200
        assert (await served.call("POST", path, body | {"no_such_field": 1})).status == 400


async def test_api_10_a_fault_is_told_once_in_words_of_json() -> None:
    async with serving() as served:
        body = {"model": 5, "messages": USER, "max_tokens": 3}
        error = (await served.call("POST", "/v1/messages", body)).json["error"]
        assert error["message"] == "model: must be a string, not the number 5"
        chat = {"messages": [{"content": "x"}], "store": True}
        error = (await served.call("POST", "/v1/chat/completions", chat)).json["error"]
        assert "not null" in error["message"]
        assert "store: true is not supported" in error["message"]
        assert "None" not in error["message"]
