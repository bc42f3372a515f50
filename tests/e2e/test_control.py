"""Pause, resume and reset of a real worker, on the simulated device."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio

import trioserve
from trioserve.errors import NotReady, RequestCut

ENDLESS = trioserve.SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"source": "random:llama?num_layers=1&hidden_size=32&max_position=131072"},
        "device": {"kind": "simulated", "simulated_step_s": 0.0005},
        "watchdog": {"interval_s": 0.05, "step_budget_s": 0.3},
        "scheduler": {"max_num_seqs": 4},
        **sections,
    }


async def tokens(stream: trioserve.RequestStream) -> list[int]:
    return [token_id for delta in [await anext(stream)] for token_id in delta.token_ids]


async def test_a_paused_worker_keeps_its_requests_and_answers() -> None:
    async with trioserve.open_engine(config()) as engine:
        running = engine.submit([1] * 40, ENDLESS)
        assert await tokens(running)
        await engine.pause()
        before = (await engine.check()).stats
        late, left = engine.submit([2] * 40, ENDLESS), engine.submit([3] * 40, ENDLESS)
        engine.abort(left.id)
        assert (await anext(left)).finish_reason == "abort"
        await trio.sleep(0.8)  # more than the watchdog's budget
        checked = await engine.check()
        assert checked.fault == ""
        assert checked.stats.output_tokens == before.output_tokens
        assert (checked.stats.num_running, checked.stats.num_waiting) == (1, 1)
        assert engine.status.paused
        assert not late.started
        # The prompt's two full blocks are in use.
        assert not await engine.reset_prefix_cache()
        engine.abort(running.id)
        async for delta in running:
            last = delta
        assert last.finish_reason == "abort"
        assert await engine.reset_prefix_cache()
        await engine.resume()
        assert await tokens(late)
        again = engine.submit([1] * 40, ENDLESS)
        assert await tokens(again)
        assert again.usage.cached_tokens == 0
    with pytest.raises(RequestCut):
        while True:
            await anext(late)


async def test_a_paused_engine_is_left_at_once_and_its_requests_are_cut() -> None:
    with trio.fail_after(20):
        async with trioserve.open_engine(config()) as engine:
            running = engine.submit([1] * 40, ENDLESS)
            assert await tokens(running)
            await engine.pause()
            waiting = engine.submit([2] * 40, ENDLESS)
            engine.begin_drain()
            await engine.check()
        for stream in (running, waiting):
            with pytest.raises(RequestCut):
                while True:
                    await anext(stream)


async def test_a_worker_that_dies_while_paused_is_followed_by_one_that_is() -> None:
    sections = {"engine": {"on_death": "restart", "restart_backoff_s": 0.01, "resubmit": True}}
    async with trioserve.open_engine(config(**sections)) as engine:
        await engine.pause()
        waiting = engine.submit([2] * 40, ENDLESS)
        pid = engine.status.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NotReady):
            while True:
                await engine.check()
        await engine.wait_ready()
        for _ in range(3):
            checked = await engine.check()
        assert engine.status.incarnation == 2
        assert engine.status.paused
        assert (checked.stats.num_running, checked.stats.num_waiting) == (0, 1)
        assert not waiting.started
        await engine.resume()
        assert await tokens(waiting)
