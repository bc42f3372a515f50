"""The official client against the server; it runs in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import openai
import pytest
import trio
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trioserve.errors import QueueFull, RequestFailed

from .client import Served, serving
from .fake_engine import FakeEngine, FakeStream

T = TypeVar("T")
USER: Any = [{"role": "user", "content": "hi"}]


async def with_client(served: Served, use: Callable[[openai.OpenAI], T]) -> T:
    def run() -> T:
        base_url = f"http://127.0.0.1:{served.port}/v1"
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            return use(client)

    return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


async def test_chat() -> None:
    async with serving() as served:
        answer = await with_client(
            served, lambda c: c.chat.completions.create(model="fake", messages=USER, n=2)
        )
        assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 6
        assert answer.usage.prompt_tokens_details is not None


async def test_chat_stream() -> None:
    def use(client: openai.OpenAI) -> list[Any]:
        stream = client.chat.completions.create(
            model="fake", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        return list(stream)

    async with serving() as served:
        chunks = await with_client(served, use)
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello world"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage.completion_tokens == 2
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_completions() -> None:
    def use(client: openai.OpenAI) -> tuple[Any, list[Any]]:
        whole = client.completions.create(model="fake", prompt=["a", "b"], echo=True)
        return whole, list(client.completions.create(model="fake", prompt="a", stream=True))

    async with serving() as served:
        whole, chunks = await with_client(served, use)
        assert [choice.text for choice in whole.choices] == ["aHello world", "bHello world"]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"


async def test_everything_asked_for_at_once_is_of_the_clients_own_types() -> None:
    """The client builds its objects without checking; here what came is checked."""
    sampling = {
        **{"n": 2, "seed": 1, "stop": ["x"], "temperature": 0.5, "top_p": 0.9, "user": "me"},
        **{"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 1}},
    }
    extra = {"return_token_ids": True, "include_timings": True, "top_k": 5, "min_p": 0.1}
    async with serving() as served:
        chat = {"messages": USER, "logprobs": True, "top_logprobs": 2} | sampling | extra
        completion = {"prompt": ["a", "b"], "logprobs": 2} | sampling | extra
        options = {"stream": True, "stream_options": {"include_usage": True}}
        asked = chat | {"prompt_logprobs": 1}
        whole = await served.call("POST", "/v1/chat/completions", asked)
        ChatCompletion.model_validate_json(whole.body)
        for event in (await served.call("POST", "/v1/chat/completions", chat | options)).events[
            :-1
        ]:
            ChatCompletionChunk.model_validate(event)
        whole = await served.call("POST", "/v1/completions", completion)
        Completion.model_validate_json(whole.body)


async def test_fields_beyond_openais_go_through_extra_body() -> None:
    def use(client: openai.OpenAI) -> tuple[Any, Any]:
        extra = {"prompt_logprobs": 1, "return_token_ids": True, "include_timings": True}
        chat = client.chat.completions.create(
            model="fake", messages=USER, extra_body=extra, reasoning_effort="low"
        )
        scored = client.completions.create(
            model="fake", prompt="ab", echo=True, max_tokens=0, logprobs=1
        )
        return chat, scored

    async with serving() as served:
        chat, scored = await with_client(served, use)
        assert chat.prompt_token_ids == [104, 105]
        assert chat.choices[0].token_ids == [7, 7]
        assert chat.prompt_logprobs[1]["105"]["decoded_token"] == "i"
        assert chat.metrics["time_to_first_token_ms"] >= 0
        assert scored.choices[0].text == "ab"
        assert scored.choices[0].logprobs.token_logprobs == [None, -0.25]
        assert scored.usage.completion_tokens == 0


async def test_models() -> None:
    async with serving() as served:
        ids = await with_client(served, lambda c: [model.id for model in c.models.list()])
        assert ids == ["fake", "org/fake"]
        one = await with_client(served, lambda c: c.models.retrieve("fake"))
        assert one.id == "fake"


async def test_errors_are_the_clients_own_classes() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:

        async def fails(kind: type[openai.APIStatusError], **fields: Any) -> Any:
            def use(client: openai.OpenAI) -> Any:
                with pytest.raises(kind) as caught:
                    client.completions.create(**({"model": "fake", "prompt": "a"} | fields))
                return caught.value

            return await with_client(served, use)

        missing = await fails(openai.NotFoundError, model="gpt-5")
        assert missing.code == "model_not_found"
        too_long = await fails(openai.BadRequestError, prompt="x" * 5000)
        assert too_long.code == "context_length_exceeded"
        assert (await fails(openai.BadRequestError, temperature=-1)).param == "temperature"
        engine.refuse = QueueFull("full")
        assert (await fails(openai.RateLimitError)).response.headers["retry-after"] == "1"


async def test_error_in_a_stream_is_raised() -> None:
    def script(stream: FakeStream) -> None:
        stream.say("a")
        stream.fail(RequestFailed("the worker died"))

    def use(client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(model="fake", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="the worker died"):
            list(stream)

    async with serving(FakeEngine(script=script)) as served:
        await with_client(served, use)


async def test_client_that_breaks_off_a_stream() -> None:
    engine = FakeEngine(script=lambda stream: stream.say("a"))

    def use(client: openai.OpenAI) -> None:
        with client.chat.completions.create(model="fake", messages=USER, stream=True) as stream:
            next(iter(stream))

    async with serving(engine) as served:
        await with_client(served, use)
        with trio.fail_after(1):
            await engine.streams[0].closed.wait()
        assert engine.streams[0].aborted
