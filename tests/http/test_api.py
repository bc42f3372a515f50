"""The routes over real sockets; names carry the ids of the field failures they guard against."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import trio

from trioserve.engine.api import Phase, StageStatus, TextDelta, TokenLogprob
from trioserve.errors import QueueFull, RequestFailed
from trioserve.http.errors import InvalidBody
from trioserve.http.fields import decode_object
from trioserve.http.metrics import STATUS_CLASSES

from .client import serving
from .fake_engine import FakeEngine, FakeStream

USER = [{"role": "user", "content": "hi"}]
CHAT = {"messages": USER}
COMPLETION = {"prompt": "hi"}
BOTH = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def is_error(body: Any) -> bool:
    return set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]


# -------------------------------------------------------------------------------- ST-10


async def test_st_10_nothing_is_ready_before_the_model_is() -> None:
    engine = FakeEngine(phase=Phase.LOADING)
    async with serving(engine) as served:
        for path in ("/health", "/health/ready"):
            answer = await served.call("GET", path)
            assert answer.status == 503
            assert answer.json["stage"] == "weights"
            assert answer.json["fraction"] == 0.25
            assert "retry-after" in answer.headers
        assert (await served.call("GET", "/health/live")).status == 200
        assert (await served.call("GET", "/metrics")).status == 200
        models = await served.call("GET", "/v1/models")
        assert [card["max_model_len"] for card in models.json["data"]] == [None, None]
        startup = await served.call("GET", "/startup")
        assert startup.json["stages"][0]["detail"] == "7 of 28 MB"
        for path, body in BOTH:
            answer = await served.call("POST", path, body)
            assert answer.status == 503
            assert is_error(answer.json)
            assert answer.headers["retry-after"] == "1"
        engine.phase = Phase.READY
        assert (await served.call("GET", "/health")).status == 200
        assert (await served.call("POST", "/v1/completions", COMPLETION)).status == 200


async def test_startup_tells_the_cause_of_a_failure() -> None:
    engine = FakeEngine(phase=Phase.FAILED)
    engine.cause = "weights: file is cut short"
    engine.stages = [StageStatus("inspect", "done", 1.0), StageStatus("weights", "failed")]
    async with serving(engine) as served:
        assert (await served.call("GET", "/startup")).json["cause"] == engine.cause
        ready = await served.call("GET", "/health/ready")
        assert ready.status == 503
        assert ready.json["stage"] == "weights"
        assert ready.json["cause"] == engine.cause


# -------------------------------------------------------------------------------- SD-02


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_sd_02_dead_worker_ends_every_request(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        streamed, plain = await served.connect(), await served.connect()
        await streamed.send("POST", path, body | {"stream": True})
        [first] = await engine.submitted()
        first.say("x")
        await streamed.head()
        await streamed.event()
        await plain.send("POST", path, body)
        await engine.submitted(2)
        engine.phase = Phase.FAILED
        for stream in engine.streams:
            stream.fail(RequestFailed("the worker died", code="worker_died"))
        answer = await plain.answer()
        assert answer.status == 500
        assert answer.json["error"]["code"] == "worker_died"
        with pytest.raises(EOFError):
            while "error" not in (event := await streamed.event()):
                pass
            await streamed.event()
        assert event["error"]["type"] == "server_error"
        assert (await served.call("GET", "/health")).status == 503
        assert (await served.call("POST", path, body)).status == 503


# -------------------------------------------------------------------------------- API-01


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"n": 4}, {"n": 4, "stream": True}])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("num_deltas", [0, 3])
async def test_api_01_client_gone_work_gone(
    path: str,
    body: dict[str, Any],
    extra: dict[str, Any],
    how: str,
    num_deltas: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", path, body | extra)
        num = extra.get("n", 1)
        streams = await engine.submitted(num)
        for _ in range(num_deltas):
            for stream in streams:
                stream.say("x")
        if num_deltas and extra.get("stream"):
            await client.head()
            await client.event()
        if how == "close":
            await client.stream.aclose()
        else:
            client.reset()
        with trio.fail_after(1):
            for stream in streams:
                await stream.closed.wait()
        assert all(stream.aborted for stream in streams)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_api_01_gone_is_counted_and_normal_ends_are_not() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION)
        [stream] = await engine.submitted()
        client.reset()
        await stream.closed.wait()
        engine.script = lambda stream: stream.say("x", finish="length")
        await served.call("POST", "/v1/completions", COMPLETION)
        text = (await served.call("GET", "/metrics")).body.decode()
        assert 'choices_finished_total{reason="gone"} 1.0' in text
        assert 'choices_finished_total{reason="length"} 1.0' in text


async def test_api_01_half_closed_plain_request_counts_as_gone() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION)
        await client.stream.send_eof()
        [stream] = await engine.submitted()
        with trio.fail_after(1):
            await stream.closed.wait()


async def test_half_closed_probe_is_answered() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send("GET", "/health")
        await client.stream.send_eof()
        assert (await client.answer()).status == 200


# -------------------------------------------------------------------------------- API-05


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("n", [1, 3])
async def test_api_05_usage_in_streams(path: str, body: dict[str, Any], n: int) -> None:
    async with serving() as served:
        asked = body | {"stream": True, "n": n, "stream_options": {"include_usage": True}}
        answer = await served.call("POST", path, asked)
        *chunks, last, done = answer.events
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 2 * n,
            "total_tokens": 2 + 2 * n,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        for options in ({}, {"stream_options": None}, {"stream_options": {}}):
            answer = await served.call("POST", path, body | {"stream": True, "n": n} | options)
            assert all("usage" not in e and e["choices"] for e in answer.events[:-1])


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_05_stream_options_without_stream(path: str, body: dict[str, Any]) -> None:
    async with serving() as served:
        options = {"stream_options": {"include_usage": True}}
        answer = await served.call("POST", path, body | options)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "stream_options"


# -------------------------------------------------------------------------------- API-08


@pytest.mark.parametrize("stream", [False, True])
async def test_api_08_prompt_that_fills_the_context(stream: bool) -> None:
    async with serving(FakeEngine(max_model_len=64)) as served:
        for length in (64, 65, 6000, 7000):
            for path, body in (
                ("/v1/completions", {"prompt": "x" * length}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * length}]}),
            ):
                answer = await served.call("POST", path, body | {"stream": stream})
                assert answer.status == 400
                error = answer.json["error"]
                assert error["type"] == "invalid_request_error"
                assert error["code"] == "context_length_exceeded"
                assert "64" in error["message"]
                assert str(length) in error["message"]
        assert served.engine.streams == []


async def test_api_08_max_tokens_is_clamped_to_the_context() -> None:
    engine = FakeEngine(max_model_len=64)
    async with serving(engine) as served:
        for prompt, asked, got in [
            ("x" * 8, {"max_tokens": 57}, 56),
            ("x" * 8, {"max_tokens": 10**9}, 56),
            ("x" * 63, {}, 1),
            ("x" * 8, {}, 16),
            ("x" * 8, {"max_tokens": None}, 16),
        ]:
            answer = await served.call("POST", "/v1/completions", {"prompt": prompt} | asked)
            assert answer.status == 200
            assert engine.streams[-1].sampling.max_tokens == got
        for asked, want in [
            ({}, None),
            ({"max_tokens": 5}, 5),
            ({"max_completion_tokens": 6, "max_tokens": None}, 6),
            ({"max_completion_tokens": 6, "max_tokens": 6}, 6),
        ]:
            assert (await served.call("POST", "/v1/chat/completions", CHAT | asked)).status == 200
            assert engine.streams[-1].sampling.max_tokens == want


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
        ({"best_of": 3}, "best_of"),
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
        ({"prompt": [2**64 - 1]}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 2}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1]}, "echo"),
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


# -------------------------------------------------------------------------------- API-15


async def test_api_15_unknown_fields_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as served:
        for stream in (False, True):
            caplog.clear()
            body = COMPLETION | {"invented": 1, "höhö\r\nx": 2, "user": "me", "stream": stream}
            answer = await served.call("POST", "/v1/completions", body)
            assert answer.status == 200
            named = answer.headers["x-trioserve-ignored-fields"]
            assert named == "invented, h\\xf6h\\xf6\\r\\nx"
            assert len([r for r in caplog.records if "ignored" in r.getMessage()]) == 1


# ------------------------------------------------------------------------- what is honoured


async def test_every_honoured_field_arrives() -> None:
    engine = FakeEngine()
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 2**63 - 1,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "n": 2,
        "priority": -3,
        "cache_salt": "s",
    }
    async with serving(engine) as served:
        for path, body in BOTH:
            engine.streams.clear()
            assert (await served.call("POST", path, body | fields)).status == 200
            first, second = engine.streams
            got = first.sampling
            assert (got.max_tokens, got.min_tokens, got.temperature) == (9, 2, 0.0)
            assert (got.top_p, got.top_k, got.min_p) == (0.5, 4, 0.1)
            assert (got.stop, got.stop_token_ids) == (("a", "b"), (5,))
            assert got.ignore_eos
            assert got.include_stop_str_in_output
            assert got.seed == 2**63 - 1
            assert second.sampling.seed == -(2**63)  # the next, around the end
            assert first.extra == {"priority": -3, "cache_salt": "s"}


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_all_kinds(prompt: Any, tokens: list[list[int]], stream: bool) -> None:
    def script(stream: FakeStream) -> None:
        stream.say(f"<{stream.id}>", finish="stop")

    engine = FakeEngine(script=script)
    async with serving(engine) as served:
        answer = await served.call(
            "POST", "/v1/completions", {"prompt": prompt, "n": 2, "stream": stream}
        )
        assert answer.status == 200
        want = [ids for ids in tokens for _ in range(2)]
        assert [stream.prompt_token_ids for stream in engine.streams] == want
        texts = [""] * len(want)
        for part in answer.events[:-1] if stream else [answer.json]:
            for choice in part["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [f"<{index}>" for index in range(len(want))]
        if not stream:
            assert answer.json["usage"]["prompt_tokens"] == sum(map(len, tokens))


async def test_echo() -> None:
    async with serving() as served:
        body = {"prompt": ["ab", "c"], "echo": True}
        whole = await served.call("POST", "/v1/completions", body)
        texts = [choice["text"] for choice in whole.json["choices"]]
        assert texts == ["abHello world", "cHello world"]
        streamed = await served.call("POST", "/v1/completions", body | {"stream": True})
        parts = ["", ""]
        for event in streamed.events[:-1]:
            for choice in event["choices"]:
                parts[choice["index"]] += choice["text"]
        assert parts == texts


async def test_chat_shapes() -> None:
    async with serving() as served:
        whole = (await served.call("POST", "/v1/chat/completions", CHAT)).json
        assert whole["object"] == "chat.completion"
        assert whole["model"] == "fake"
        [choice] = whole["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert choice["logprobs"] is None
        streamed = await served.call("POST", "/v1/chat/completions", CHAT | {"stream": True})
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert streamed.headers["cache-control"] == "no-cache"
        assert streamed.headers["x-accel-buffering"] == "no"
        assert "server" not in streamed.headers
        deltas = [event["choices"][0]["delta"] for event in streamed.events[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[1:] == [{"content": "Hello"}, {"content": " world"}]
        assert len({event["id"] for event in streamed.events[:-1]}) == 1


async def test_template_kwargs_reach_the_template() -> None:
    async with serving() as served:
        kwargs = {"enable_thinking": False}
        await served.call("POST", "/v1/chat/completions", CHAT | {"chat_template_kwargs": kwargs})
        assert served.engine.template_kwargs == kwargs


SMILE = "😀".encode()
LOGPROBS = [
    TokenLogprob("a", 97, b"a", -0.5, [TokenLogprob("b", 98, b"b", -0.1, [])]),
    TokenLogprob("�", 1, SMILE[:2], float("-inf"), []),
    TokenLogprob("�", 2, SMILE[2:], -1.0, []),
    TokenLogprob("c", 99, b"c", -0.25, []),
]


def script_logprobs(stream: FakeStream) -> None:
    stream.push(
        TextDelta("a", [97], LOGPROBS[:1]),
        TextDelta("😀c", [1, 2, 99], LOGPROBS[1:], finish_reason="length"),
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(stream: bool) -> None:
    async with serving(FakeEngine(script=script_logprobs)) as served:
        body = COMPLETION | {"logprobs": 1, "stream": stream}
        answer = await served.call("POST", "/v1/completions", body)
        parts = answer.events[:-1] if stream else [answer.json]
        joined: dict[str, list[Any]] = {}
        for part in parts:
            for name, values in part["choices"][0]["logprobs"].items():
                joined.setdefault(name, []).extend(values)
        assert joined["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "c"]
        assert joined["token_logprobs"] == [-0.5, -9999.0, -1.0, -0.25]
        assert joined["top_logprobs"][0] == {"a": -0.5, "b": -0.1}
        assert joined["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(stream: bool) -> None:
    async with serving(FakeEngine(script=script_logprobs)) as served:
        body = CHAT | {"logprobs": True, "top_logprobs": 1, "stream": stream}
        answer = await served.call("POST", "/v1/chat/completions", body)
        assert served.engine.streams[0].sampling.logprobs == 1
        parts = answer.events[1:-1] if stream else [answer.json]
        content = [e for part in parts for e in part["choices"][0]["logprobs"]["content"]]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == "a😀c".encode()
        assert content[0]["top_logprobs"] == [{"token": "b", "logprob": -0.1, "bytes": [98]}]
        assert content[1]["logprob"] == -9999.0


# --------------------------------------------------------------------------------- models


async def test_models() -> None:
    async with serving() as served:
        cards = (await served.call("GET", "/v1/models")).json["data"]
        assert [card["id"] for card in cards] == ["fake", "org/fake"]
        assert cards[0]["max_model_len"] == 2048
        assert (await served.call("GET", "/v1/models/org/fake")).json == cards[1]
        missing = await served.call("GET", "/v1/models/none")
        assert missing.status == 404
        assert missing.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_model_field(path: str, body: dict[str, Any]) -> None:
    async with serving() as served:
        for model in ("fake", "org/fake", "", None):
            answer = await served.call("POST", path, body | {"model": model})
            assert answer.status == 200
            assert answer.json["model"] == "fake"
        answer = await served.call("POST", path, body | {"model": "gpt"})
        assert answer.status == 404
        error = answer.json["error"]
        assert error["param"] == "model"
        assert error["code"] == "model_not_found"
        assert "org/fake" in error["message"]


# -------------------------------------------------------------------------------- metrics


async def test_op_01_series_do_not_grow_with_requests() -> None:
    from prometheus_client.parser import text_string_to_metric_families as parse

    async with serving() as served:
        before = (await served.call("GET", "/metrics")).body.decode()
        client = await served.connect()
        for index in range(40):
            await client.send("GET", f"/random/{index}")
            await client.answer()
            await client.send("POST", "/v1/completions", COMPLETION | {"model": f'm{index}\n"'})
            await client.answer()
            await client.send(f"M{index}", "/version")
            await client.answer()
        after = (await served.call("GET", "/metrics")).body.decode()
        count = {text: sum(len(f.samples) for f in parse(text)) for text in (before, after)}
        assert count[before] == count[after]
        assert 'trioserve_http_requests_total{route="other",status="4xx"} 80.0' in after
        assert all(f'route="/version",status="{s}"' in before for s in STATUS_CLASSES)


async def test_routes_are_all_known_to_the_metrics() -> None:
    from trioserve.config.schema import Config
    from trioserve.http.app import ROUTES, make_app

    app = make_app(FakeEngine(), Config(), trio.Event())
    assert sorted({rule.rule for rule in app.url_map.iter_rules()}) == ROUTES


# ---------------------------------------------------------------------------------- PF-01


async def test_pf_01_large_bodies_do_not_stop_the_others() -> None:
    engine = FakeEngine(max_model_len=10**7)
    async with serving(engine, max_body_bytes=32 * 2**20) as served:
        text = json.dumps(
            {"messages": [{"role": "user", "content": "x" * 100}] * 16000, "pad": "y" * 3_000_000}
        ).encode()
        worst = 0.0
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(served.call, "POST", "/v1/chat/completions", text)
            probe = await served.connect()
            for _ in range(20):
                before = trio.current_time()
                await probe.send("GET", "/health")
                assert (await probe.answer()).status == 200
                worst = max(worst, trio.current_time() - before)
        assert worst < 1.0  # a bound for a busy machine; usually some hundredths
        assert len(engine.streams) == 3


async def test_more_answers_than_can_ever_run_or_wait_are_an_error_of_the_request() -> None:
    """A 429 would be tried again for ever."""
    async with serving() as served:
        most = 64 + 256  # scheduler.max_num_seqs + scheduler.max_waiting
        for body, param in (
            ({"prompt": ["a"] * (most + 1)}, "prompt"),
            ({"prompt": ["a"] * 3, "n": 128}, "prompt"),
        ):
            answer = await served.call("POST", "/v1/completions", body)
            assert answer.status == 400
            assert answer.json["error"]["param"] == param
            assert str(most) in answer.json["error"]["message"]
        assert not served.engine.streams


@pytest.mark.parametrize(
    "filler",
    [
        b"[" + b",".join([b"[]"] * 100_001) + b"]",
        b"[" + b",".join([b"{}"] * 100_001) + b"]",
        b"{" + b",".join(b'"%x":1' % i for i in range(100_001)) + b"}",
        b"[" + b",".join([b"1"] * 2_000_002) + b"]",
    ],
    ids=["arrays", "objects", "keys", "items"],
)
async def test_a_body_of_countless_parts_is_refused_undecoded(filler: bytes) -> None:
    """Decoding one would stop the server for all others, in a thread too."""
    raw = b'{"prompt": "a", "metadata": ' + filler + b"}"
    with pytest.raises(InvalidBody, match="are the most"):
        decode_object(raw)
    async with serving() as served:
        answer = await served.call("POST", "/v1/completions", raw)
        assert answer.status == 400
        assert "are the most" in answer.json["error"]["message"]


def test_a_long_text_is_not_countless_parts() -> None:
    text = "f([a, b], {c: 1});\n" * 20_000
    assert decode_object(json.dumps({"prompt": text}).encode())["prompt"] == text
