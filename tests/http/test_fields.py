"""What becomes of each field; names carry ids of field failures."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trioserve.config.schema import SchedulerConfig
from trioserve.engine.api import GenerationDefaults
from trioserve.sampling_params import SamplingParams

from .bodies import BOTH, CHAT, COMPLETION, USER
from .client import serving
from .fake_engine import FakeEngine, FakeStream

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


BY_PRIORITY = SchedulerConfig(policy="priority")
SAMPLING: dict[str, tuple[Any, Any]] = {
    "max_tokens": (9, 9),
    "min_tokens": (2, 2),
    "temperature": (0, 0.0),
    "top_p": (0.5, 0.5),
    "top_k": (4, 4),
    "min_p": (0.1, 0.1),
    "seed": (2**63 - 1, 2**63 - 1),
    "stop": (["a", "b"], ("a", "b")),
    "stop_token_ids": ([5], (5,)),
    "ignore_eos": (True, True),
    "include_stop_str_in_output": (True, True),
    "presence_penalty": (-2, -2.0),
    "frequency_penalty": (1.5, 1.5),
    "repetition_penalty": (1.2, 1.2),
    "logit_bias": ({"5": 1, "7": -100}, {5: 1.0, 7: -100.0}),
    "allowed_token_ids": ([1, 2], (1, 2)),
    "bad_words": (["x"], ("x",)),
    "logprob_token_ids": ([3, 4], (3, 4)),
    "prompt_logprobs": (2, 2),
    "skip_special_tokens": (False, False),
}
"""Each field of SamplingParams but ``logprobs``: as sent, and as it arrives."""


def test_api_15_every_sampling_field_is_in_the_table() -> None:
    assert {*SAMPLING, "logprobs"} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_15_every_honoured_field_arrives(path: str, body: dict[str, Any]) -> None:
    sent = {name: value for name, (value, _) in SAMPLING.items()}
    async with serving(scheduler=BY_PRIORITY) as served:
        more = {"n": 2, "priority": -3, "cache_salt": "s"}
        assert (await served.call("POST", path, body | sent | more)).status == 200
        first, second = served.engine.streams
        for name, (_, arrived) in SAMPLING.items():
            got = getattr(first.sampling, name)
            assert got == arrived, name
            assert type(got) is type(arrived), name
            if name not in ("seed", "prompt_logprobs"):
                assert getattr(second.sampling, name) == arrived, name
        assert first.sampling.logprobs == 0  # so that logprob_token_ids have where to be shown
        assert second.sampling.seed == -(2**63)  # the next, around the end
        assert second.sampling.prompt_logprobs is None  # the first tells for both
        assert first.extra == {"priority": -3, "cache_salt": "s"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *BOTH,
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "fake", "messages": USER, "max_tokens": 5}),
    ],
)
async def test_api_15_a_priority_that_nobody_heeds_is_refused(
    path: str, body: dict[str, Any]
) -> None:
    async with serving() as served:
        refused = await served.call("POST", path, body | {"priority": 1})
        assert refused.status == 400
        assert "priority: scheduler.policy" in refused.json["error"]["message"]
        assert served.engine.streams == []
        assert (await served.call("POST", path, body | {"priority": 0})).status == 200


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_a_request_that_asks_for_nothing_is_all_defaults(
    path: str, body: dict[str, Any]
) -> None:
    async with serving() as served:
        for neutral in ({}, dict.fromkeys(SAMPLING)):
            await served.call("POST", path, body | neutral)
            want = SamplingParams(max_tokens=None if path.endswith("chat/completions") else 16)
            assert served.engine.streams[-1].sampling == want


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_defaults_of_the_model_hold_where_a_request_says_nothing(
    path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine()
    engine.defaults = GenerationDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, max_tokens=77
    )
    async with serving(engine) as served:
        await served.call("POST", path, body)
        got = engine.streams[-1].sampling
        assert (got.temperature, got.top_k, got.top_p) == (0.6, 20, 0.95)
        assert (got.min_p, got.repetition_penalty) == (0.01, 1.1)
        assert got.max_tokens == (77 if "chat" in path else 16)  # completions have their own
        asked = {
            **{"temperature": 1, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1},
            "max_tokens": 3,
        }
        await served.call("POST", path, body | asked)
        assert engine.streams[-1].sampling == SamplingParams(max_tokens=3)


async def test_api_15_strict_fields_are_refused_each_by_name() -> None:
    async with serving(strict_fields=True) as served:
        body = COMPLETION | {"invented": 1, "user": "me"}
        options = {"stream": True, "stream_options": {"include_usage": True, "other": 1}}
        answer = await served.call("POST", "/v1/completions", body | options)
        assert answer.status == 400
        error = answer.json["error"]
        assert error["param"] == "invented"
        assert "stream_options.other" in error["message"]
        assert "user" not in error["message"]
        assert not served.engine.streams
        assert (await served.call("POST", "/v1/completions", COMPLETION)).status == 200


async def test_api_15_unknown_fields_inside_objects_are_told() -> None:
    async with serving() as served:
        options = {"stream": True, "stream_options": {"other": 1}}
        answer = await served.call("POST", "/v1/completions", COMPLETION | options)
        assert answer.headers["x-trioserve-ignored-fields"] == "stream_options.other"


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_limits_are_settings(path: str, body: dict[str, Any]) -> None:
    async with serving(max_n=2, max_stop_strings=1, max_logprobs=3) as served:
        chat = "chat" in path
        for fields, param in (
            ({"n": 3}, "n"),
            ({"stop": ["a", "b"]}, "stop"),
            ({"logprobs": True, "top_logprobs": 4}, "top_logprobs")
            if chat
            else ({"logprobs": 4}, "logprobs"),
            ({"prompt_logprobs": 4}, "prompt_logprobs"),
            *([] if chat else [({"best_of": 3}, "best_of")]),
        ):
            answer = await served.call("POST", path, body | fields)
            assert answer.status == 400
            assert answer.json["error"]["param"] == param
        assert (await served.call("POST", path, body | {"n": 2, "stop": ["a"]})).status == 200


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_truncation(path: str, body: dict[str, Any]) -> None:
    text = "abcdefgh"
    body = {"prompt": text} if "prompt" in body else {"messages": [{**USER[0], "content": text}]}
    async with serving(FakeEngine(max_model_len=8)) as served:
        assert (await served.call("POST", path, body)).status == 400
        for fields, want in [
            ({"truncate_prompt_tokens": 3}, b"fgh"),
            ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
            ({"truncate_prompt_tokens": -1, "max_tokens": 2}, b"cdefgh"),
            ({"truncate_prompt_tokens": -1, "max_tokens": 7}, b"h"),
            ({"truncate_prompt_tokens": 7}, b"bcdefgh"),
        ]:
            answer = await served.call("POST", path, body | fields)
            assert answer.status == 200, answer.body
            assert bytes(served.engine.streams[-1].prompt_token_ids) == want
            assert answer.json["usage"]["prompt_tokens"] == len(want)
        too_many = {"truncate_prompt_tokens": 8}
        assert (await served.call("POST", path, body | too_many)).status == 400


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("asked", [8, 10**9])
async def test_truncation_to_nothing_is_refused(name: str, asked: int) -> None:
    """A prompt is never cut to a token in silence."""
    fields = {"truncate_prompt_tokens": -1, name: asked}
    routes = BOTH if name == "max_tokens" else BOTH[1:]
    async with serving(FakeEngine(max_model_len=8)) as served:
        for path, body in routes:
            answer = await served.call("POST", path, body | fields)
            error = answer.json["error"]
            assert (answer.status, error["param"]) == (400, name)
            assert (
                f"truncate_prompt_tokens = -1 keeps what {name} = {asked} leaves"
                in error["message"]
            )
            assert "context length of 8 tokens" in error["message"]


async def test_truncation_leaves_a_prompt_beside_the_models_own_limit() -> None:
    engine = FakeEngine(max_model_len=8)
    engine.defaults = GenerationDefaults(max_tokens=500)
    body = {"messages": [{**USER[0], "content": "abcdefgh"}], "truncate_prompt_tokens": -1}
    async with serving(engine) as served:
        assert (await served.call("POST", "/v1/chat/completions", body)).status == 200
        assert bytes(engine.streams[-1].prompt_token_ids) == b"bcdefgh"


async def test_a_request_has_the_id_it_asks_for_unless_a_header_has_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as served:
        asked = COMPLETION | {"request_id": "mine"}
        answer = await served.call("POST", "/v1/completions", asked)
        assert answer.json["id"] == "cmpl-mine"
        assert answer.headers["x-request-id"] == "mine"
        caplog.clear()
        await served.call("POST", "/v1/completions", asked | {"invented": 1})
        assert "request mine: unknown fields" in caplog.text  # by the id that its client knows
        answer = await served.call("POST", "/v1/completions", asked, X_Request_Id="theirs")
        assert answer.json["id"] == "cmpl-theirs"
        assert answer.headers["x-request-id"] == "theirs"
        answer = await served.call("POST", "/v1/completions", asked, X_Request_Id="a b")
        assert answer.json["id"] == "cmpl-mine"


# ------------------------------------------------------------------------- the template's


async def test_the_templates_variables() -> None:
    async with serving() as served:

        async def rendering(**fields: Any) -> dict[str, Any]:
            answer = await served.call("POST", "/v1/chat/completions", CHAT | fields)
            assert answer.status == 200, answer.body
            return served.engine.rendering

        assert (await rendering())["template_kwargs"] is None
        kwargs = {"enable_thinking": False, "x": [1]}
        assert (await rendering(chat_template_kwargs=kwargs))["template_kwargs"] == kwargs
        got = await rendering(documents=[{"text": "d"}], reasoning_effort="low")
        assert got["template_kwargs"] == {"documents": [{"text": "d"}], "reasoning_effort": "low"}
        off = {"reasoning_effort": "none", "enable_thinking": False}
        assert (await rendering(reasoning_effort="none"))["template_kwargs"] == off
        got = await rendering(
            reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
        )
        assert got["template_kwargs"]["enable_thinking"]  # what is said in full counts


async def test_how_a_prompt_is_opened() -> None:
    async with serving() as served:
        for fields, want in [
            ({}, (True, False, False)),
            ({"add_generation_prompt": False}, (False, False, False)),
            ({"continue_final_message": True}, (False, True, False)),
            (
                {"continue_final_message": True, "add_generation_prompt": False},
                (False, True, False),
            ),
            ({"add_special_tokens": True}, (True, False, True)),
        ]:
            await served.call("POST", "/v1/chat/completions", CHAT | fields)
            got = served.engine.rendering
            names = ("add_generation_prompt", "continue_final_message", "add_special_tokens")
            assert tuple(got[name] for name in names) == want, fields


async def test_a_clients_template_is_run_only_if_trusted() -> None:
    body = CHAT | {"chat_template": "{{ messages }}"}
    async with serving() as served:
        answer = await served.call("POST", "/v1/chat/completions", body)
        assert answer.status == 400
        assert "trust_request_chat_template" in answer.json["error"]["message"]
    async with serving(trust_request_chat_template=True) as served:
        assert (await served.call("POST", "/v1/chat/completions", body)).status == 200
        assert served.engine.rendering["chat_template"] == "{{ messages }}"
        broken = CHAT | {"chat_template": "broken"}
        answer = await served.call("POST", "/v1/chat/completions", broken)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "chat_template"


# ------------------------------------------------------------------------------- prompts


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
