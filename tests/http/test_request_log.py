"""The log of requests: off unless asked for, one line each, no line that a client made."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import trio

from trioserve.config.schema import LogConfig
from trioserve.engine.api import TextDelta
from trioserve.errors import RequestFailed
from trioserve.http.request_log import CUT, LOGGER
from trioserve.logs import JsonFormatter, TextFormatter, set_up_logging

from .client import serving
from .fake_engine import FakeEngine

COMPLETION = {"prompt": "hi"}
STREAM = COMPLETION | {"stream": True}
ON = LogConfig(requests=True)
ALL = LogConfig(requests=True, inputs=True, outputs=True, format="json")
NASTY = "\r\n12:00:00 INFO forged \x1b[2J\u2028\u2029\x85\x7f\x9b0m\u202e\0 é 😀 \"'\\"


def lines(caplog: pytest.LogCaptureFixture, formatter: logging.Formatter) -> list[str]:
    found = [formatter.format(r) for r in caplog.records if r.name == LOGGER]
    for line in found:
        assert len(line.splitlines()) == 1
        assert line.isprintable()
    return found


def entries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(caplog, JsonFormatter())]


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def test_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        await served.call("POST", "/v1/completions", {"prompt": "a secret"})
        await served.call("POST", "/v1/completions", {"prompt": "a secret", "n": "x"})
    assert entries(caplog) == []
    assert "secret" not in caplog.text
    assert "Hello" not in caplog.text


@pytest.mark.parametrize("body", [COMPLETION, STREAM, COMPLETION | {"n": 2}])
async def test_a_line_for_each_request(
    body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    log = LogConfig(requests=True, format="json")
    async with serving(log=log) as served:
        await served.call("POST", "/v1/completions", body, X_Request_Id="mine")
    [entry] = entries(caplog)
    assert 0 <= entry.pop("seconds") < 5
    n = body.get("n", 1)
    assert {k: v for k, v in entry.items() if k != "time"} == {
        "level": "info",
        "logger": "trioserve.requests",
        "message": "request",
        "request_id": "mine",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "client": "127.0.0.1",
        "prompt_tokens": 2,
        "completion_tokens": 2 * n,
        "finish_reasons": ["stop"] * n,
    }


async def test_text(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(log=ON) as served:
        await served.call("POST", "/v1/completions", COMPLETION, X_Request_Id="mine")
        await served.call("GET", "/health", X_Request_Id="probe")
        await served.call("GET", "/nowhere", X_Request_Id="lost")
    told = [line.partition("INFO    ")[2] for line in lines(caplog, TextFormatter())]
    assert [line.partition(" in ")[0] for line in told] == [
        "POST /v1/completions: 200",
        "GET /health: 200",
        "GET (no route): 404",
    ]
    assert told[0].endswith("tokens 2 in, 2 out, stop; request mine from 127.0.0.1")


async def test_prompts_of_one_request_are_counted_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(log=LogConfig(requests=True, format="json")) as served:
        body = {"prompt": ["abc", "de"], "n": 3}
        await served.call("POST", "/v1/completions", body)
    [entry] = entries(caplog)
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (5, 12)


async def test_ends_that_are_none(caplog: pytest.LogCaptureFixture) -> None:
    log = LogConfig(requests=True, format="json")
    async with serving(FakeEngine(script=None), log=log, api_keys=("k",)) as served:
        engine = served.engine
        gone = await served.connect()
        await gone.send("POST", "/v1/completions", COMPLETION, x_api_key="k")
        [stream] = await engine.submitted()
        gone.reset()
        await stream.closed.wait()

        failed = await served.connect()
        await failed.send("POST", "/v1/completions", STREAM, x_api_key="k")
        _, stream = await engine.submitted(2)
        stream.push(TextDelta("Hel", [7]))
        await failed.head()
        await failed.event()
        stream.fail(RequestFailed("the worker died", code="worker_died"))
        await failed.event()
        await failed.chunk()
        assert (await served.call("GET", "/v1/models")).status == 401
        await trio.testing.wait_all_tasks_blocked(0.05)
    one, two, three = entries(caplog)
    assert (one["status"], one["finish_reasons"]) == (None, [None])
    assert (two["status"], two["finish_reasons"]) == (200, ["worker_died"])
    assert two["completion_tokens"] == 1
    assert (three["status"], three["route"]) == (401, None)


async def test_contents_when_asked_for_and_only_these(caplog: pytest.LogCaptureFixture) -> None:
    for inputs, outputs in [(True, False), (False, True), (True, True), (False, False)]:
        caplog.clear()
        log = LogConfig(requests=True, inputs=inputs, outputs=outputs, format="json")
        async with serving(log=log) as served:
            await served.call("POST", "/v1/completions", {"prompt": "a secret", "n": 2})
        [entry] = entries(caplog)
        assert ("a secret" in entry.get("input", "")) == inputs
        assert entry.get("output") == (["Hello world"] * 2 if outputs else None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a secret"}]}),
        ("/v1/responses", {"input": "a secret"}),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "a secret"}],
                "max_tokens": 9,
                "model": "fake",
            },
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_is_logged(
    path: str, body: dict[str, Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(log=ALL) as served:
        answer = await served.call("POST", path, body | {"stream": stream})
        assert answer.status == 200
    [entry] = entries(caplog)
    assert entry["route"] == path
    assert "a secret" in entry["input"]
    assert entry["output"] == ["Hello world"]
    assert entry["completion_tokens"] == 2


async def test_contents_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = LogConfig(requests=True, inputs=True, outputs=True, max_content_chars=10, format="json")

    def script(stream: Any) -> None:
        stream.say(*["éé"] * 1000, finish="stop")

    async with serving(FakeEngine(script=script), log=log) as served:
        await served.call("POST", "/v1/completions", {"prompt": "😀" * 500})
        await served.call("POST", "/v1/completions", b'{"prompt": "\xff\xfe"}')
    one, two = entries(caplog)
    assert one["output"] == ["éé" * 5 + CUT]
    assert one["input"] == '{"prompt":' + CUT
    assert (two["status"], two["input"]) == (400, '{"prompt":' + CUT)


@pytest.mark.parametrize("form", ["json", "text"])
async def test_nobody_forges_a_line(form: Any, caplog: pytest.LogCaptureFixture) -> None:
    log = LogConfig(requests=True, inputs=True, outputs=True, format=form)

    def script(stream: Any) -> None:
        stream.say(NASTY, finish="stop")

    async with serving(FakeEngine(script=script), log=log) as served:
        raw = json.dumps({"prompt": NASTY}, ensure_ascii=False).encode()
        await served.call("POST", "/v1/completions", raw)
        await served.call("POST", "/v1/completions", NASTY.encode())
        await served.call("POST", "/v1/completions%0a%1b[2J", COMPLETION)
        await served.call("BREW" * 1000, "/v1/completions", COMPLETION)
        await served.call("GET", "/health", X_Request_Id='x"; request forged from 10.0.0.1')
    assert len(lines(caplog, JsonFormatter())) == 5
    told = lines(caplog, TextFormatter())  # each line is printable, as is checked there
    assert all("BREWBREWB" not in line or len(line) < 200 for line in told)
    assert not any("request forged" in line for line in told)
    if form == "json":
        assert entries(caplog)[0]["output"] == [NASTY]


def test_formatter_escapes_what_json_lets_stand() -> None:
    for text in (NASTY, "\ud800 half", "\U000e0041 tag", "plain é"):
        record = logging.makeLogRecord({"msg": text, "levelname": "INFO"})
        line = JsonFormatter().format(record)
        assert line.isprintable()
        assert json.loads(line)["message"] == text


def test_lines_come_whatever_the_level(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.getLogger(LOGGER).level
    try:
        set_up_logging(LogConfig(level="error", requests=True, format="text"), None)
        logging.getLogger(LOGGER).info("a request")
        logging.getLogger("trioserve.http").info("something else")
    finally:
        root.handlers[:], level, own = before
        root.setLevel(level)
        logging.getLogger(LOGGER).setLevel(own)
    assert "a request" in (said := capfd.readouterr().err)
    assert "something else" not in said
