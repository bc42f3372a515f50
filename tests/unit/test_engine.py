"""The engine against a worker that is played by the test, over memory streams."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import trioserve
from trioserve.config.schema import Config
from trioserve.engine.api import Phase
from trioserve.engine.engine import Engine
from trioserve.engine.supervisor import as_config, open_engine
from trioserve.errors import (
    ContextLengthExceeded,
    EngineDied,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestCut,
    RequestFailed,
    StartupError,
    WorkerDied,
    WorkerStalled,
)
from trioserve.ipc.fake import FakeWorker, fake_endpoints
from trioserve.ipc.messages import (
    PROTOCOL,
    Abort,
    Check,
    Checked,
    Command,
    Delta,
    Event,
    Fatal,
    Hello,
    Init,
    Ready,
    ReadyInfo,
    Stage,
    StepOutput,
    StepStats,
    Work,
    WorkFailed,
)
from trioserve.ipc.process import Worker, attach
from trioserve.sampling_params import SamplingParams

MODEL = "random:llama?num_layers=1&hidden_size=32"
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
STATS = StepStats(1, 0, 1, 64, 0, 0, 0, 0, 0, 0.0)


def make_config(**sections: dict[str, Any]) -> Config:
    return as_config({"model": {"source": MODEL}, **sections})


def make_ready(vocab_size: int = 400, max_model_len: int = 128) -> Ready:
    return Ready(
        ReadyInfo(
            "llama", 1000, 4000, "fp32", "float32", "fake", 1, "none", max_model_len, vocab_size,
            16, 64, 65536, 1,
        )
    )  # fmt: skip


class Workers:
    """Plays every incarnation: ``script`` is called with each new worker."""

    def __init__(self, script: Callable[[FakeWorker], Any], hello: Event | None = None) -> None:
        self._script = script
        self._hello = hello or Hello(PROTOCOL, trioserve.__version__, 4242)
        self.opened: list[FakeWorker] = []

    def __call__(self, config: Config) -> AbstractAsyncContextManager[Worker]:
        return self._open(config)

    @asynccontextmanager
    async def _open(self, config: Config) -> AsyncIterator[Worker]:
        endpoints, fake = fake_endpoints()
        self.opened.append(fake)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._play, fake)
                try:
                    async with attach(endpoints, grace_s=1.0) as worker:
                        yield worker
                finally:
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:  # the nursery is the test's: no business of the engine
                raise group.exceptions[0] from None
            raise

    async def _play(self, fake: FakeWorker) -> None:
        try:
            await fake.send(self._hello)
            await self._script(fake)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


async def command(fake: FakeWorker) -> Command:
    return await anext(fake.commands)


async def until_end(fake: FakeWorker) -> None:
    """What a real worker does when the command pipe ends."""
    async for _ in fake.commands:
        pass
    await fake.exit(0)


async def become_ready(fake: FakeWorker) -> None:
    assert isinstance(await command(fake), Init)
    await fake.send(Stage("weights", "start"))
    await fake.send(Stage("weights", "end", 1.0, "", 4000, 0.5))
    await fake.send(make_ready())


async def serve_tokens(fake: FakeWorker) -> None:
    """Ready, then answer each Work with its prompt's first token over and over."""
    await become_ready(fake)
    async for received in fake.commands:
        if isinstance(received, Work):
            limit = received.sampling.max_tokens or 1
            for i in range(limit):
                reason = "length" if i == limit - 1 else None
                delta = Delta(received.id, received.prompt_token_ids[:1], reason)
                await fake.send(StepOutput(i, [delta], STATS))
        elif isinstance(received, Check):
            await fake.send(Checked(received.token, STATS, 0, ""))
    await fake.exit(0)


async def collect(stream: trioserve.RequestStream) -> str:
    return "".join([delta.text async for delta in stream])


# ------------------------------------------------------------------------------- start-up


async def test_stages_are_seen_and_readiness_waits_for_a_token() -> None:
    ready = trio.Event()

    async def script(fake: FakeWorker) -> None:
        assert isinstance(await command(fake), Init)
        await fake.send(Stage("weights", "progress", 0.5, "half", 2000))
        await ready.wait()
        await fake.send(make_ready())
        await until_end(fake)

    async with open_engine(
        make_config(), wait_ready=False, worker_factory=Workers(script)
    ) as engine:
        assert engine.phase is Phase.LOADING
        with pytest.raises(NotReady):
            engine.submit([1], GREEDY)
        async for status in engine.watch():
            stage = next(stage for stage in status.stages if stage.name == "weights")
            if stage.fraction == 0.5:
                break
        assert {s.name for s in status.stages if s.state == "done"} >= {"resolve", "inspect"}
        ready.set()
        await engine.wait_ready()
        assert engine.phase is Phase.READY
        assert engine.max_model_len == 128


async def test_st_08_fatal_names_stage_and_cause_without_a_group() -> None:
    async def script(fake: FakeWorker) -> None:
        await command(fake)
        await fake.send(Stage("weights", "start"))
        await fake.send(Fatal("weights", "tensor lm_head.weight is missing", "", "user"))
        await fake.exit(1)

    with pytest.raises(StartupError) as caught:
        async with open_engine(make_config(), worker_factory=Workers(script)):
            raise AssertionError("never ready")
    assert caught.value.stage == "weights"
    assert "lm_head.weight is missing" in str(caught.value)
    assert caught.value.exit_code == 5


async def test_st_08_death_while_loading_names_the_signal() -> None:
    async def script(fake: FakeWorker) -> None:
        await command(fake)
        await fake.send(Stage("weights", "start"))
        await fake.exit(-signal.SIGKILL)

    with pytest.raises(StartupError, match=r"weights.*signal 9.*needed.*available"):
        async with open_engine(make_config(), worker_factory=Workers(script)):
            pass


async def test_st_08_silence_ends_start_up_but_progress_extends_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def script(fake: FakeWorker) -> None:
        await command(fake)
        for i in range(10):
            await trio.sleep(25)
            await fake.send(Stage("weights", "progress", i / 10))
        await trio.sleep_forever()

    with pytest.raises(StartupError, match="no progress for"):
        async with open_engine(
            make_config(engine={"startup_silence_s": 30.0}), worker_factory=Workers(script)
        ):
            pass
    assert 280 < trio.current_time() < 300


async def test_a_bad_model_is_a_start_up_error_of_its_stage() -> None:
    with pytest.raises(StartupError, match="no such"):
        async with open_engine({"model": {"source": "/no/such/model"}}):
            pass


async def test_failure_while_the_block_runs_cancels_it_and_is_raised_plain() -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        await fake.exit(3)

    with pytest.raises(WorkerDied, match="exited with code 3"):
        async with open_engine(make_config(), worker_factory=Workers(script)):
            await trio.sleep_forever()


async def test_failure_grace_lets_the_block_finish(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        await fake.exit(3)

    flushed = False
    with pytest.raises(WorkerDied):
        async with open_engine(
            make_config(), worker_factory=Workers(script), failure_grace_s=2.0
        ) as engine:
            await engine.wait_ended()
            assert engine.phase is Phase.FAILED
            await trio.sleep(1.5)
            flushed = True
    assert flushed


# ------------------------------------------------------------------------------- requests


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


# ---------------------------------------------------------------------------- supervision


async def test_restart_serves_again_and_tells_the_first_ones(
    autojump_clock: trio.testing.MockClock,
) -> None:
    lives = 0

    async def script(fake: FakeWorker) -> None:
        nonlocal lives
        lives += 1
        if lives == 1:
            await become_ready(fake)
            await command(fake)
            await fake.exit(9)
        else:
            await serve_tokens(fake)

    config = make_config(engine={"on_death": "restart"})
    async with open_engine(config, worker_factory=Workers(script)) as engine:
        first = engine.submit([1], GREEDY)
        with pytest.raises(RequestFailed):
            await anext(first)
        assert engine.phase is Phase.RESTARTING
        with pytest.raises(NotReady, match="restarting"):
            engine.submit([1], GREEDY)
        await engine.wait_ready()
        assert engine.status.incarnation == 2
        letters = await engine.encode_prompt("b", add_special_tokens=False)
        async with engine.generate(letters, SamplingParams(max_tokens=2)) as stream:
            assert await collect(stream) == "bb"


async def test_requests_without_a_token_are_started_anew_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    lives = 0

    async def script(fake: FakeWorker) -> None:
        nonlocal lives
        lives += 1
        await become_ready(fake)
        works = {}
        async for received in fake.commands:
            if isinstance(received, Work):
                works[received.prompt_token_ids[0]] = received
            if lives == 1 and isinstance(received, Abort):
                assert set(works) == {1, 2, 3}
                await fake.send(StepOutput(0, [Delta(works[1].id, [1])], STATS))
                await fake.exit(9)
            if lives == 2 and 3 in works:
                assert set(works) == {3}  # 1 had begun, 2 was aborted
                await fake.send(StepOutput(0, [Delta(works[3].id, [1], "length")], STATS))

    config = make_config(engine={"on_death": "restart", "resubmit": True})
    async with open_engine(config, worker_factory=Workers(script)) as engine:
        begun, left, fresh = (engine.submit([i], GREEDY) for i in (1, 2, 3))
        await trio.testing.wait_all_tasks_blocked()
        left.close()
        with pytest.raises(RequestFailed):
            while True:
                await anext(begun)
        assert (await anext(fresh)).finish_reason == "length"
        assert engine.status.num_restarts == 1


async def test_a_worker_that_loads_gets_no_requests_yet(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Those kept from the last incarnation wait for Ready, and may still be aborted."""
    lives = 0

    async def script(fake: FakeWorker) -> None:
        nonlocal lives
        lives += 1
        if lives == 1:
            await become_ready(fake)
            await command(fake)
            await fake.exit(9)
            return
        assert isinstance(await command(fake), Init)
        with trio.move_on_after(30):
            raise AssertionError(f"{await command(fake)} before Ready")
        await fake.send(make_ready())
        work = await command(fake)
        assert isinstance(work, Work)
        assert work.prompt_token_ids == [2]
        await fake.send(StepOutput(0, [Delta(work.id, [1], "length")], STATS))
        await until_end(fake)

    config = make_config(engine={"on_death": "restart", "resubmit": True})
    async with open_engine(config, worker_factory=Workers(script)) as engine:
        left, kept = (engine.submit([i], GREEDY) for i in (1, 2))
        while engine.status.num_restarts == 0:
            await engine.wait_change()
        await trio.sleep(10)
        left.close()
        assert (await anext(kept)).finish_reason == "length"


async def test_a_prefill_that_has_begun_is_no_delta_for_the_reader() -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        work = await command(fake)
        assert isinstance(work, Work)
        await fake.send(StepOutput(0, [Delta(work.id, [])], STATS))
        await fake.send(StepOutput(1, [Delta(work.id, [1], "length")], STATS))
        await until_end(fake)

    async with open_engine(make_config(), worker_factory=Workers(script)) as engine:
        stream = engine.submit([5], GREEDY)
        assert not stream.started
        deltas = [delta async for delta in stream]
        assert stream.started
        assert [delta.token_ids for delta in deltas] == [[1]]


async def test_restarts_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        await fake.exit(9)

    workers = Workers(script)
    config = make_config(engine={"on_death": "restart", "max_restarts": 3})
    with pytest.raises(EngineDied, match="exited with code 9"):
        async with open_engine(config, worker_factory=workers):
            await trio.sleep_forever()
    assert len(workers.opened) == 4


async def test_a_worker_that_never_worked_is_not_restarted() -> None:
    async def script(fake: FakeWorker) -> None:
        await command(fake)
        await fake.exit(9)

    workers = Workers(script)
    with pytest.raises(StartupError):
        async with open_engine(make_config(engine={"on_death": "restart"}), worker_factory=workers):
            pass
    assert len(workers.opened) == 1


async def test_watchdog_tells_busy_from_stuck(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The page holds the machine's monotonic clock; tie it to the test's.
    monkeypatch.setattr("time.monotonic", trio.current_time)

    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        fake.status.begin("step", 500.0, 1)
        await trio.sleep(400)
        fake.status.begin("step", 10.0, 2)
        await trio.sleep_forever()

    workers = Workers(script)
    with pytest.raises(WorkerStalled, match=r"step \(step 2\) has taken"):
        async with open_engine(make_config(), worker_factory=workers):
            await trio.sleep_forever()
    assert 410 < trio.current_time() < 420
    assert (signal.SIGUSR1, pytest.approx(411, abs=3)) in workers.opened[0].process.signals


# ---------------------------------------------------------------------- structure of scopes


async def test_errors_of_the_block_come_out_as_they_are() -> None:
    with pytest.raises(KeyError):
        async with open_engine(make_config(), worker_factory=Workers(serve_tokens)):
            raise KeyError("mine")


async def test_a_stuck_worker_does_not_hold_up_a_cancelled_block(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        await trio.sleep_forever()

    workers = Workers(script)
    with trio.CancelScope() as scope:
        async with open_engine(make_config(), worker_factory=workers):
            began = trio.current_time()
            scope.deadline = began + 5
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(began + 5, abs=0.5)
    assert workers.opened[0].process.killed_at is not None


async def test_cancelled_at_every_checkpoint_the_worker_is_gone() -> None:
    async def attempt(after: int) -> tuple[bool, list[FakeWorker]]:
        """Cancel when the block has come ``after`` scheduler steps far."""
        workers = Workers(serve_tokens)
        finished = False
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel_later() -> None:
                    for _ in range(after):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                nursery.start_soon(cancel_later)
                async with open_engine(make_config(), worker_factory=workers) as engine:
                    async with engine.generate([1, 2], SamplingParams(max_tokens=3)) as stream:
                        await collect(stream)
                finished = True
                nursery.cancel_scope.cancel()
        return finished, workers.opened

    steps = [*range(0, 60, 3), *range(60, 3000, 211)]
    for after in steps:
        _, opened = await attempt(after)
        for fake in opened:
            assert fake.process.closed
            assert fake.process.group_is_empty()


async def test_two_engines_at_once_and_in_another_thread() -> None:
    async def use() -> str:
        async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
            letters = await engine.encode_prompt("q", add_special_tokens=False)
            async with engine.generate(letters, SamplingParams(max_tokens=1)) as stream:
                return await collect(stream)

    def elsewhere() -> str:
        return trio.run(use)

    results: list[str] = []
    async with trio.open_nursery() as nursery:

        async def here() -> None:
            results.append(await use())

        async def there() -> None:
            results.append(await trio.to_thread.run_sync(elsewhere))

        nursery.start_soon(here)
        nursery.start_soon(here)
        nursery.start_soon(there)
    assert results == ["q", "q", "q"]


def test_engine_is_what_http_expects() -> None:
    from trioserve.engine.api import EngineApi

    names = [name for name in vars(EngineApi) if not name.startswith("_")]
    assert names
    assert not [name for name in names if not hasattr(Engine, name)]


# ------------------------------------------------------------- what the kill matrix uncovered


async def test_a_frame_that_cannot_be_read_is_a_start_up_error_before_ready() -> None:
    async def script(fake: FakeWorker) -> None:
        await command(fake)
        await fake.send(Stage("weights", "start"))
        await fake.events.send_all(b"\x08\x00\x00\x00garbage!")
        await until_end(fake)

    with pytest.raises(StartupError, match=r"weights: .*no message of the protocol"):
        async with open_engine(make_config(), worker_factory=Workers(script)):
            pass


@pytest.mark.parametrize(
    "odd", [{"cache_salt": "\ud800"}, {"priority": 2**70}], ids=["surrogate", "too large"]
)
async def test_a_request_that_cannot_be_sent_fails_alone(odd: dict[str, Any]) -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        bad = engine.submit([1], GREEDY, **odd)
        good = engine.submit([70], SamplingParams(temperature=0.0, max_tokens=3))
        with pytest.raises(InvalidRequest):
            await anext(bad)
        assert await collect(good)
        assert engine.status.num_requests == 0


async def test_a_death_while_draining_is_not_followed_by_another_worker() -> None:
    workers = Workers(become_ready_then_die)
    config = make_config(engine={"on_death": "restart"})
    with pytest.raises(WorkerDied, match="exited with code 3"):
        async with open_engine(config, worker_factory=workers) as engine:
            engine.begin_drain()
            await engine.wait_ended()
    assert len(workers.opened) == 1


async def become_ready_then_die(fake: FakeWorker) -> None:
    await become_ready(fake)
    await trio.testing.wait_all_tasks_blocked()
    await fake.exit(3)


async def test_an_idle_worker_that_takes_up_no_request_is_stuck(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def script(fake: FakeWorker) -> None:
        await become_ready(fake)
        fake.status.end()
        assert isinstance(await command(fake), Work)  # read, and left lying
        await trio.sleep_forever()

    config = make_config(watchdog={"interval_s": 0.5, "step_budget_s": 3.0})
    with pytest.raises(WorkerStalled, match="has not taken up a request in 3"):
        async with open_engine(config, worker_factory=Workers(script)) as engine:
            await trio.sleep(60)  # idle is not stuck
            assert engine.phase is Phase.READY
            engine.submit([1], GREEDY)
            await engine.wait_ended()


async def test_a_worker_that_comes_back_while_its_stacks_are_written_lives_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def script(fake: FakeWorker) -> None:
        assert isinstance(await command(fake), Init)
        while not fake.process.signals:  # noqa: ASYNC110
            await trio.sleep(0.1)
        await fake.send(make_ready())
        await until_end(fake)

    config = make_config(engine={"startup_silence_s": 5.0})
    async with open_engine(config, worker_factory=Workers(script)) as engine:
        assert engine.phase is Phase.READY
