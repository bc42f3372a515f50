"""Programs that use the engine wrongly: each mistake is theirs alone, and told as what it is."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from trioserve.engine.requests import RequestStream
from trioserve.engine.supervisor import as_config, open_engine
from trioserve.errors import ConfigError, InvalidRequest
from trioserve.ipc.fake import FakeWorker
from trioserve.ipc.messages import Abort, Delta, StepOutput
from trioserve.sampling_params import SamplingParams

from .test_engine import (
    GREEDY,
    STATS,
    Workers,
    become_ready,
    collect,
    make_config,
    serve_tokens,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 2.5},
        {"max_tokens": "many"},
        {"temperature": None},
        {"stop": "text"},
        {"stop": (1,)},
        {"logprobs": True},
    ],
    ids=str,
)
async def test_a_parameter_of_the_wrong_type_is_refused_and_named(wrong: dict[str, Any]) -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        with pytest.raises(InvalidRequest, match=next(iter(wrong))) as caught:
            engine.submit([1], SamplingParams(**wrong))
        assert caught.value.param == next(iter(wrong))
        assert await collect(engine.submit([70], GREEDY))


@pytest.mark.parametrize(
    "prompt", [[1.5], [True], ["a"], [None], [1, "a"], b"abc", {"a": 1}, None, 5], ids=repr
)
async def test_a_prompt_of_the_wrong_type_is_refused(prompt: Any) -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        with pytest.raises(InvalidRequest):
            async with engine.generate(prompt, GREEDY):
                pass
        assert await collect(engine.submit([70], GREEDY))


async def test_priority_and_salt_of_the_wrong_type_are_refused() -> None:
    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        odd: list[dict[str, Any]] = [{"priority": 1.5}, {"priority": "high"}, {"cache_salt": 5}]
        for wrong in odd:
            with pytest.raises(InvalidRequest):
                engine.submit([1], GREEDY, **wrong)
        assert engine.status.num_requests == 0


async def test_integers_of_other_libraries_are_token_ids() -> None:
    class Int:
        def __index__(self) -> int:
            return 70

    async with open_engine(make_config(), worker_factory=Workers(serve_tokens)) as engine:
        odd: Any = (Int(), Int())
        async with engine.generate(odd, GREEDY) as stream:
            assert stream.prompt_token_ids == [70, 70]


async def test_a_second_reader_of_a_stream_is_told_so() -> None:
    async with open_engine(make_config(), worker_factory=Workers(become_ready_and_wait)) as engine:
        stream = engine.submit([70], GREEDY)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(anext, stream)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await anext(stream)
            nursery.cancel_scope.cancel()
        with trio.move_on_after(0) as scope:  # the next one may
            await anext(stream)
        assert scope.cancelled_caught


async def become_ready_and_wait(fake: FakeWorker) -> None:
    """Ready, then no token ever; aborts are answered."""
    await become_ready(fake)
    async for received in fake.commands:
        if isinstance(received, Abort):
            deltas = [Delta(request_id, [], "abort") for request_id in received.ids]
            await fake.send(StepOutput(1, deltas, STATS))
    await fake.exit(0)


async def test_a_reader_is_woken_when_its_request_is_closed_before_it_was_sent() -> None:
    async with open_engine(make_config(), worker_factory=Workers(become_ready_and_wait)) as engine:
        for _ in range(20):  # which of the two tasks runs first is chance
            stream = engine.submit([70], GREEDY)
            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read_aborted, stream)
                    nursery.start_soon(close_at_once, stream)


async def read_aborted(stream: RequestStream) -> None:
    assert [delta.finish_reason async for delta in stream] in ([], ["abort"])


async def close_at_once(stream: RequestStream) -> None:
    stream.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_ends_of_the_program_come_out_as_they_are(error: type[BaseException]) -> None:
    workers = Workers(serve_tokens)
    with pytest.raises(error) as caught:
        async with open_engine(make_config(), worker_factory=workers):
            raise error
    assert type(caught.value) is error
    assert workers.opened


@pytest.mark.parametrize("config", [{"model": "x"}, {"model": None}, 5, b"model.toml"], ids=repr)
def test_a_configuration_of_the_wrong_shape_is_a_config_error(config: Any) -> None:
    with pytest.raises(ConfigError):
        as_config(config)


def test_a_faulty_option_of_a_program_is_not_blamed_on_a_flag() -> None:
    with pytest.raises(ConfigError, match=r"^option http\.prot: .*did you mean 'port'"):
        as_config({"http": {"prot": 1}})
