"""/v1/responses as the official client and raw bytes see it: making, streaming, keeping."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from trioserve.engine.api import TextDelta
from trioserve.errors import InvalidRequest, RequestFailed

from .client import Served, serving
from .fake_engine import FakeEngine, FakeStream
from .protocols import named_events
from .test_openai import with_client

PATH = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


async def made(served: Served, **fields: Any) -> dict[str, Any]:
    answer = await served.call("POST", PATH, {"input": "hi"} | fields)
    assert answer.status == 200, answer.body
    response: dict[str, Any] = answer.json
    Response.model_validate(response, strict=True)
    return response


# ------------------------------------------------------------------------------ the object


async def test_whole_response_has_the_official_shape() -> None:
    async with serving() as served:
        response = await made(
            served,
            instructions="be brief",
            metadata={"a": "b"},
            temperature=0.5,
            top_p=0.9,
            max_output_tokens=20,
            user="me",
            safety_identifier="s",
            prompt_cache_key="k",
            parallel_tool_calls=False,
            tool_choice="none",
            tools=[],
            text={"format": {"type": "text"}},
            truncation="disabled",
            service_tier="auto",
            include=["reasoning.encrypted_content"],
            max_tool_calls=3,
        )
        assert Response.model_validate(response).output_text == "Hello world"
        assert response["id"].startswith("resp_")
        assert response["status"] == "completed"
        assert response["completed_at"] >= response["created_at"]
        assert response["model"] == "fake"
        assert response["error"] is response["incomplete_details"] is None
        [item] = response["output"]
        assert (item["role"], item["status"]) == ("assistant", "completed")
        assert response["usage"] == {
            "input_tokens": len("be briefhi"),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len("be briefhi") + 2,
        }
        echoed = {
            "instructions": "be brief",
            "metadata": {"a": "b"},
            "temperature": 0.5,
            "top_p": 0.9,
            "max_output_tokens": 20,
            "max_tool_calls": 3,
            "user": "me",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "service_tier": "default",
            "store": True,
            "background": False,
            "previous_response_id": None,
        }
        assert {name: response[name] for name in echoed} == echoed
        sampling = served.engine.streams[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 20)
        assert served.engine.rendered[0] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ]


async def test_length_is_incomplete() -> None:
    engine = FakeEngine(script=lambda work: work.say("cut", finish="length"))
    async with serving(engine) as served:
        response = await made(served)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
        assert "completed_at" not in response
        answer = await served.call("POST", PATH, {"input": "hi", "stream": True})
        last = named_events(answer.body)[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["output"][0]["content"][0]["text"] == "cut"


async def test_ids_are_fresh_whatever_the_client_calls_its_request() -> None:
    async with serving() as served:
        ids = set()
        for _ in range(2):
            answer = await served.call("POST", PATH, {"input": "hi"}, X_Request_Id="same")
            ids.add(answer.json["id"])
            assert answer.headers["x-request-id"] == "same"
        assert len(ids) == 2


# --------------------------------------------------------------------------------- streams


async def test_events_come_in_the_official_order() -> None:
    async with serving() as served:
        answer = await served.call("POST", PATH, {"input": "hi", "stream": True})
        events = named_events(answer.body)
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            EVENT.validate_python(event, strict=True)
        begun = [event["response"] for event in events[:2]]
        assert all((r["status"], r["output"]) == ("in_progress", []) for r in begun)
        assert begun[0]["usage"] is None
        item_ids = {event["item_id"] for event in events if "item_id" in event}
        assert item_ids == {events[2]["item"]["id"]} == {events[-2]["item"]["id"]}
        assert events[2]["item"]["content"] == []
        kept = await served.call("GET", f"{PATH}/{begun[0]['id']}")
        assert kept.json == events[-1]["response"]
        assert b"[DONE]" not in answer.body


async def test_api_07_logprobs_streamed_and_whole() -> None:
    async with serving() as served:
        asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = (await made(served, **asked))["output"][0]["content"][0]
        assert [len(token["top_logprobs"]) for token in whole["logprobs"]] == [2, 2]
        assert "".join(token["token"] for token in whole["logprobs"]) == whole["text"]
        answer = await served.call("POST", PATH, {"input": "hi", "stream": True} | asked)
        events = named_events(answer.body)
        for event in events:
            EVENT.validate_python(event, strict=True)
        deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
        assert [token for delta in deltas for token in delta] == whole["logprobs"]
        [done] = [e for e in events if e["type"] == "response.output_text.done"]
        assert done["logprobs"] == whole["logprobs"]
        for only, number in (({"include": asked["include"]}, 0), ({"top_logprobs": 1}, 1)):
            part = (await made(served, **only))["output"][0]["content"][0]
            assert [len(token["top_logprobs"]) for token in part["logprobs"]] == [number] * 2
        assert (await made(served))["output"][0]["content"][0]["logprobs"] == []


async def test_held_back_text_shows_nothing_and_is_not_lost() -> None:
    def script(work: FakeStream) -> None:
        work.push(TextDelta("", [1]), TextDelta("ab", [2]), TextDelta("", [3], None, "stop"))

    async with serving(FakeEngine(script=script)) as served:
        answer = await served.call("POST", PATH, {"input": "hi", "stream": True})
        deltas = [e for e in named_events(answer.body) if e["type"].endswith("text.delta")]
        assert [event["delta"] for event in deltas] == ["ab"]


async def test_official_client_streams() -> None:
    def use(client: openai.OpenAI) -> tuple[Any, list[Any]]:
        with client.responses.stream(model="fake", input="hi") as stream:
            kinds = [event.type for event in stream]
            return stream.get_final_response(), kinds

    async with serving() as served:
        final, kinds = await with_client(served, use)
        assert final.output_text == "Hello world"
        assert final.usage.total_tokens == 4
        assert kinds[-1] == "response.completed"


async def test_official_client_sees_a_failure() -> None:
    def script(work: FakeStream) -> None:
        work.say("a")
        work.fail(RequestFailed("the worker died"))

    def use(client: openai.OpenAI) -> Any:
        return list(client.responses.create(model="fake", input="hi", stream=True))[-1]

    engine = FakeEngine(script=script)
    async with serving(engine) as served:
        last = await with_client(served, use)
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error.code == "server_error"
        assert last.response.error.message == "the worker died"
        assert last.response.output_text == "a"
        kept = await served.call("GET", f"{PATH}/{last.response.id}")
        assert kept.json["status"] == "failed"
        engine.script = lambda work: work.say("x", finish="stop")
        asked = {"input": "go on", "previous_response_id": last.response.id}
        answer = await served.call("POST", PATH, asked)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "previous_response_id"


# --------------------------------------------------------------------------------- keeping


async def test_official_client_keeps_a_conversation() -> None:
    def use(client: openai.OpenAI) -> list[Any]:
        first = client.responses.create(model="fake", input="one", instructions="be brief")
        second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
        assert client.responses.retrieve(first.id) == first
        items = client.responses.input_items.list(second.id, order="asc")
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        # What went before is part of the second one, which stays.
        client.responses.create(model="fake", input="three", previous_response_id=second.id)
        return [item.model_dump() for item in items]

    engine = FakeEngine()
    async with serving(engine) as served:
        items = await with_client(served, use)
        assert engine.rendered[1] == [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "Hello world"},
            {"role": "user", "content": "two"},
        ]
        assert [message["content"] for message in engine.rendered[2]] == [
            *("one", "Hello world", "two", "Hello world", "three")
        ]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
        assert items[1]["content"][0]["text"] == "Hello world"


async def test_what_a_query_asks_for_is_there_or_refused() -> None:
    async with serving() as served:
        path = f"{PATH}/{(await made(served))['id']}"
        logprobs = "include[]=message.output_text.logprobs"
        for query in (logprobs, "include_obfuscation=false", "stream=false"):
            assert (await served.call("GET", f"{path}?{query}")).status == 200
        for query in ("include[]=x", "include=x", "include_obfuscation=true", "stream=1"):
            answer = await served.call("GET", f"{path}?{query}")
            assert answer.status == 400, query
            assert query.startswith(answer.json["error"]["param"])
        for query in ("starting_after=-1", "starting_after=x", "starting_after=99999999999"):
            assert (await served.call("GET", f"{path}?stream=true&{query}")).status == 400


async def test_what_was_not_stored_is_not_found() -> None:
    async with serving() as served:
        response = await made(served, store=False)
        assert response["store"] is False
        for method, path in (
            ("GET", f"{PATH}/{response['id']}"),
            ("DELETE", f"{PATH}/{response['id']}"),
            ("POST", f"{PATH}/{response['id']}/cancel"),
            ("GET", f"{PATH}/{response['id']}/input_items"),
            ("GET", f"{PATH}/{response['id']}?stream=true"),
            ("GET", f"{PATH}/resp_{'%20' * 200}"),
        ):
            answer = await served.call(method, path)
            assert answer.status == 404, path
            assert answer.json["error"]["code"] == "response_not_found"
            assert len(answer.json["error"]["message"]) < 300
        asked = {"input": "hi", "previous_response_id": response["id"]}
        answer = await served.call("POST", PATH, asked)
        assert answer.status == 400
        assert answer.json["error"]["code"] == "previous_response_not_found"
        assert answer.json["error"]["param"] == "previous_response_id"


async def test_the_oldest_make_room() -> None:
    async with serving(max_stored_responses=2) as served:
        ids = [(await made(served, input=text))["id"] for text in ("a", "b", "c")]
        found = [(await served.call("GET", f"{PATH}/{id}")).status for id in ids]
        assert found == [404, 200, 200]


async def test_a_server_that_stores_nothing_says_so() -> None:
    async with serving(max_stored_responses=0) as served:
        response = await made(served)
        assert response["store"] is False
        assert (await served.call("GET", f"{PATH}/{response['id']}")).status == 404
        for name in ("store", "background"):
            answer = await served.call("POST", PATH, {"input": "hi", name: True})
            assert answer.status == 400
            assert answer.json["error"]["param"] == name
            assert "max_stored_responses" in answer.json["error"]["message"]


async def test_a_response_larger_than_the_store_is_answered_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(max_stored_response_bytes=1000) as served:
        response = await made(served)
        assert (await served.call("GET", f"{PATH}/{response['id']}")).status == 404
        assert "larger than http.max_stored_response_bytes" in caplog.text


async def test_input_items_in_pages() -> None:
    async with serving() as served:
        messages = [{"role": "user", "content": str(index)} for index in range(5)]
        response = await made(served, input=messages)
        path = f"{PATH}/{response['id']}/input_items"

        async def listed(query: str) -> tuple[str, bool]:
            answer = await served.call("GET", path + query)
            page = answer.json
            if page["data"]:
                assert page["first_id"] == page["data"][0]["id"]
                assert page["last_id"] == page["data"][-1]["id"]
            return "".join(i["content"][0]["text"] for i in page["data"]), page["has_more"]

        assert await listed("") == ("43210", False)
        assert await listed("?order=asc&limit=2") == ("01", True)
        last = (await served.call("GET", path + "?order=asc&limit=2")).json["last_id"]
        assert await listed(f"?order=asc&limit=3&after={last}") == ("234", False)
        assert await listed(f"?after={last}") == ("0", False)
        for query in ("?limit=0", "?limit=101", "?limit=x", "?order=up", "?after=no", "?limit=-1"):
            answer = await served.call("GET", path + query)
            assert answer.status == 400, query
            assert answer.json["error"]["param"] in query


# ------------------------------------------------------------------------------ truncation


async def test_truncation_leaves_out_the_oldest() -> None:
    engine = FakeEngine(max_model_len=40)
    async with serving(engine) as served:
        items = [{"role": "user", "content": str(index) * 10} for index in range(6)]
        asked = {"input": items, "instructions": "be", "max_output_tokens": 8}
        refused = await served.call("POST", PATH, asked)
        assert refused.status == 400
        assert refused.json["error"]["param"] == "input"
        assert refused.json["error"]["code"] == "context_length_exceeded"
        await made(served, **asked, truncation="auto")
        # 40 tokens less 8 for the answer hold the instructions and three items of ten.
        assert bytes(engine.streams[-1].prompt_token_ids) == b"be" + b"".join(
            str(index).encode() * 10 for index in (3, 4, 5)
        )
        await made(served, input="x" * 39, truncation="auto")
        assert len(engine.streams[-1].prompt_token_ids) == 39
        # One that fills the context to its end leaves no room either.
        filling = [{"role": "user", "content": text} for text in ("y" * 30, "z" * 10)]
        await made(served, input=filling, truncation="auto")
        assert bytes(engine.streams[-1].prompt_token_ids) == b"z" * 10
        items[-1]["content"] = "z" * 40
        answer = await served.call("POST", PATH, {"input": items, "truncation": "auto"})
        assert answer.status == 400
        assert answer.json["error"]["code"] == "context_length_exceeded"


async def test_a_long_conversation_is_decoded_and_gone_on_from() -> None:
    engine = FakeEngine(max_model_len=10**6)
    async with serving(engine) as served:
        first = await made(served, input="x" * 300_000)
        second = await made(served, input="y", previous_response_id=first["id"])
        contents = [message["content"] for message in engine.rendered[-1]]
        assert contents == ["x" * 300_000, "Hello world", "y"]
        items = (await served.call("GET", f"{PATH}/{second['id']}/input_items")).json["data"]
        assert [len(item["content"][0]["text"]) for item in items] == [1, 11, 300_000]


async def test_what_the_template_refuses_is_the_inputs_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*args: Any, **kwargs: Any) -> list[int]:
        raise InvalidRequest("roles must alternate", param="messages")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "render_chat", refuse)
    async with serving(engine) as served:
        answer = await served.call("POST", PATH, {"input": "hi"})
        assert answer.status == 400
        assert answer.json["error"]["message"] == "roles must alternate"
        assert answer.json["error"]["param"] == "input"
