"""An engine without a model: scripted answers, phases set by hand. Implements EngineApi."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import trio

from trioserve.engine.api import EngineStatus, Phase, StageStatus, TextDelta, Usage
from trioserve.errors import ContextLengthExceeded, InvalidRequest, NotReady, RequestError
from trioserve.ipc.messages import ReadyInfo
from trioserve.sampling_params import SamplingParams, check_token_ids

VOCAB_SIZE = 256


class FakeStream:
    """One request; tests push deltas or an error into it."""

    def __init__(
        self, id: int, prompt_token_ids: list[int], sampling: SamplingParams, **extra: Any
    ) -> None:
        self.id = id
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.extra = extra
        self.started = False
        self.aborted = False
        self.finished = False
        self.closed = trio.Event()
        self._deltas: list[TextDelta] = []
        self._error: RequestError | Exception | None = None
        self._wake = trio.Event()
        self._num_output = 0

    def push(self, *deltas: TextDelta) -> None:
        self.started = self.started or any(delta.token_ids for delta in deltas)
        self._deltas.extend(deltas)
        self._wake.set()

    def say(self, *words: str, finish: str | None = None) -> None:
        """Push one delta per word, the last with the finish reason."""
        for index, word in enumerate(words):
            last = index == len(words) - 1
            self.push(TextDelta(word, [7], finish_reason=finish if last else None))

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake.set()

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *args: object) -> None:
        self.close()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> TextDelta:
        if self.finished:
            raise StopAsyncIteration
        await trio.lowlevel.checkpoint()
        while not self._deltas:
            if self._error is not None:
                self.finished = True
                raise self._error
            self._wake = trio.Event()
            await self._wake.wait()
        delta = self._deltas.pop(0)
        self._num_output += len(delta.token_ids)
        self.finished = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        if not self.finished and not self.closed.is_set():
            self.aborted = True
            self.push(TextDelta("", [], finish_reason="abort"))  # a reader is told at once
        self.closed.set()

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_token_ids), self._num_output, 0)


def answer_hello(stream: FakeStream) -> None:
    """The default script."""
    stream.say("Hello", " world", finish="stop")


class FakeEngine:
    """Tokens are the bytes of the text; each submit is kept in ``streams`` and scripted."""

    def __init__(
        self,
        *,
        script: Callable[[FakeStream], None] | None = answer_hello,
        phase: Phase = Phase.READY,
        max_model_len: int = 2048,
    ) -> None:
        self.script = script
        self.phase = phase
        self.cause: str | None = None
        self.stages = [StageStatus("weights", "running", 0.25, "7 of 28 MB")]
        self.streams: list[FakeStream] = []
        self.refuse: RequestError | None = None
        self.max_len = max_model_len
        self.rendered: list[list[dict[str, Any]]] = []
        self.encoding: trio.Event | None = None  # set while encode_prompt waits in ``may_encode``
        self.may_encode = trio.Event()
        self.template_kwargs: dict[str, Any] | None = None
        self._ids = itertools.count()
        self._submitted = trio.Event()

    async def submitted(self, num: int = 1) -> list[FakeStream]:
        """Wait until ``num`` requests were submitted."""
        while len(self.streams) < num:
            self._submitted = trio.Event()
            await self._submitted.wait()
        return self.streams

    @property
    def status(self) -> EngineStatus:
        ready = self.phase is Phase.READY
        info = ReadyInfo(
            *("llama", 1000, 2000, "fp16", "float32", "cpu", 2, "numba"),
            *(self.max_len, VOCAB_SIZE, 16, 128, 4096, 8192),
        )
        return EngineStatus(
            phase=self.phase,
            incarnation=1,
            stages=self.stages,
            cause=self.cause,
            model_name="fake",
            info=info if ready else None,
            stats=None,
            num_requests=sum(not stream.closed.is_set() for stream in self.streams),
            uptime_s=1.0,
            ready_after_s=0.5 if ready else None,
        )

    @property
    def served_names(self) -> tuple[str, ...]:
        return ("fake", "org/fake")

    @property
    def max_model_len(self) -> int:
        self._check_ready()
        return self.max_len

    def _check_ready(self) -> None:
        if self.phase is not Phase.READY:
            raise NotReady("not ready")

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        await trio.lowlevel.checkpoint()
        if self.encoding is not None:
            self.encoding.set()
            await self.may_encode.wait()
        self._check_ready()
        if len(text) > 100 * self.max_len:
            raise ContextLengthExceeded(f"{len(text)} characters can never fit {self.max_len}")
        return list(text.encode())

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        self.rendered.append(messages)
        self.template_kwargs = template_kwargs
        if messages[0]["role"] == "tool":
            raise InvalidRequest("the template begins with a user's message", param="messages")
        return await self.encode_prompt("".join(str(m.get("content") or "") for m in messages))

    def submit(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> FakeStream:
        self._check_ready()
        if self.refuse is not None:
            raise self.refuse
        sampling.validate(VOCAB_SIZE)
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        check_token_ids("prompt", prompt_token_ids, VOCAB_SIZE)
        stream = FakeStream(
            next(self._ids),
            prompt_token_ids,
            sampling,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.streams.append(stream)
        self._submitted.set()
        if self.script is not None:
            self.script(stream)
        return stream
