"""A worker that is played by the test, over memory streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio
import trio.testing

import trioserve
from trioserve.config.schema import Config
from trioserve.engine.supervisor import as_config
from trioserve.ipc.fake import FakeWorker, fake_endpoints
from trioserve.ipc.messages import (
    PROTOCOL,
    Check,
    Checked,
    Command,
    Delta,
    Event,
    Hello,
    Init,
    Load,
    Ready,
    ReadyInfo,
    Stage,
    StepOutput,
    StepStats,
    Work,
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
    assert isinstance(await command(fake), Load)
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
