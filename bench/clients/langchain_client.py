"""``langchain-openai`` (chat, responses, completions) and ``langchain-anthropic``."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import TIMEOUT_S, Table, Target, equal, raises

PACKAGES = ("langchain-openai", "langchain-anthropic")
QUESTION = "What is the capital of France?"


def run(target: Target, table: Table) -> None:
    from langchain_openai import ChatOpenAI

    def model(**fields: Any) -> ChatOpenAI:
        fixed: dict[str, Any] = {
            "model": target.model,
            "base_url": target.v1,
            "api_key": target.key,
            "max_retries": 0,
            "timeout": TIMEOUT_S,
            "max_tokens": 12,
            "seed": 1,
        }
        return ChatOpenAI(**fixed | fields)

    chat(model, table)
    errors(model, target, table)
    completions(target, table)
    anthropic(target, table)
    with table.check("ChatOpenAI: ainvoke, astream"):
        asyncio.run(asynchronous(model()))


def chat(model: Any, table: Table) -> None:
    text = ""
    with table.check("ChatOpenAI.invoke: text, usage_metadata, response_metadata"):
        answer = model().invoke(QUESTION)
        text = answer.content
        assert text
        assert answer.usage_metadata["output_tokens"] > 0
        assert answer.response_metadata["finish_reason"] in ("stop", "length")
    with table.check("ChatOpenAI.stream: the same text, usage at the end"):
        whole = None
        for chunk in model(stream_usage=True).stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        equal(whole.content, text)
        assert whole.usage_metadata["output_tokens"] > 0
    with table.check("ChatOpenAI: messages, stop, logprobs, extra_body"):
        stop = next(c for c in text[2:] if c.isalnum())
        asked = [("human", QUESTION)]
        answer = model(logprobs=True, top_logprobs=1, extra_body={"top_k": 50}).invoke(asked)
        assert answer.response_metadata["logprobs"]["content"]
        equal(model().invoke(asked, stop=[stop]).content, text[: text.index(stop)])
    with table.check("ChatOpenAI: prompt | model | parser, batch"):
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import ChatPromptTemplate

        prompt = ChatPromptTemplate([("system", "Be brief."), ("human", "Tell me of {what}.")])
        chain = prompt | model() | StrOutputParser()
        texts = chain.batch([{"what": "Paris"}, {"what": "Rome"}, {"what": "Bern"}])
        equal([bool(answer) for answer in texts], [True] * 3)
    with table.check("ChatOpenAI(use_responses_api=True), whole and streamed"):
        over = model(use_responses_api=True, seed=None, max_tokens=16)
        assert over.invoke(QUESTION).text
        assert "".join(chunk.text for chunk in over.stream(QUESTION))


def errors(model: Any, target: Target, table: Table) -> None:
    import openai
    from langchain_core.exceptions import ContextOverflowError

    with table.check("400, 401, 404 are the openai client's exceptions"):
        with raises(openai.BadRequestError):
            model(temperature=-1).invoke(QUESTION)
        with raises(openai.AuthenticationError):
            model(api_key="wrong").invoke(QUESTION)
        with raises(openai.NotFoundError):
            model(model="nothing").invoke(QUESTION)
    with table.check("400: too long is a ContextOverflowError"):
        with raises(ContextOverflowError):
            model().invoke("word " * 20_000)
    with table.check("bind_tools and with_structured_output are refused by name"):
        schema = {"title": "answer", "type": "object", "properties": {"a": {"type": "string"}}}
        with raises(openai.BadRequestError):
            model().bind_tools([schema]).invoke(QUESTION)
        with raises(openai.BadRequestError):
            model().with_structured_output(schema, method="json_schema").invoke(QUESTION)
    if target.room is None:
        table.leave_out("429 is a RateLimitError", "the server's room is not known")
    else:
        with table.check("429 is a RateLimitError"), target.full():
            with raises(openai.RateLimitError):
                model().invoke(QUESTION)


def completions(target: Target, table: Table) -> None:
    from langchain_openai import OpenAI

    with table.check("OpenAI (completions): invoke, generate of two, stream"):
        model = OpenAI(
            model=target.model, base_url=target.v1, api_key=target.key, max_tokens=12, seed=1
        )
        text = model.invoke("Once upon")
        equal("".join(model.stream("Once upon")), text)
        equal(len(model.generate(["One", "Two"]).generations), 2)


def anthropic(target: Target, table: Table) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage

    with table.check("ChatAnthropic: invoke, stream, token count"):
        model = ChatAnthropic(
            model=target.model, base_url=target.url, api_key=target.key, max_tokens=12
        )
        assert model.invoke(QUESTION).content
        assert "".join(str(chunk.text) for chunk in model.stream(QUESTION))
        assert model.get_num_tokens_from_messages([HumanMessage(QUESTION)]) > 0
    with table.check("ChatAnthropic: too long is a ContextOverflowError"):
        with raises(ContextOverflowError):
            model.invoke("word " * 20_000)


async def asynchronous(model: Any) -> None:
    text = (await model.ainvoke(QUESTION)).content
    equal("".join([chunk.content async for chunk in model.astream(QUESTION)]), text)
