"""KV-01, KV-02, KV-03: what does not fit, what is left, what must wait; on the real engine."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

import trioserve
from trioserve.engine.engine import Engine
from trioserve.engine.requests import RequestStream
from trioserve.errors import RequestError
from trioserve.sampling_params import SamplingParams

from .server import Server, running

NUM_CACHE_TOKENS = 1024
TINY = "random:llama?num_layers=1&hidden_size=32"


# ----------------------------------------------------------------------------------- KV-01


def ids(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{num_tokens}/{seed}")
    return [rng.randrange(200) for _ in range(num_tokens)]


def complete(server: Server, num_tokens: int, max_tokens: int, **extra: Any) -> httpx.Response:
    body = {"prompt": ids(num_tokens), "max_tokens": max_tokens, "ignore_eos": True, **extra}
    return server.post("/v1/completions", **body)


def small_ones_are_answered(server: Server) -> None:
    for index in range(5):
        answer = complete(server, 10 + index, 5)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("kind", ["simulated", "cpu"])
def test_kv_01_what_cannot_fit_is_refused_or_cut_and_blocks_nobody(
    tmp_path: Path, kind: str
) -> None:
    # The simulated device takes 1024 bytes for a token; the model 2 * 24 values of float32.
    bytes_per_token = {"simulated": 1024, "cpu": 192}[kind]
    sections: dict[str, dict[str, Any]] = {
        "model": {"source": TINY},
        "device": {"kind": kind},
        "cache": {"memory": NUM_CACHE_TOKENS * bytes_per_token},
        "scheduler": {"max_num_seqs": 4},
    }
    with running(tmp_path, **sections) as server:
        info = server.get("/startup").json()["info"]
        assert info["num_blocks"] * info["block_size"] == NUM_CACHE_TOKENS
        assert info["max_model_len"] == NUM_CACHE_TOKENS

        refused = complete(server, 1500, 1)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "1500" in error["message"]
        assert "1024" in error["message"]
        small_ones_are_answered(server)

        cut = complete(server, 900, 900)
        assert cut.status_code == 200
        assert cut.json()["choices"][0]["finish_reason"] == "length"
        assert cut.json()["usage"]["completion_tokens"] == NUM_CACHE_TOKENS - 900
        small_ones_are_answered(server)

        # Eight times 600 tokens: more than the cache, so they take turns; small ones go between.
        answers: list[httpx.Response] = []
        many = threading.Thread(
            target=lambda: answers.append(complete(server, 300, 300, n=8, timeout=120))
        )
        many.start()
        small_ones_are_answered(server)
        many.join(120)
        [answer] = answers
        assert answer.json()["usage"]["completion_tokens"] == 8 * 300
        assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}
        small_ones_are_answered(server)


# ----------------------------------------------------------------------------------- KV-02

MOMENTS = ("at once", "soon", "begun", "first token", "decoding", "after the end")
PREFIXES = [ids(80, seed) for seed in range(3)]


async def leave(engine: Engine, moment: str, rng: random.Random) -> None:
    """One request of one or two choices, left at a moment."""
    prompt = [*rng.choice(PREFIXES), *ids(rng.randint(1, 200), rng.randrange(10**6))]
    num_tokens = 3 if moment == "after the end" else 400
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    streams = [engine.submit(prompt, sampling) for _ in range(rng.choice([1, 1, 2]))]
    try:
        if moment == "soon":
            await trio.sleep(rng.random() * 0.02)
        elif moment == "begun":
            while not streams[0].started:
                assert (await engine.check()).fault == ""
        elif moment != "at once":
            wanted = {"first token": 1, "decoding": rng.randint(2, 150)}.get(moment, num_tokens)
            num_read = 0
            while num_read < wanted:
                num_read += len((await anext(streams[0])).token_ids)
    finally:
        for stream in streams:
            stream.close()


async def test_kv_02_five_hundred_aborts_at_any_moment_leave_nothing() -> None:
    config = {
        "model": {"source": TINY, "max_model_len": NUM_CACHE_TOKENS // 2},
        "device": {"kind": "simulated", "simulated_step_s": 0.0005},
        "cache": {"memory": NUM_CACHE_TOKENS * 1024},
        "scheduler": {"max_num_seqs": 12, "max_num_batched_tokens": 64},
    }
    rng = random.Random(11)
    with trio.fail_after(120):
        async with trioserve.open_engine(config) as engine:

            async def some(number: int) -> None:
                for _ in range(20):
                    await leave(engine, rng.choice(MOMENTS), rng)
                if number % 5 == 0:
                    assert (await engine.check()).fault == ""

            async with trio.open_nursery() as nursery:
                for number in range(25):
                    nursery.start_soon(some, number)
            checked = await engine.check()
            while engine.status.num_requests:  # the last aborts on their way back
                checked = await engine.check()
            assert checked.fault == ""
            assert checked.num_sequences == 0
            assert checked.stats.num_blocks_used == 0
            assert checked.stats.num_running == checked.stats.num_waiting == 0
            assert checked.stats.num_preemptions > 0, "the cache was never short"
            assert checked.stats.prefix_hits > 0, "no prefix was ever shared"
            # All of the cache can be had at once.
            full = SamplingParams(max_tokens=1)
            both = [engine.submit(ids(NUM_CACHE_TOKENS // 2 - 1, i), full) for i in (1, 2)]
            for stream in both:
                assert (await anext(stream)).finish_reason == "length"
            assert (await engine.check()).num_sequences == 0


# ----------------------------------------------------------------------------------- KV-03


async def test_kv_03_long_prompts_neither_stop_a_stream_nor_keep_a_short_one_waiting() -> None:
    """In steps, not in time: the victim gets a token in each, so its tokens count them."""
    config = {
        "model": {"source": TINY, "max_model_len": 2048},
        "device": {"kind": "simulated", "simulated_step_s": 0.01},
        "cache": {"memory": 10 * 2048 * 1024},
        "scheduler": {"max_num_batched_tokens": 64},
    }
    num_read = 0
    ends: list[str] = []
    begun = trio.Event()

    async def victim(engine: Engine) -> None:
        nonlocal num_read
        async with engine.generate(
            ids(10), SamplingParams(max_tokens=200, ignore_eos=True)
        ) as stream:
            async for delta in stream:
                num_read += len(delta.token_ids)
                begun.set()
        ends.append("victim")

    async def end_of(stream: RequestStream, name: str) -> None:
        async for _ in stream:
            pass
        ends.append(name)

    with trio.fail_after(60):
        async with trioserve.open_engine(config) as engine, trio.open_nursery() as nursery:
            nursery.start_soon(victim, engine)
            await begun.wait()
            before = num_read
            one_token = SamplingParams(max_tokens=1)
            for index in range(4):
                stream = engine.submit(ids(2000, index), one_token)
                nursery.start_soon(end_of, stream, f"long {index}")
            await end_of(engine.submit(ids(20, 9), one_token), "short")
            # 8000 tokens of prefill are 127 steps; the short one is through in a few.
            assert num_read - before <= 15
            assert ends == ["short"]
    assert ends[0] == "short"
    assert [name for name in ends if name.startswith("long")] == [f"long {i}" for i in range(4)]
    assert "victim" in ends


async def test_kv_03_admission_is_refused_not_queued_without_bound() -> None:
    config = {
        "model": {"source": TINY},
        "device": {"kind": "simulated", "simulated_step_s": 0.05},
        "scheduler": {"max_num_seqs": 2, "max_waiting": 3},
    }
    async with trioserve.open_engine(config) as engine:
        streams = [engine.submit(ids(5), SamplingParams(max_tokens=500)) for _ in range(5)]
        with pytest.raises(RequestError, match="run or wait already") as refused:
            engine.submit(ids(5), SamplingParams())
        assert refused.value.status == 429
        for stream in streams:
            stream.close()
