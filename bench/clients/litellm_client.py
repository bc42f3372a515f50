"""``litellm``, by way of four of its providers."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from checks import TIMEOUT_S, TO_BE_STOPPED, Table, Target, equal, raises

PACKAGES = ("litellm",)
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def run(target: Target, table: Table) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch a list of prices
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    for provider in ("openai", "hosted_vllm"):
        chat(provider, target, table)
    completions(target, table)
    others(target, table)
    errors(target, table)
    asyncio.run(asynchronous(target, table))


def asked(target: Target, provider: str = "openai") -> dict[str, Any]:
    return {
        "model": f"{provider}/{target.model}",
        "api_base": target.v1,
        "api_key": target.key,
        "timeout": TIMEOUT_S,
        "num_retries": 0,
        "max_retries": 0,
        "max_tokens": 12,
    }


def chat(provider: str, target: Target, table: Table) -> None:
    import litellm

    fixed = asked(target, provider) | {"messages": USER, "seed": 1}
    text = ""
    with table.check(f"{provider}: completion, usage, cached tokens"):
        whole = litellm.completion(**fixed)
        text = whole.choices[0].message.content
        assert text
        equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens)
        assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    with table.check(f"{provider}: streamed, stream_chunk_builder, usage"):
        chunks = list(
            litellm.completion(**fixed, stream=True, stream_options={"include_usage": True})
        )
        built = litellm.stream_chunk_builder(chunks)
        equal(built.choices[0].message.content, text)
        equal(built.usage.completion_tokens, whole.usage.completion_tokens)
    with table.check(f"{provider}: n, stop, logprobs, penalties"):
        stop = next(c for c in text[2:] if c.isalnum())
        stopped = litellm.completion(**fixed, stop=[stop], logprobs=True, top_logprobs=1)
        equal(stopped.choices[0].message.content, text[: text.index(stop)])
        equal(stopped.choices[0].finish_reason, "stop")
        assert stopped.choices[0].logprobs.content[0].logprob <= 0
        many = litellm.completion(**fixed, n=2, presence_penalty=0.5, logit_bias={"5": -100})
        equal(len(many.choices), 2)
    with table.check(f"{provider}: vLLM's fields as keywords"):
        extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
        answer = litellm.completion(**fixed, **extra, return_token_ids=True)
        equal(answer.usage.completion_tokens, 12)


def completions(target: Target, table: Table) -> None:
    import litellm

    fixed = asked(target, "text-completion-openai") | {"prompt": "Once upon", "seed": 1}
    with table.check("text_completion, whole and streamed"):
        text = litellm.text_completion(**fixed).choices[0].text
        chunks = litellm.text_completion(**fixed, stream=True)
        equal("".join(chunk.choices[0].text or "" for chunk in chunks), text)


def others(target: Target, table: Table) -> None:
    import litellm

    with table.check("responses"):
        where = {key: asked(target)[key] for key in ("model", "api_base", "api_key")}
        answer = litellm.responses(**where, input="Hello", max_output_tokens=16)
        [message] = answer.output
        assert message.content[0].text
    with table.check("anthropic: completion over /v1/messages, whole and streamed"):
        where = asked(target, "anthropic") | {"api_base": target.url, "messages": USER}
        whole = litellm.completion(**where, extra_body={"seed": 1})
        assert whole.choices[0].message.content
        chunks = list(litellm.completion(**where, stream=True))
        assert litellm.stream_chunk_builder(chunks).choices[0].message.content


def errors(target: Target, table: Table) -> None:
    import litellm

    fixed = asked(target) | {"messages": USER}
    with table.check("400, 401, 404 are its own exceptions"):
        with raises(litellm.BadRequestError):
            litellm.completion(**fixed, temperature=-1)
        with raises(litellm.AuthenticationError):
            litellm.completion(**fixed | {"api_key": "wrong"})
        with raises(litellm.NotFoundError):
            litellm.completion(**fixed | {"model": "openai/nothing"})
    with table.check("400: too long is a ContextWindowExceededError"):
        with raises(litellm.ContextWindowExceededError):
            long = [{"role": "user", "content": "word " * 20_000}]
            litellm.completion(**fixed | {"messages": long})
    with table.check("a timeout is a Timeout and ends the work"):
        with raises(litellm.Timeout):
            litellm.completion(**fixed | TO_BE_STOPPED | {"timeout": 0.3})
        target.wait_for_open(0)
    if target.room is None:
        table.leave_out("429 is a RateLimitError", "the server's room is not known")
    else:
        with table.check("429 is a RateLimitError"), target.full():
            with raises(litellm.RateLimitError):
                litellm.completion(**fixed)


async def asynchronous(target: Target, table: Table) -> None:
    import litellm

    with table.check("acompletion: four streams at once give one text"):

        async def text() -> str:
            stream = await litellm.acompletion(**asked(target), messages=USER, seed=1, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        equal(len(set(await asyncio.gather(*(text() for _ in range(4))))), 1)
