"""The official ``anthropic`` client, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import TIMEOUT_S, TO_BE_STOPPED, Table, Target, equal, raises

PACKAGES = ("anthropic",)
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS = {key: value for key, value in TO_BE_STOPPED.items() if key != "max_tokens"}


def run(target: Target, table: Table) -> None:
    import anthropic

    with anthropic.Anthropic(
        base_url=target.url, api_key=target.key, max_retries=0, timeout=TIMEOUT_S
    ) as client:
        messages(client, target, table)
        errors(client, target, table)
        leaving(client, target, table)
    asyncio.run(asynchronous(target, table))


def messages(client: Any, target: Target, table: Table) -> None:
    fixed: dict[str, Any] = {"model": target.model, "messages": USER, "max_tokens": 12}
    seed: dict[str, Any] = {"seed": 1}
    text = ""
    with table.check("messages.create: text, stop reason, usage"):
        whole = client.messages.create(**fixed, extra_body=seed)
        equal((whole.type, whole.role), ("message", "assistant"))
        [block] = whole.content
        text = block.text
        assert text
        assert whole.stop_reason in ("max_tokens", "end_turn")
        assert whole.usage.output_tokens <= 12
    with table.check("messages.stream: text_stream, get_final_message"):
        with client.messages.stream(**fixed, extra_body=seed) as stream:
            equal("".join(stream.text_stream), text)
            final = stream.get_final_message()
        equal(final.content[0].text, text)
        equal(final.usage.output_tokens, whole.usage.output_tokens)
    with table.check("messages.create(stream=True): order of events"):
        kinds = [event.type for event in client.messages.create(**fixed, stream=True)]
        equal(kinds[:2], ["message_start", "content_block_start"])
        equal(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"])
    with table.check("stop_sequences"):
        stop = next(c for c in text[2:] if c.isalnum())
        stopped = client.messages.create(**fixed, stop_sequences=[stop], extra_body=seed)
        equal((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", stop))
        equal(stopped.content[0].text, text[: text.index(stop)])
    with table.check("system, blocks, cache_control, prefill, sampling"):
        block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        client.messages.create(
            model=target.model,
            max_tokens=4,
            system=[block],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
                {"role": "assistant", "content": "The answer is"},
            ],
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 20},
            metadata={"user_id": "someone"},
        )
    with table.check("messages.count_tokens counts what create uses"):
        counted = client.messages.count_tokens(model=target.model, messages=USER, system="Brief.")
        used = client.messages.create(**fixed, system="Brief.").usage
        equal(counted.input_tokens, used.input_tokens + (used.cache_read_input_tokens or 0))
    with table.check("with_raw_response, request id"):
        raw = client.messages.with_raw_response.create(**fixed)
        equal(raw.request_id, raw.headers["request-id"])
        equal(raw.parse()._request_id, raw.headers["x-request-id"])
    with table.check("models.list and models.retrieve"):
        assert target.model in [model.id for model in client.models.list()]
        equal(client.models.retrieve(target.model).id, target.model)


def errors(client: Any, target: Target, table: Table) -> None:
    import anthropic

    def create(**fields: Any) -> Any:
        fixed: dict[str, Any] = {"model": target.model, "messages": USER, "max_tokens": 4}
        return client.messages.create(**fixed | fields)

    with table.check("400 is a BadRequestError of invalid_request_error"):
        with raises(anthropic.BadRequestError, type="invalid_request_error"):
            create(max_tokens=-1)
        tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
        with raises(anthropic.BadRequestError) as caught:
            create(tools=[tool])
        assert "tools" in str(caught[0])
    with table.check("401 is an AuthenticationError"):
        with raises(anthropic.AuthenticationError, type="authentication_error"):
            client.with_options(api_key="wrong").messages.create(
                model=target.model, messages=USER, max_tokens=4
            )
    with table.check("404 is a NotFoundError"):
        with raises(anthropic.NotFoundError, type="not_found_error"):
            create(model="claude")
    if target.room is None:
        table.leave_out("429 is a RateLimitError", "the server's room is not known")
    else:
        with table.check("429 is a RateLimitError"), target.full():
            with raises(anthropic.RateLimitError, type="rate_limit_error"):
                create()


def leaving(client: Any, target: Target, table: Table) -> None:
    import anthropic

    fixed: dict[str, Any] = {
        "model": target.model,
        "messages": USER,
        "max_tokens": TO_BE_STOPPED["max_tokens"],
        "extra_body": ENDLESS,
    }
    with table.check("a timeout is an APITimeoutError and ends the work"):
        with raises(anthropic.APITimeoutError):
            client.with_options(timeout=0.3).messages.create(**fixed)
        target.wait_for_open(0)
    with table.check("leaving a stream ends the work"):
        with client.messages.stream(**fixed) as stream:
            next(iter(stream.text_stream))
            target.wait_for_open(1)
        target.wait_for_open(0)


async def asynchronous(target: Target, table: Table) -> None:
    import anthropic

    async with anthropic.AsyncAnthropic(
        base_url=target.url, auth_token=target.key, max_retries=0, timeout=TIMEOUT_S
    ) as client:
        with table.check("async, auth_token: four streams at once, one text"):

            async def text() -> str:
                fixed: dict[str, Any] = {"model": target.model, "messages": USER}
                async with client.messages.stream(
                    **fixed, max_tokens=12, extra_body={"seed": 1}
                ) as stream:
                    return await stream.get_final_text()

            texts = await asyncio.gather(*(text() for _ in range(4)))
            equal(len(set(texts)), 1)
