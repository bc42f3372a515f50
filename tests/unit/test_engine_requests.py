"""The engine against a worker that is played by the test: requests."""

from __future__ import annotations

import signal

import pytest
import trio
import trio.testing

from trioserve.engine.api import Phase
from trioserve.engine.supervisor import open_engine
from trioserve.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestCut,
    RequestFailed,
    WorkerDied,
)
from trioserve.ipc.fake import FakeWorker
from trioserve.ipc.messages import (
    Abort,
    Command,
    Delta,
    StepOutput,
    Work,
    WorkFailed,
)
from trioserve.sampling_params import SamplingParams

from .engine_workers import (
    GREEDY,
    STATS,
    Workers,
    become_ready,
    collect,
    command,
    make_config,
    serve_tokens,
    until_end,
)


async def test_tokens_arrive_and_usage_counts_them() -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        prompt = 3 * await engine.encode_prompt("a", add_special_tokens=False)
        async with engine.generate(prompt, SamplingParams(max_tokens=5)) as stream:
            text = await collect(stream)
        assert text == "a" * 5
        assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (3, 5)
        assert engine.status.num_requests == 0


async def test_stop_string_ends_the_request_and_aborts_the_work() -> None:
    seen: list[Command] = []

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        work = await command(fake)
        assert isinstance(work, Work)
        for letter in letters:
            await fake.send(StepOutput(0, [Delta(work.id, [letter])], STATS))
        seen.append(await command(fake))
        await fake.send(StepOutput(0, [Delta(work.id, [], "abort")], STATS))
        await until_end(fake)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        letters = await engine.encode_prompt("xyz END more", add_special_tokens=False)
        sampling = SamplingParams(max_tokens=100, stop=("END",))
        async with engine.submit([1], sampling) as stream:
            deltas = [delta async for delta in stream]
            assert "".join(delta.text for delta in deltas) == "xyz "
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")
            while engine.status.num_requests:
                await trio.testing.wait_all_tasks_blocked()
    assert seen == [Abort([stream.id])]


async def test_api_01_leaving_the_stream_aborts_and_a_queued_one_is_never_sent() -> None:
    commands: list[Command] = []

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        async for received in fake.commands:
            commands.append(received)
        await fake.exit(0)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        running = engine.submit([1], GREEDY)
        await trio.testing.wait_all_tasks_blocked()
        queued = engine.submit([2], GREEDY)
        queued.close()  # before the writer has seen it
        running.close()
        running.close()
        await trio.testing.wait_all_tasks_blocked()
        assert engine.status.num_requests == 1  # until the worker has answered the abort
    assert [type(c) for c in commands] == [Work, Abort]
    assert commands[1] == Abort([running.id])


async def test_a_failed_request_touches_no_other() -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        one, two = await command(fake), await command(fake)
        assert isinstance(one, Work)
        assert isinstance(two, Work)
        await fake.send(WorkFailed(one.id, "internal", "ValueError: secret detail"))
        await fake.send(StepOutput(1, [Delta(two.id, [1], "length")], STATS))
        await fake.send(StepOutput(2, [Delta(one.id, [1], "length")], STATS))  # late: dropped
        await until_end(fake)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        one, two = engine.submit([1], GREEDY), engine.submit([2], GREEDY)
        with pytest.raises(RequestFailed) as caught:
            await anext(one)
        assert "secret" not in str(caught.value)
        delta = await anext(two)
        assert delta.finish_reason == "length"
        with pytest.raises(StopAsyncIteration):
            await anext(two)


async def test_sd_02_death_ends_every_open_request() -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        work = await command(fake)
        assert isinstance(work, Work)
        await fake.send(StepOutput(0, [Delta(work.id, token_ids[:1])], STATS))
        await command(fake)
        await fake.exit(-signal.SIGSEGV)

    with pytest.raises(WorkerDied, match="SIGSEGV"):
        async with open_engine(
            make_config(), worker_factory=Workers(script), failure_grace_s=1.0
        ) as engine:
            token_ids = await engine.encode_prompt("a", add_special_tokens=False)
            one = engine.submit([1], GREEDY)
            assert (await anext(one)).text == "a"
            two = engine.submit([2], GREEDY)
            for stream in (one, two):
                with pytest.raises(RequestFailed, match="the engine died"):
                    await anext(stream)
            with pytest.raises(NotReady):
                engine.submit([1], GREEDY)


async def test_requests_still_open_at_the_end_are_cut() -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        await until_end(fake)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        stream = engine.submit([1], GREEDY)
    with pytest.raises(RequestCut):
        await anext(stream)
    assert engine.phase is Phase.CLOSED


async def test_bounds_of_admission() -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        await until_end(fake)

    config = make_config(scheduler={"max_num_seqs": 2, "max_waiting": 1})
    async with open_engine(config, worker_factory=Workers(script)) as engine:
        with pytest.raises(InvalidRequest, match="empty"):
            engine.submit([], GREEDY)
        with pytest.raises(InvalidRequest, match=r"prompt\[1\] is 400"):
            engine.submit([1, 400], GREEDY)
        with pytest.raises(InvalidRequest, match=r"prompt\[0\] is -1"):
            engine.submit([-1], GREEDY)
        with pytest.raises(ContextLengthExceeded, match=r"128.*200"):
            engine.submit([1] * 200, GREEDY)
        with pytest.raises(ContextLengthExceeded, match="128"):
            await engine.encode_prompt("a" * 10_000_000)
        streams = [engine.submit([1], GREEDY) for _ in range(3)]
        with pytest.raises(QueueFull):
            engine.submit([1], GREEDY)
        streams[0].close()  # not sent yet, so its place is free at once
        engine.submit([1], GREEDY)
        engine.begin_drain()
        with pytest.raises(NotReady, match="shutting down"):
            engine.submit([1], GREEDY)


async def test_cancelling_a_read_loses_nothing(autojump_clock: trio.testing.MockClock) -> None:
    go = trio.Event()

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        work = await command(fake)
        assert isinstance(work, Work)
        await go.wait()
        for letter in letters:
            await fake.send(StepOutput(0, [Delta(work.id, [letter])], STATS))
        await fake.send(StepOutput(0, [Delta(work.id, letters[:1], "length")], STATS))
        await until_end(fake)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        letters = await engine.encode_prompt("hello", add_special_tokens=False)
        stream = engine.submit([1], GREEDY)
        with trio.move_on_after(1):
            await anext(stream)
        go.set()
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        delta = await anext(stream)  # coalesced: one delta for six steps
        assert delta.text == "helloh"
        assert delta.finish_reason == "length"


async def test_check_is_answered_or_refused() -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        assert (await engine.check()).fault == ""
    with pytest.raises(NotReady):
        await engine.check()
