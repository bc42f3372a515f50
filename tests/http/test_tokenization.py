"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trioserve.engine.api import Phase

from .client import serving
from .fake_engine import FakeEngine

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def test_text() -> None:
    async with serving() as served:
        answer = await served.call("POST", "/tokenize", {"prompt": "hi"})
        assert answer.json == {
            "count": 2,
            "max_model_len": 2048,
            "tokens": [104, 105],
            "token_strs": None,
        }
        back = await served.call("POST", "/detokenize", {"tokens": answer.json["tokens"]})
        assert back.json == {"prompt": "hi"}


async def test_empty_text_and_no_tokens() -> None:
    async with serving() as served:
        answer = await served.call("POST", "/tokenize", {"prompt": "", "return_token_strs": True})
        assert (answer.json["count"], answer.json["token_strs"]) == (0, [])
        assert (await served.call("POST", "/detokenize", {"tokens": []})).json == {"prompt": ""}


async def test_texts_of_the_tokens() -> None:
    engine = FakeEngine(max_model_len=100_000)
    text = "ab" * 5000
    async with serving(engine) as served:
        body = {"prompt": text, "return_token_strs": True}
        answer = (await served.call("POST", "/tokenize", body)).json
        assert answer["count"] == len(text)
        assert answer["token_strs"] == [engine.token_text(ord(char)) for char in text]


async def test_chat() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        body = {
            "messages": USER,
            "chat_template_kwargs": {"x": 1},
            "documents": [{"text": "d"}],
            "reasoning_effort": "none",
        }
        answer = await served.call("POST", "/tokenize", body)
        assert answer.status == 200
        assert engine.rendered == [USER]
        kwargs = engine.template_kwargs
        assert kwargs is not None
        assert (kwargs["x"], kwargs["reasoning_effort"]) == (1, "none")
        # The same body makes the same prompt where it is answered.
        await served.call("POST", "/v1/chat/completions", body)
        assert engine.template_kwargs == kwargs
        assert engine.streams[0].prompt_token_ids == answer.json["tokens"]
        tokens = answer.json["tokens"]
        assert bytes(tokens).decode().find("hi") >= 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"messages": USER, "tools": [{}]}, "tools"),
        ("/tokenize", {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": USER, "documents": 1}, "documents"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": "hi"}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        (
            "/tokenize",
            {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": 1}, "model"),
    ],
)
async def test_api_10_wrong_bodies(path: str, body: dict[str, Any], param: str) -> None:
    async with serving() as served:
        answer = await served.call("POST", path, body)
        assert answer.status == 400
        assert answer.json["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"add_generation_prompt": True, "continue_final_message": False}),
        ({}, {"add_special_tokens": False, "chat_template": None}),
        ({"add_special_tokens": True}, {"add_special_tokens": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"continue_final_message": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        ({"chat_template": "{{ 1 }}"}, {"chat_template": "{{ 1 }}"}),
    ],
)
async def test_what_makes_the_prompt_of_a_chat(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    engine = FakeEngine()
    async with serving(engine, trust_request_chat_template=True) as served:
        answer = await served.call("POST", "/tokenize", {"messages": USER} | fields)
        assert answer.status == 200
        assert expected.items() <= engine.rendering.items()


@pytest.mark.parametrize(
    ("fields", "special"), [({}, True), ({"add_special_tokens": False}, False)]
)
async def test_special_tokens_of_a_text(fields: dict[str, Any], special: bool) -> None:
    given: list[bool] = []

    class Engine(FakeEngine):
        async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            given.append(add_special_tokens)
            return await super().encode_prompt(text)

    async with serving(Engine()) as served:
        await served.call("POST", "/tokenize", {"prompt": "a"} | fields)
        assert given == [special]


async def test_unknown_fields_are_told() -> None:
    async with serving() as served:
        answer = await served.call("POST", "/tokenize", {"prompt": "a", "colour": "red"})
        assert answer.headers["x-trioserve-ignored-fields"] == "colour"
        # Of a text, what only a chat has is no more known than anything else.
        body = {"prompt": "a", "add_generation_prompt": True}
        answer = await served.call("POST", "/tokenize", body)
        assert answer.headers["x-trioserve-ignored-fields"] == "add_generation_prompt"


async def test_refused_while_loading_and_while_draining() -> None:
    engine = FakeEngine(phase=Phase.LOADING, script=None)
    async with serving(engine) as served:
        body = {"prompt": "a"}
        assert (await served.call("POST", "/tokenize", body)).status == 503
        engine.phase = Phase.READY
        running = await served.connect()
        await running.send("POST", "/v1/completions", body)
        await engine.submitted()
        served.stopping.set()
        assert (await served.call("POST", "/tokenize", body)).status == 503
        assert (await served.call("POST", "/detokenize", {"tokens": [1]})).status == 503
        engine.streams[0].say("a", finish="stop")
        await running.answer()


async def test_client_gone_while_it_waits() -> None:
    engine = FakeEngine()
    engine.encoding = trio.Event()
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/tokenize", {"prompt": "a"})
        await engine.encoding.wait()
        assert (await served.call("GET", "/load")).json == {"server_load": 1}
        client.reset()
        with trio.fail_after(2):
            while (await served.call("GET", "/load")).json["server_load"]:
                await trio.lowlevel.checkpoint()
