"""The official ``openai`` client, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import TIMEOUT_S, TO_BE_STOPPED, Table, Target, equal, raises

ENDLESS = {"ignore_eos": True}
PACKAGES = ("openai",)
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def run(target: Target, table: Table) -> None:
    import openai

    with openai.OpenAI(
        base_url=target.v1, api_key=target.key, max_retries=0, timeout=TIMEOUT_S
    ) as client:
        models(client, target, table)
        chat(client, target, table)
        completions(client, target, table)
        responses(client, target, table)
        errors(client, target, table)
        raw(client, target, table)
        leaving(client, target, table)
    asyncio.run(asynchronous(target, table))


def models(client: Any, target: Target, table: Table) -> None:
    with table.check("models.list and models.retrieve"):
        assert target.model in [model.id for model in client.models.list()]
        equal(client.models.retrieve(target.model).id, target.model)


def chat(client: Any, target: Target, table: Table) -> None:
    import openai

    create = client.chat.completions.create
    fixed: dict[str, Any] = {"model": target.model, "messages": USER, "seed": 1, "max_tokens": 12}
    whole = None
    with table.check("chat: text, finish reason, usage"):
        whole = create(**fixed)
        [choice] = whole.choices
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        usage = whole.usage
        equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        assert usage.prompt_tokens_details.cached_tokens >= 0
    with table.check("chat, streamed: the same text, a last chunk with usage"):
        chunks = list(create(**fixed, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        equal(text, whole.choices[0].message.content)
        equal(chunks[0].choices[0].delta.role, "assistant")
        assert not chunks[-1].choices
        equal(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
    with table.check("chat.completions.stream: events, get_final_completion"):
        text = whole.choices[0].message.content
        with client.chat.completions.stream(**fixed, stop=one_of(text)) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
        equal(final.choices[0].message.content, text[: text.index(one_of(text))])
    with table.check("its helper raises where max_tokens ended it"):
        with raises(openai.LengthFinishReasonError):
            with client.chat.completions.stream(**fixed, extra_body=ENDLESS) as stream:
                stream.get_final_completion()
    with table.check("chat: n and logprobs"):
        answer = create(**fixed, n=3, logprobs=True, top_logprobs=2)
        equal([choice.index for choice in answer.choices], [0, 1, 2])
        for choice in answer.choices:
            for token in choice.logprobs.content:
                assert token.logprob <= 0
                assert 1 <= len(token.top_logprobs) <= 2
            joined = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
            equal(joined.decode(errors="replace"), choice.message.content)
    with table.check("chat: stop"):
        text = whole.choices[0].message.content
        stopped = create(**fixed, stop=[one_of(text)])
        equal(stopped.choices[0].message.content, text[: text.index(one_of(text))])
        equal(stopped.choices[0].finish_reason, "stop")
    with table.check("chat: roles, parts, null content, penalties, logit_bias"):
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12"},
            *USER,
        ]
        create(
            **fixed | {"messages": messages},
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={"5": -100},
            response_format={"type": "text"},
            user="someone",
            top_p=0.9,
            temperature=0.5,
        )


def one_of(text: str) -> str:
    """A character to stop at, not at the very beginning."""
    return next(c for c in text[2:] if c.isalnum())


CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "degrees", "arguments": '{"place": "Paris"}'},
}


def completions(client: Any, target: Target, table: Table) -> None:
    create = client.completions.create
    fixed: dict[str, Any] = {"model": target.model, "seed": 1, "max_tokens": 12}
    with table.check("completions: lists of texts and of token ids, n"):
        texts = create(**fixed, prompt=["One", "Two"], n=2)
        equal([choice.index for choice in texts.choices], [0, 1, 2, 3])
        create(**fixed, prompt=[[5, 6, 7], [8, 9]])
        equal(create(**fixed, prompt=[5, 6, 7]).usage.prompt_tokens, 3)
    with table.check("completions, streamed: the same text"):
        whole = create(**fixed, prompt="Once upon a time").choices[0].text
        chunks = list(create(**fixed, prompt="Once upon a time", stream=True))
        equal("".join(chunk.choices[0].text for chunk in chunks), whole)
    with table.check("completions: echo, logprobs, max_tokens 0 (scoring)"):
        scored = create(
            **fixed | {"max_tokens": 0}, prompt=[[5, 6, 7]], echo=True, logprobs=1
        ).choices[0]
        equal(scored.logprobs.token_logprobs[0], None)
        equal(len(scored.logprobs.token_logprobs), 3)
        text = "Once upon a time"
        shown = create(**fixed | {"max_tokens": 0}, prompt=text, echo=True, logprobs=1).choices[0]
        equal(shown.text, text)
        assert "".join(shown.logprobs.tokens).endswith(text)
    with table.check("completions: best_of"):
        equal(len(create(**fixed, prompt="One", n=1, best_of=2).choices), 1)


def responses(client: Any, target: Target, table: Table) -> None:
    create = client.responses.create
    fixed: dict[str, Any] = {"model": target.model, "max_output_tokens": 16}
    first = None
    with table.check("responses: output_text, usage, retrieve, previous_response_id"):
        first = create(**fixed, input="Hello", instructions="Be brief.")
        assert first.output_text
        assert first.usage.output_tokens > 0
        equal(client.responses.retrieve(first.id).output_text, first.output_text)
        second = create(**fixed, input="And you?", previous_response_id=first.id)
        assert second.usage.input_tokens > first.usage.input_tokens
        assert len(client.responses.input_items.list(second.id).data) >= 3
    with table.check("responses, streamed: typed events, get_final_response"):
        seed: dict[str, Any] = {"seed": 1}
        text = create(**fixed, input="Hello", extra_body=seed).output_text
        seed["stop"] = one_of(text)
        with client.responses.stream(**fixed, input="Hello", extra_body=seed) as stream:
            events = list(stream)
            final = stream.get_final_response()
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        equal("".join(deltas), final.output_text)
        equal(final.output_text, text[: text.index(seed["stop"])])
        equal(events[0].type, "response.created")
        equal(events[-1].type, "response.completed")
    with table.check("responses: background, cancel, delete"):
        started = create(
            **fixed | {"max_output_tokens": 2000},
            input="Hello",
            background=True,
            extra_body={"ignore_eos": True, "min_tokens": 2000},
        )
        assert started.status in ("queued", "in_progress")
        equal(client.responses.cancel(started.id).status, "cancelled")
        client.responses.delete(first.id)
    with table.check("responses: one that is gone is a NotFoundError"):
        import openai

        with raises(openai.NotFoundError, code="response_not_found"):
            client.responses.retrieve(first.id)


def errors(client: Any, target: Target, table: Table) -> None:
    import openai

    def create(**fields: Any) -> Any:
        fixed: dict[str, Any] = {"model": target.model, "messages": USER, "max_tokens": 4}
        return client.chat.completions.create(**fixed | fields)

    with table.check("400 is a BadRequestError with param"):
        with raises(openai.BadRequestError, param="temperature", code="invalid_request"):
            create(temperature=-1)
    with table.check("400: a prompt that is too long"):
        with raises(openai.BadRequestError, code="context_length_exceeded"):
            create(messages=[{"role": "user", "content": "word " * 20_000}])
    with table.check("400: tools, JSON schema and images are refused by name"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        with raises(openai.BadRequestError, param="tools"):
            create(tools=[tool])
        schema = {"name": "s", "schema": {"type": "object"}}
        with raises(openai.BadRequestError):
            create(response_format={"type": "json_schema", "json_schema": schema})
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        with raises(openai.BadRequestError):
            create(messages=[{"role": "user", "content": [image]}])
    with table.check("401 is an AuthenticationError"):
        wrong = client.with_options(api_key="wrong")
        with raises(openai.AuthenticationError, code="invalid_api_key"):
            wrong.models.list()
    with table.check("404: a model and a route that are not there"):
        with raises(openai.NotFoundError, code="model_not_found", param="model"):
            create(model="gpt-5")
        with raises(openai.NotFoundError, code="route_not_found"):
            client.embeddings.create(model=target.model, input="a")
    if target.room is None:
        table.leave_out("429 is a RateLimitError", "the server's room is not known")
        return
    with table.check("429 is a RateLimitError with Retry-After"), target.full():
        with raises(openai.RateLimitError, code="queue_full") as caught:
            create()
        assert int(caught[0].response.headers["retry-after"]) >= 1
    with table.check("429: the client's own retries get through"):
        with target.full():
            import threading

            result: list[Any] = []
            patient = client.with_options(max_retries=5)
            thread = threading.Thread(
                target=lambda: result.append(
                    patient.chat.completions.create(model=target.model, messages=USER, max_tokens=4)
                )
            )
            thread.start()
            thread.join(0.3)
            assert not result
        thread.join()
        assert result[0].choices


def raw(client: Any, target: Target, table: Table) -> None:
    with table.check("with_raw_response: headers, request id, parse"):
        answer = client.chat.completions.with_raw_response.create(
            model=target.model,
            messages=USER,
            max_tokens=4,
            extra_headers={"X-Request-Id": "chosen-by-me"},
        )
        equal(answer.headers["x-request-id"], "chosen-by-me")
        parsed = answer.parse()
        equal(parsed._request_id, "chosen-by-me")
        equal(parsed.id, "chatcmpl-chosen-by-me")
    with table.check("with_streaming_response: lines as they are"):
        with client.chat.completions.with_streaming_response.create(
            model=target.model, messages=USER, max_tokens=4, stream=True
        ) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        equal(lines[-1], "data: [DONE]")
    with table.check("an unknown field is named in a header"):
        answer = client.chat.completions.with_raw_response.create(
            model=target.model, messages=USER, max_tokens=4, extra_body={"made_up": 1}
        )
        equal(answer.headers["x-trioserve-ignored-fields"], "made_up")


def leaving(client: Any, target: Target, table: Table) -> None:
    import openai

    fixed: dict[str, Any] = {
        "model": target.model,
        "messages": USER,
        "extra_body": TO_BE_STOPPED,
    }
    with table.check("a timeout is an APITimeoutError and ends the work"):
        with raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(**fixed)
        target.wait_for_open(0)
    with table.check("closing a stream ends the work"):
        with client.chat.completions.create(**fixed, stream=True) as stream:
            for _, chunk in zip(range(4), stream, strict=False):
                assert chunk.choices
            target.wait_for_open(1)
        target.wait_for_open(0)
    with table.check("timeout_s: 504 is an InternalServerError, not sent again"):
        with raises(openai.InternalServerError, code="deadline_exceeded", status_code=504):
            body = TO_BE_STOPPED | {"timeout_s": 0.2}
            client.with_options(max_retries=2).chat.completions.create(
                model=target.model, messages=USER, extra_body=body
            )


async def asynchronous(target: Target, table: Table) -> None:
    import openai

    fixed: dict[str, Any] = {"model": target.model, "messages": USER, "seed": 1, "max_tokens": 12}
    async with openai.AsyncOpenAI(
        base_url=target.v1, api_key=target.key, max_retries=0, timeout=TIMEOUT_S
    ) as client:
        create = client.chat.completions.create
        with table.check("async: four at once, whole and streamed, give one text"):

            async def streamed() -> str:
                chunks = [chunk async for chunk in await create(**fixed, stream=True)]
                return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

            async def whole() -> str | None:
                return (await create(**fixed)).choices[0].message.content

            texts = await asyncio.gather(whole(), streamed(), whole(), streamed())
            equal(len(set(texts)), 1)
        with table.check("async: a cancelled task ends its work"):
            task = asyncio.create_task(
                create(model=target.model, messages=USER, extra_body=TO_BE_STOPPED)
            )
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.to_thread(target.wait_for_open, 0)
        with table.check("async: responses and models"):
            answer = await client.responses.create(
                model=target.model, input="Hello", max_output_tokens=16
            )
            assert answer.output_text
            assert [model.id async for model in client.models.list()]
