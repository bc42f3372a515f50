"""/v1/responses and /v1/messages on the real engine, by the official clients."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from .server import Server, running

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if not loop.last or add_generation_prompt %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LONG: dict[str, Any] = {"ignore_eos": True, "min_tokens": 1000}


def config(directory: Path, **engine: Any) -> dict[str, dict[str, Any]]:
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    return {
        "model": {
            "source": "random:llama?num_layers=1&hidden_size=32",
            "chat_template": str(template),
            "served_names": ["tiny"],
        },
        "device": {"kind": "simulated", "simulated_step_s": 0.01},
        "engine": engine,
    }


def is_free(server: Server) -> bool:
    lines = [line for line in server.get("/metrics").text.splitlines() if line[:1] != "#"]
    now = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    return now["trioserve_requests_open"] == 0 == now["trioserve_kv_cache_usage_ratio"]


def test_conversations_streams_and_background(tmp_path: Path) -> None:
    with running(tmp_path, **config(tmp_path)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        first = client.responses.create(
            model="tiny", input="one " * 40, max_output_tokens=30, extra_body={"seed": 1}
        )
        with client.responses.stream(
            model="tiny", input="one " * 40, max_output_tokens=30, extra_body={"seed": 1}
        ) as stream:
            events = list(stream)
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert events[-1].response.output_text == first.output_text
        second = client.responses.create(
            model="tiny", input="two", previous_response_id=first.id, max_output_tokens=5
        )
        assert first.usage is not None
        assert second.usage is not None
        of_first = first.usage.input_tokens // 16 * 16
        assert second.usage.input_tokens_details.cached_tokens >= of_first > 0
        running_on = client.responses.create(
            model="tiny", input="go", background=True, max_output_tokens=2000, extra_body=LONG
        )
        server.wait_until(
            lambda: client.responses.retrieve(running_on.id).status == "in_progress", "begun", 10
        )
        assert client.responses.cancel(running_on.id).status == "cancelled"
        server.wait_until(lambda: is_free(server), "free", 10)


def test_messages_with_prefill(tmp_path: Path) -> None:
    with running(tmp_path, **config(tmp_path)) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        messages: Any = [
            {"role": "user", "content": "count"},
            {"role": "assistant", "content": "one two"},
        ]
        count = client.messages.count_tokens(model="tiny", messages=messages).input_tokens
        prompt = "<user>count;<assistant>one two"
        tokens = server.post("/tokenize", prompt=prompt, add_special_tokens=False).json()
        assert count == tokens["count"]
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": messages}
        whole = client.messages.create(**asked, extra_body={"seed": 1})
        with client.messages.stream(**asked, extra_body={"seed": 1}) as stream:
            final = stream.get_final_message()
        texts = [block.text for block in (*whole.content, *final.content) if block.type == "text"]
        assert len(texts) == 2
        assert texts[0] == texts[1]
        assert final.stop_reason == whole.stop_reason
        usage = final.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count


def test_sd_02_a_killed_worker_fails_what_runs_and_keeps_what_was_kept(tmp_path: Path) -> None:
    with running(tmp_path, **config(tmp_path, on_death="restart")) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        kept = client.responses.create(model="tiny", input="one", max_output_tokens=5)
        background = client.responses.create(
            model="tiny", input="go", background=True, max_output_tokens=2000, extra_body=LONG
        )
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        messages = other.messages.create(**asked, max_tokens=2000, stream=True, extra_body=LONG)
        stream = client.responses.create(
            model="tiny", input="go", stream=True, max_output_tokens=2000, extra_body=LONG
        )
        kinds = [next(stream).type for _ in range(6)]
        assert kinds[-1] == "response.output_text.delta"
        os.kill(server.worker().pid, signal.SIGKILL)
        last = list(stream)[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(messages)
        assert caught.value.type == "api_error"
        assert client.responses.retrieve(background.id).status == "failed"
        server.wait_ready()
        after = client.responses.create(
            model="tiny", input="two", previous_response_id=kept.id, max_output_tokens=5
        )
        assert after.status in ("completed", "incomplete")
