"""Log probabilities, of answers and prompts; echo; the best of several answers."""

from __future__ import annotations

import threading
from typing import Any

import orjson
import pytest

from trioserve.engine.api import TextDelta, TokenLogprob
from trioserve.http.render import prompt_logprobs_object
from trioserve.http.render_completion import CompletionRenderer
from trioserve.http.routes import generation

from .bodies import CHAT, COMPLETION
from .client import serving
from .fake_engine import FakeEngine, FakeStream, named
from .joining import join

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


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_named_by_their_ids(stream: bool) -> None:
    async with serving(FakeEngine(script=script_logprobs)) as served:
        more = {"return_tokens_as_token_ids": True, "stream": stream}
        answer = await served.call("POST", "/v1/completions", COMPLETION | {"logprobs": 1} | more)
        [choice] = (join(answer.events) if stream else answer.json)["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in (97, 1, 2, 99)]
        assert set(choice["logprobs"]["top_logprobs"][0]) == {"token_id:97", "token_id:98"}
        chat = CHAT | {"logprobs": True, "top_logprobs": 1} | more
        answer = await served.call("POST", "/v1/chat/completions", chat)
        [choice] = (join(answer.events) if stream else answer.json)["choices"]
        first = choice["logprobs"]["content"][0]
        assert (first["token"], first["bytes"]) == ("token_id:97", [97])
        assert first["top_logprobs"][0]["token"] == "token_id:98"


async def test_wanted_tokens_are_shown_beside_the_best() -> None:
    async with serving() as served:
        asked = {"logprob_token_ids": [1, 200]}
        chat = CHAT | asked | {"logprobs": True, "top_logprobs": 2}
        [choice] = (await served.call("POST", "/v1/chat/completions", chat)).json["choices"]
        shown = choice["logprobs"]["content"][0]["top_logprobs"]
        assert [entry["bytes"] for entry in shown] == [[1], [2], [200]]  # 1 only once
        alone = await served.call("POST", "/v1/completions", COMPLETION | asked)
        [choice] = alone.json["choices"]
        assert choice["logprobs"]["top_logprobs"][0] == {
            "\x01": -9.0,
            "bytes:\\xc8": -9.0,
            "Hello": -0.5,
        }


# -------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("n", [1, 2])
async def test_prompt_logprobs(n: int) -> None:
    async with serving() as served:
        asked = {"prompt_logprobs": 1, "n": n}
        want = [
            None,
            {
                "105": {"logprob": -0.25, "rank": 2, "decoded_token": "i"},
                "1": {"logprob": -0.1, "rank": 1, "decoded_token": "\x01"},
            },
        ]
        completion = (await served.call("POST", "/v1/completions", COMPLETION | asked)).json
        assert [choice["prompt_logprobs"] for choice in completion["choices"]] == [want] * n
        assert all(choice["logprobs"] is None for choice in completion["choices"])
        chat = (await served.call("POST", "/v1/chat/completions", CHAT | asked)).json
        assert chat["prompt_logprobs"] == want
        asked_of = [stream.sampling.prompt_logprobs for stream in served.engine.streams]
        assert asked_of == ([1] + [None] * (n - 1)) * 2  # the prompt is computed once


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(stream: bool) -> None:
    async with serving() as served:
        for prompt in (["ab", "c"], [[97, 98], [99]]):
            body = {"prompt": prompt, "echo": True, "stream": stream}
            answer = await served.call("POST", "/v1/completions", body)
            whole = join(answer.events) if stream else answer.json
            texts = [choice["text"] for choice in whole["choices"]]
            assert texts == ["abHello world", "cHello world"]
            assert served.engine.streams[-1].sampling.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_api_07_echo_with_logprobs(stream: bool, n: int) -> None:
    async with serving() as served:
        body = {"prompt": ["aé", "c"], "echo": True, "logprobs": 1, "n": n, "stream": stream}
        answer = await served.call("POST", "/v1/completions", body)
        choices = (join(answer.events) if stream else answer.json)["choices"]
        assert len(choices) == 2 * n
        for choice in choices[:n]:
            shown = choice["logprobs"]
            assert choice["text"] == "aéHello world"
            assert shown["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "Hello", " world"]
            assert shown["text_offset"] == [0, 1, 1, 2, 7]
            assert shown["token_logprobs"] == [None, -0.25, -0.5, -0.5, -0.5]
            assert shown["top_logprobs"][0] is None
            assert shown["top_logprobs"][1] == {"\x01": -0.1, "bytes:\\xc3": -0.25}


async def test_many_log_probabilities_are_put_together_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as served:
        body = {"prompt": [list(b"abcd")] * 3, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
        plain = (await served.call("POST", "/v1/completions", body)).json
        threads: list[str] = []
        render = CompletionRenderer.whole

        def whole(self: CompletionRenderer, *args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return render(self, *args)

        monkeypatch.setattr(CompletionRenderer, "whole", whole)
        monkeypatch.setattr(generation, "LOGPROBS_AT_ONCE", 17)
        answer = (await served.call("POST", "/v1/completions", body)).json
        assert answer["choices"] == plain["choices"]
        assert threads != [threading.main_thread().name]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprob_token_ids_alone(stream: bool) -> None:
    async with serving() as served:
        body = {"prompt": "ab", "echo": True, "logprob_token_ids": [1], "stream": stream}
        answer = await served.call("POST", "/v1/completions", body)
        [choice] = (join(answer.events) if stream else answer.json)["choices"]
        assert choice["text"] == "abHello world"
        assert choice["logprobs"]["tokens"] == ["a", "b", "Hello", " world"]
        assert choice["logprobs"]["top_logprobs"][1:3] == [
            {"b": -0.25},
            {"\x01": -9.0, "Hello": -0.5},
        ]


async def test_api_07_tokens_before_the_text_do_not_shift_offsets() -> None:
    """A tokenizer may begin a prompt with a token, or a space, that was not in the text."""

    class Prefixed(FakeEngine):
        async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return list(b"<s>") + await super().encode_prompt(text)

    async with serving(Prefixed()) as served:
        body = {"prompt": "ab", "echo": True, "logprobs": 0}
        [choice] = (await served.call("POST", "/v1/completions", body)).json["choices"]
        assert choice["text"] == "abHello world"
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 2, 7]


@pytest.mark.parametrize("stream", [False, True])
async def test_api_07_a_prompt_without_text_has_log_probabilities(stream: bool) -> None:
    """One of control tokens alone, as <s> is where a client scores what follows nothing."""

    class OfControlTokens(FakeEngine):
        async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            text = await super().decode(token_ids)
            return "" if skip_special_tokens else text

    async with serving(OfControlTokens()) as served:
        body = {"prompt": [1, 2], "echo": True, "logprobs": 0, "stream": stream}
        answer = await served.call("POST", "/v1/completions", body)
        [choice] = (join(answer.events) if stream else answer.json)["choices"]
        assert choice["text"] == "Hello world"
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5, -0.5]
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_scoring_a_prompt(stream: bool, logprobs: int | None) -> None:
    async with serving() as served:
        body = {
            **{
                "prompt": [[97, 98], [99, 100]],
                "echo": True,
                "max_tokens": 0,
                "logprobs": logprobs,
            },
            **{"stream": stream, "return_token_ids": True},
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = await served.call("POST", "/v1/completions", body)
        whole = join(answer.events) if stream else answer.json
        for choice, text in zip(whole["choices"], ["ab", "cd"], strict=True):
            assert choice["text"] == text
            assert choice["finish_reason"] == "length"
            assert choice["token_ids"] == []
            if logprobs is not None:
                assert choice["logprobs"]["tokens"] == list(text)
                assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
        usage = whole["usages"][-1] if stream else whole["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)
        assert served.engine.streams[0].sampling.max_tokens == 1


async def test_echo_of_a_cut_prompt_is_what_was_used_of_it() -> None:
    async with serving() as served:
        body = {"prompt": "abc", "echo": True, "truncate_prompt_tokens": 2}
        [choice] = (await served.call("POST", "/v1/completions", body)).json["choices"]
        assert choice["text"] == "bcHello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_echo_is_the_assistants_last_message(stream: bool) -> None:
    async with serving() as served:
        said = {"role": "assistant", "content": [{"type": "text", "text": "One"}]}
        for messages, text in (
            ([*CHAT["messages"], said], "OneHello world"),
            (CHAT["messages"], "Hello world"),
        ):
            body = {"messages": messages, "echo": True, "stream": stream}
            answer = await served.call("POST", "/v1/chat/completions", body)
            [choice] = (join(answer.events) if stream else answer.json)["choices"]
            assert choice["message"]["content"] == text


# -------------------------------------------------------------------------------- best_of


async def test_best_of() -> None:
    """The most likely by the mean over their tokens; of equals the earlier."""
    texts = ["low", "high", "none", "mid", "high too"]
    means = [-5.0, -1.0, None, -2.0, -1.0]

    def script(stream: FakeStream) -> None:
        mean = means[stream.id % 5]
        entries = [named(1, mean - 1), named(1, mean + 1)] if mean is not None else []
        given = entries if stream.sampling.logprobs is not None else None
        stream.push(TextDelta(texts[stream.id % 5], [1] * len(entries), given, "stop"))

    async with serving(FakeEngine(script=script)) as served:
        body = {"prompt": ["a", "b"], "best_of": 5, "n": 3, "seed": 1, "prompt_logprobs": 0}
        whole = (await served.call("POST", "/v1/completions", body)).json
        assert [c["text"] for c in whole["choices"]] == ["high", "high too", "mid"] * 2
        assert [c["index"] for c in whole["choices"]] == list(range(6))
        assert all(choice["logprobs"] is None for choice in whole["choices"])
        assert all(choice["prompt_logprobs"] for choice in whole["choices"])
        assert whole["usage"]["completion_tokens"] == 16  # of all that was made
        assert [stream.sampling.seed for stream in served.engine.streams[:5]] == [1, 2, 3, 4, 5]
        assert all(stream.sampling.logprobs == 0 for stream in served.engine.streams)


async def test_best_of_n_is_all_of_them() -> None:
    async with serving() as served:
        body = COMPLETION | {"best_of": 2, "n": 2, "stream": True}
        answer = await served.call("POST", "/v1/completions", body)
        assert len(join(answer.events)["choices"]) == 2
        assert served.engine.streams[0].sampling.logprobs is None


async def test_echo_and_prompt_logprobs_have_numbers_of_their_own() -> None:
    async with serving() as served:
        body = COMPLETION | {"echo": True, "logprobs": 2, "prompt_logprobs": 0}
        [choice] = (await served.call("POST", "/v1/completions", body)).json["choices"]
        assert served.engine.streams[0].sampling.prompt_logprobs == 2
        assert set(choice["prompt_logprobs"][1]) == {"105"}
        assert len(choice["logprobs"]["top_logprobs"][1]) == 3


def test_ranks_that_are_not_told_are_those_of_the_list() -> None:
    best = [named(1, -0.1), named(2, -0.2)]
    [shown] = orjson.loads(orjson.dumps(prompt_logprobs_object([named(2, -0.2, top=best)], 2)))
    assert {token: entry["rank"] for token, entry in shown.items()} == {"2": 2, "1": 1}
    [shown] = orjson.loads(orjson.dumps(prompt_logprobs_object([named(5, -9.0, top=best)], 1)))
    assert {token: entry["rank"] for token, entry in shown.items()} == {"5": None, "1": 1}
