"""An engine without a model: scripted answers, phases set by hand. Implements EngineApi."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from trioserve.engine.api import (
    EngineStatus,
    GenerationDefaults,
    Phase,
    StageStatus,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from trioserve.errors import ContextLengthExceeded, InvalidRequest, NotReady, RequestError
from trioserve.ipc.messages import ReadyInfo
from trioserve.sampling_params import SamplingParams, check_token_ids

VOCAB_SIZE = 256


def named(token_id: int, logprob: float = -0.5, **more: Any) -> TokenLogprob:
    """An entry for a token, which is a byte here."""
    data = bytes([token_id])
    return TokenLogprob(data.decode("latin-1"), token_id, data, logprob, **{"top": [], **more})


def prompt_entries(token_ids: list[int], num_top: int) -> list[TokenLogprob | None]:
    """What an engine says of a prompt: nothing of the first token, then each token's rank as its
    position modulo 3, and the best ``num_top`` as the ids from 1 on."""
    top = [named(1 + i, -0.1 * (i + 1), rank=i + 1) for i in range(num_top)]
    rest = [named(id, -0.25 * i, top=top, rank=i % 3 + 1) for i, id in enumerate(token_ids)]
    return [None, *rest[1:]]


class FakeStream:
    """One request; tests push deltas or an error into it.

    The first delta gets ``prompt_logprobs`` where they were asked for. ``timings`` are real; a test
    may set ``fixed_timings``.
    """

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
        self._submitted_s = time.monotonic()
        self._token_times: list[float] = []  # of the first and the last
        self._prompt_told = sampling.prompt_logprobs is None
        self.fixed_timings: Timings | None = None

    def push(self, *deltas: TextDelta) -> None:
        for delta in deltas:
            if delta.token_ids:
                self.started = True
                self._token_times[1:] = [time.monotonic()]
            if not self._prompt_told and delta.finish_reason != "abort":
                self._prompt_told = True
                assert self.sampling.prompt_logprobs is not None
                entries = prompt_entries(self.prompt_token_ids, self.sampling.prompt_logprobs)
                delta = msgspec.structs.replace(delta, prompt_logprobs=entries)
            self._deltas.append(delta)
        self._wake.set()

    @property
    def timings(self) -> Timings:
        if self.fixed_timings is not None:
            return self.fixed_timings
        first, last = (self._token_times * 2)[:2] or (None, None)
        return Timings(self._submitted_s, first if self.started else None, first, last)

    def say(self, *words: str, finish: str | None = None) -> None:
        """Push one delta per word, each of token 7, the last with the finish reason."""
        for index, word in enumerate(words):
            last = index == len(words) - 1
            self.push(TextDelta(word, [7], self._entries(word), finish if last else None))

    def _entries(self, word: str) -> list[TokenLogprob] | None:
        if self.sampling.logprobs is None:
            return None
        top = [named(1 + i, -0.1 * (i + 1), rank=i + 1) for i in range(self.sampling.logprobs)]
        wanted = tuple(named(id, -9.0, rank=9) for id in self.sampling.logprob_token_ids)
        return [TokenLogprob(word, 7, word.encode(), -0.5, top, 7, wanted)]

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
        self.rendering: dict[str, Any] = {}  # all arguments of the last render_chat
        self.decoded: list[tuple[list[int], bool]] = []  # ids, skip_special_tokens
        self.defaults = GenerationDefaults()
        self.controls: list[str] = []  # calls of pause, resume, reset_prefix_cache
        self.paused = False
        self.cache_is_free = True  # what reset_prefix_cache answers
        self._unscripted: list[FakeStream] = []  # submitted while paused
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
            paused=self.paused,
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
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        self.rendered.append(messages)
        self.template_kwargs = template_kwargs
        self.rendering = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "add_special_tokens": add_special_tokens,
            "chat_template": chat_template,
            "template_kwargs": template_kwargs,
        }
        if messages[0]["role"] == "tool":
            raise InvalidRequest("the template begins with a user's message", param="messages")
        if chat_template == "broken":
            raise InvalidRequest("chat template, line 1: broken", param="chat_template")
        return await self.encode_prompt(
            "".join(str(m.get("content") or "") for m in messages),
            add_special_tokens=add_special_tokens,
        )

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        await trio.lowlevel.checkpoint()
        self._check_ready()
        check_token_ids("tokens", token_ids, VOCAB_SIZE)
        self.decoded.append((token_ids, skip_special_tokens))
        return bytes(token_ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        self._check_ready()
        return chr(token_id) if 0 <= token_id < VOCAB_SIZE else ""

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return self.defaults

    async def reset_prefix_cache(self) -> bool:
        await self._control("reset_prefix_cache")
        return self.cache_is_free

    async def pause(self) -> None:
        await self._control("pause")
        self.paused = True

    async def resume(self) -> None:
        await self._control("resume")
        self.paused = False
        streams, self._unscripted = self._unscripted, []
        for stream in streams:
            self._run_script(stream)

    async def _control(self, action: str) -> None:
        await trio.lowlevel.checkpoint()
        self._check_ready()
        self.controls.append(action)

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
        if self.paused:
            self._unscripted.append(stream)
        else:
            self._run_script(stream)
        return stream

    def _run_script(self, stream: FakeStream) -> None:
        if self.script is not None and not stream.closed.is_set():
            self.script(stream)
