"""The engine against a worker that is played by the test: its life."""

from __future__ import annotations

import inspect
import signal
from typing import Any

import pytest
import trio
import trio.testing

from trioserve.engine.api import Phase
from trioserve.engine.engine import Engine
from trioserve.engine.supervisor import open_engine
from trioserve.errors import (
    EngineDied,
    InvalidRequest,
    NotReady,
    RequestFailed,
    StartupError,
    WorkerDied,
    WorkerStalled,
)
from trioserve.ipc.fake import FakeWorker
from trioserve.ipc.messages import (
    Abort,
    Delta,
    Fatal,
    Init,
    Load,
    Stage,
    StepOutput,
    Work,
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
    make_ready,
    serve_tokens,
    until_end,
)


async def test_stages_are_seen_and_readiness_waits_for_a_token() -> None:
    ready = trio.Event()

    async def script(fake: FakeWorker) -> None:
        assert isinstance(await command(fake), Init)
        assert isinstance(await command(fake), Load)
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
        assert isinstance(await command(fake), Load)
        await fake.send(Stage("weights", "start"))
        await fake.exit(-signal.SIGKILL)

    with pytest.raises(StartupError, match=r"weights.*signal 9.*needed.*available"):
        async with open_engine(make_config(), worker_factory=Workers(script)):
            pass


async def test_st_08_silence_ends_start_up_but_progress_extends_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    began_s = 0.0

    async def script(fake: FakeWorker) -> None:
        nonlocal began_s
        await command(fake)
        # The model is looked at in a thread, for which the test's clock does not wait.
        assert isinstance(await command(fake), Load)
        began_s = trio.current_time()
        for i in range(10):
            await trio.sleep(25)
            await fake.send(Stage("weights", "progress", i / 10))
        await trio.sleep_forever()

    with pytest.raises(StartupError, match="no progress for"):
        async with open_engine(
            make_config(engine={"startup_silence_s": 30.0}), worker_factory=Workers(script)
        ):
            pass
    assert 280 < trio.current_time() - began_s < 300


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
        assert isinstance(await command(fake), Load)
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

    stuck_s = 0.0

    async def script(fake: FakeWorker) -> None:
        nonlocal stuck_s
        await become_ready(fake)
        fake.status.begin("step", 500.0, 1)
        await trio.sleep(400)
        fake.status.begin("step", 10.0, 2)
        stuck_s = trio.current_time()
        await trio.sleep_forever()

    workers = Workers(script)
    with pytest.raises(WorkerStalled, match=r"step \(step 2\) has taken"):
        async with open_engine(make_config(), worker_factory=workers):
            await trio.sleep_forever()
    assert 10 < trio.current_time() - stuck_s < 20
    first, last = workers.opened[0].process.signals[:2]
    assert first == (signal.SIGUSR1, pytest.approx(stuck_s + 11, abs=3))
    assert last == (signal.SIGUSR2, pytest.approx(first[1] + 1.0))


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
    for name in names:
        if callable(method := getattr(EngineApi, name)):
            expected = inspect.signature(method).parameters
            assert list(inspect.signature(getattr(Engine, name)).parameters) == list(expected)


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
        assert isinstance(await command(fake), Load)
        while not fake.process.signals:  # noqa: ASYNC110
            await trio.sleep(0.1)
        await fake.send(make_ready())
        await until_end(fake)

    config = make_config(engine={"startup_silence_s": 5.0})
    async with open_engine(config, worker_factory=Workers(script)) as engine:
        assert engine.phase is Phase.READY
