"""SD-04: one request cannot hurt another, wherever it goes wrong."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from trioserve.config.schema import Config
from trioserve.engine import requests as engine_requests
from trioserve.engine.engine import Engine
from trioserve.engine.supervisor import as_config, open_engine
from trioserve.http.listeners import bind
from trioserve.http.server import serve_http
from trioserve.ipc.messages import Delta
from trioserve.sampling_params import SamplingParams
from trioserve.text.stream import TextStream
from trioserve.text.tokenizer import Tokenizer

from .server import Server, running
from .test_bad_input import make_model
from .test_lifecycle import load

MARK = 7
PROMPTS = {first: [first, *range(20, 60)] for first in (MARK, 11, 12, 13, 14, 15, 16, 17)}
NUM_TOKENS = 24
FAULTS = [
    "prefill:raise",
    "prefill:memory",
    "decode@3:raise",
    "decode@3:memory",
    "sample@1:raise",
    "sample@4:memory",
    "sample@1:nan",
    "sample@4:nan",
    "sample@4:inf",
]
REAL_FAULTS = ["prefill:raise", "decode@3:memory", "sample@1:nan", "sample@4:inf"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def config_with(fault: str, device: str, model: Path) -> dict[str, dict[str, Any]]:
    common: dict[str, dict[str, Any]] = {
        "test": {"allow_faults": True, "faults": [fault], "mark_token_id": MARK},
        "scheduler": {"max_num_batched_tokens": 64},
        "kernels": {"attention": "torch"},
    }
    if device == "simulated":
        return common | {
            "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
            "device": {"kind": "simulated", "simulated_step_s": 0.02},
        }
    return common | {
        "model": {"source": str(model), "weights": "fp32"},
        "engine": {"threads": 1},
    }


class Outcome:
    """What one client got, and after how long."""

    def __init__(self, server: Server, first: int, stream: bool, **fields: Any) -> None:
        began = time.monotonic()
        body = {
            "prompt": PROMPTS[first],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": stream,
            **fields,
        }
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
        self.seconds = time.monotonic() - began
        self.first = first
        self.status = answer.status_code
        self.failed = self.status >= 400
        self.text = ""
        if not stream or self.failed:
            self.body = answer.json()
            if not self.failed:
                self.text = self.body["choices"][0]["text"]
            return
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        self.failed = events[-1] != "[DONE]"
        self.body = json.loads(events[-1] if self.failed else events[-2])
        chunks = [json.loads(event) for event in events[:-1]]
        self.text = "".join(chunk["choices"][0]["text"] for chunk in chunks)


def ask_all(server: Server, firsts: Sequence[int]) -> dict[int, Outcome]:
    """All at once, every other one streamed."""
    with ThreadPoolExecutor(len(firsts)) as pool:
        outcomes = pool.map(lambda i: Outcome(server, firsts[i], i % 2 == 0), range(len(firsts)))
        return {outcome.first: outcome for outcome in outcomes}


@pytest.mark.parametrize(
    ("fault", "device"),
    [(fault, "simulated") for fault in FAULTS] + [(fault, "real") for fault in REAL_FAULTS],
)
def test_sd_04_c_d_e_a_fault_in_the_worker_fails_its_request_alone(
    tmp_path: Path, model: Path, fault: str, device: str
) -> None:
    others = [first for first in PROMPTS if first != MARK]
    with running(tmp_path, **config_with(fault, device, model)) as server:
        expected = ask_all(server, others)
        assert not any(outcome.failed for outcome in expected.values())
        worker = server.worker().pid
        found = ask_all(server, [MARK, *others])
        marked = found.pop(MARK)
        assert marked.failed
        assert marked.body["error"]["type"] == "server_error"
        assert "fault hook" not in marked.body["error"]["message"]  # nothing of our insides
        assert marked.seconds < max(outcome.seconds for outcome in expected.values()) + 1
        for first, outcome in found.items():
            assert not outcome.failed, outcome.body
            assert outcome.text == expected[first].text
        again = Outcome(server, MARK, stream=False)
        assert (again.failed, again.status) == (True, 500)
        server.wait_until(lambda: load(server) == (0, 0), "empty", 5)
        assert server.worker().pid == worker
    assert "request" in server.log
    assert "fault hook" in server.log


@pytest.mark.parametrize("device", ["simulated", "real"])
def test_sd_04_blocks_of_a_failed_request_are_not_found_again(
    tmp_path: Path, model: Path, device: str
) -> None:
    """Its prompt was computed and findable by then: the fault may lie in what it holds."""
    with running(tmp_path, **config_with("decode@3:raise", device, model)) as server:

        def cached(first: int) -> int:
            short = Outcome(server, first, stream=False, max_tokens=1)
            return int(short.body["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert Outcome(server, 11, stream=False).text
        assert cached(11) > 0
        assert Outcome(server, MARK, stream=False).failed
        assert cached(MARK) == 0


# ------------------------------------------------------------------- the parent's side of it


class MarkedStream(TextStream):
    """Breaks at the third push of the request whose prompt is marked."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        super().__init__(tokenizer, prompt_token_ids, sampling)
        self._left = 3 if prompt_token_ids[0] == MARK else -1

    def push(self, delta: Delta) -> Any:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("cannot detokenize this")
        return super().push(delta)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """An engine with a real worker behind HTTP in this process, so that its insides can break."""
    config: Config = as_config(
        {
            "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
            "device": {"kind": "simulated", "simulated_step_s": 0.02},
            "http": {"port": 0},
        }
    )
    listeners = bind(config.http)
    port = listeners[0].socket.getsockname()[1]
    stopping = trio.Event()
    async with trio.open_nursery() as nursery, open_engine(config) as engine:

        async def serve() -> None:
            await serve_http(engine, listeners, config, stopping=stopping, drain_deadline_s=5.0)

        nursery.start_soon(serve)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield engine, client
        stopping.set()


async def ask(client: httpx.AsyncClient, prompt: Any, stream: bool, into: dict[str, str]) -> None:
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    answer = await client.post("/v1/completions", json=body | {"stream": stream})
    name = str(prompt[:3])
    if answer.status_code != 200:
        into[name] = f"error {answer.status_code}"
    elif not stream:
        into[name] = answer.json()["choices"][0]["text"]
    else:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        done = events[-1] == "[DONE]"
        parts = [json.loads(event) for event in events if event != "[DONE]"]
        into[name] = (
            "".join(part["choices"][0]["text"] for part in parts) if done else "error event"
        )
        assert done or "error" in parts[-1]


async def ask_together(client: httpx.AsyncClient, prompts: list[Any]) -> dict[str, str]:
    answers: dict[str, str] = {}
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for i, prompt in enumerate(prompts):
                nursery.start_soon(ask, client, prompt, i % 2 == 0, answers)
    return answers


@pytest.mark.parametrize("stream_first", [True, False])
@pytest.mark.parametrize("where", ["tokenising", "admission", "detokenising"])
async def test_sd_04_a_b_f_a_fault_in_the_parent_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, where: str, stream_first: bool
) -> None:
    monkeypatch.setattr(engine_requests, "TextStream", MarkedStream)
    marked: Any = "marked text" if where == "tokenising" else PROMPTS[MARK]
    others = [PROMPTS[first] for first in PROMPTS if first != MARK]
    if where != "detokenising":
        monkeypatch.setattr(engine_requests, "TextStream", TextStream)
    async with served() as (engine, client):
        expected = await ask_together(client, others)
        if where == "tokenising":
            encode = Tokenizer.encode

            def broken_encode(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> list[int]:
                if text == marked:
                    raise RuntimeError("cannot tokenize this")
                return encode(self, text, *args, **kwargs)

            monkeypatch.setattr(Tokenizer, "encode", broken_encode)
        elif where == "admission":
            check = Engine._check

            def broken_check(self: Engine, prompt: list[int], sampling: SamplingParams) -> None:
                check(self, prompt, sampling)
                if prompt[0] == MARK:
                    raise RuntimeError("cannot admit this")

            monkeypatch.setattr(Engine, "_check", broken_check)
        prompts = [marked, *others] if stream_first else [others[0], marked, *others[1:]]
        found = await ask_together(client, prompts)
        broken = found.pop(str(marked[:3]))
        assert broken == ("error event" if broken == "error event" else "error 500")
        assert found == expected
        assert engine.status.num_requests == 0
        checked = await engine.check()
        assert (checked.num_sequences, checked.stats.num_blocks_used, checked.fault) == (0, 0, "")
