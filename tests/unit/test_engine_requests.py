"""The engine against a worker that is played by the test: requests."""

from __future__ import annotations

import re
import signal

import msgspec
import pytest
import trio
import trio.testing

from trioserve.engine.api import Phase, TextDelta
from trioserve.engine.engine import Engine
from trioserve.engine.requests import RequestStream, Sent
from trioserve.engine.supervisor import DIED, open_engine
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
    TokenLogprobs,
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

# Clients of OpenAI and of Anthropic know a prompt that does not fit by these words alone.
TOO_LONG = "prompt is too long: this model's maximum context length is "


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
        await fake.exit(-signal.SIGKILL)

    with pytest.raises(WorkerDied, match="SIGKILL"):
        async with open_engine(
            make_config(), worker_factory=Workers(script), failure_grace_s=1.0
        ) as engine:
            token_ids = await engine.encode_prompt("a", add_special_tokens=False)
            one = engine.submit([1], GREEDY)
            assert (await anext(one)).text == "a"
            two = engine.submit([2], GREEDY)
            for stream in (one, two):
                with pytest.raises(RequestFailed) as failed:
                    await anext(stream)
                assert failed.value.message == DIED  # nothing of the machine
            with pytest.raises(NotReady) as refused:
                engine.submit([1], GREEDY)
            assert not re.search("kill|memory|GiB|available", str(refused.value), re.I)


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
        with pytest.raises(ContextLengthExceeded, match=f"{TOO_LONG}128 .*200"):
            engine.submit([1] * 200, GREEDY)
        with pytest.raises(ContextLengthExceeded, match=f"{TOO_LONG}128 "):
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


# ------------------------------------------------------------------ readers that are far behind


async def pushed(engine: Engine, sampling: SamplingParams, deltas: list[Delta]) -> RequestStream:
    """A request whose deltas have all come before anybody reads."""
    stream = engine.submit([1, 5, 6], sampling)
    for delta in deltas:
        delta = msgspec.structs.replace(delta, id=stream.id)
        engine.on_step(StepOutput(0, [delta], STATS))
    return stream


@pytest.mark.parametrize(("num_top", "most"), [(None, 256), (0, 256), (20, 12)])
async def test_a_reader_far_behind_gives_others_their_turn(num_top: int | None, most: int) -> None:
    sampling = SamplingParams(logprobs=num_top, max_tokens=1000)
    top = [(id, -1.0) for id in range(num_top or 0)]
    scores = None if num_top is None else [TokenLogprobs(70, -1.0, 1, top)]
    deltas = [Delta(0, [70], None, None, scores) for _ in range(600)]
    deltas.append(Delta(0, [70], "length", None, scores))
    async with open_engine(make_config(), worker_factory=Workers(serve_nothing)) as engine:
        stream = await pushed(engine, sampling, deltas)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            parts = [delta async for delta in stream]
            nursery.cancel_scope.cancel()
        assert max(len(part.token_ids) for part in parts) == most
        assert sum(len(part.token_ids) for part in parts) == 601
        assert turns >= len(parts) - 2 == -(-601 // most) - 2
        assert parts[-1].finish_reason == "length"


async def serve_nothing(fake: FakeWorker) -> None:
    await become_ready(fake)
    await until_end(fake)


@pytest.mark.parametrize("after", range(8))
async def test_prompt_scores_come_whole_whenever_a_read_is_cancelled(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.engine.requests.BURST", 2)
    parts: list[TextDelta] = []
    scores = [None, TokenLogprobs(5, -1.0, 3, []), TokenLogprobs(6, -2.0, 1, [(6, -2.0)])]
    deltas = [
        Delta(0, []),
        Delta(0, [70], prompt_logprobs=scores, num_cached_tokens=0),
        Delta(0, [71], "length"),
    ]
    async with open_engine(make_config(), worker_factory=Workers(serve_nothing)) as engine:
        stream = await pushed(engine, SamplingParams(prompt_logprobs=1), deltas)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                parts.append(await anext(stream))

            nursery.start_soon(read)
            for _ in range(after):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            parts += [delta async for delta in stream]
        first, *rest = parts
        entries = first.prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        found = [(e.token_id, e.logprob, e.rank) for e in entries if e is not None]
        assert found == [(5, -1.0, 3), (6, -2.0, 1)]
        assert all(delta.prompt_logprobs is None for delta in rest)
        assert sum(len(delta.token_ids) for delta in [first, *rest]) == 2


async def test_a_request_goes_out_at_once_unless_something_waits_before_it() -> None:
    sent: list[Work] = []
    takes = True

    def try_send(work: Work) -> bool:
        sent.append(work)
        return takes

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        await until_end(fake)

    workers = Workers(script)
    async with open_engine(make_config(), worker_factory=workers) as engine:
        await engine.wait_ready()
        own, engine.try_send = engine.try_send, try_send
        assert own is not None
        first = engine.submit([1, 2], GREEDY)
        assert isinstance(first, RequestStream)
        assert sent == [first.work]
        assert (first.sent, list(engine._requests._commands)) == (Sent.SENT, [])

        takes = False  # the pipe is full
        second = engine.submit([1, 2], GREEDY)
        assert (second.sent, list(engine._requests._commands)) == (Sent.QUEUED, [second.work])
        assert len(sent) == 2
        third = engine.submit([1, 2], GREEDY)  # must not overtake
        assert len(sent) == 2
        assert list(engine._requests._commands) == [second.work, third.work]
        await trio.testing.wait_all_tasks_blocked()
        assert not engine._requests._commands

        first.close()  # its abort is to go out
        takes = True
        engine.submit([1, 2], GREEDY)
        assert len(sent) == 2
    assert engine.try_send is None
