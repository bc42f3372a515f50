"""What the engine shows to its users: the HTTP layer and programs that embed it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import msgspec

from trioserve.engine.tally import StepTally
from trioserve.ipc.messages import ReadyInfo, StepStats
from trioserve.models.generation import GenerationDefaults as GenerationDefaults
from trioserve.sampling_params import SamplingParams


class Phase(enum.StrEnum):
    """Where the engine is. Only the engine task moves it."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


@attrs.define
class StageStatus:
    """One start-up stage of the current incarnation, as shown by ``/startup``."""

    name: str
    state: str = "pending"  # "pending" | "running" | "done" | "failed"
    fraction: float | None = None
    detail: str = ""
    num_bytes: int | None = None
    seconds: float | None = None  # that it took, or has taken so far

    @property
    def position(self) -> tuple[object, ...]:
        """What differs once the stage has moved on, which the passing of time does not make it."""
        return (self.name, self.state, self.fraction, self.detail, self.num_bytes)


@attrs.define
class EngineStatus:
    """A snapshot of the engine; ``Engine.status`` makes a new one at each call."""

    phase: Phase
    incarnation: int
    stages: list[StageStatus]
    cause: str | None  # of the last failure
    model_name: str
    info: ReadyInfo | None  # once ready
    stats: StepStats | None  # of the last step
    num_requests: int  # submitted and not ended
    uptime_s: float
    ready_after_s: float | None
    num_restarts: int = 0
    paused: bool = False
    worker_pid: int | None = None  # while there is a worker process
    steps: StepTally | None = None  # of all workers so far


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token of the answer with its log probability and the best alternatives.

    ``token_bytes`` are the raw bytes the token stands for; joined over a stream they are the
    bytes of its text. ``rank`` is 1 for the most likely token, 0 where it is not known. ``wanted``
    are those asked for by ``logprob_token_ids``.
    """

    token: str
    token_id: int
    token_bytes: bytes
    logprob: float
    top: Sequence[TokenLogprob]
    rank: int = 0
    wanted: tuple[TokenLogprob, ...] = ()


class TextDelta(msgspec.Struct, frozen=True):
    """What is new in an answer since the last delta.

    ``text`` never ends inside a character and never holds the beginning of a stop string.
    The last delta has a ``finish_reason``; ``stop_reason`` is then the stop string or stop token
    id that matched, if one did.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_reason: str | int | None = None
    # One per prompt token, the first None; in the first delta, if asked for.
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Timings(msgspec.Struct, frozen=True):
    """When things happened to one request, in seconds of ``time.monotonic``; None: not yet."""

    submitted_s: float
    started_s: float | None  # a step first worked on it
    first_token_s: float | None
    last_token_s: float | None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; output counts only what was delivered."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class RequestStream(Protocol):
    """The answer to one request, read by one task.

    Leaving ``async with`` before the end aborts the request; that is a synchronous call, safe
    under cancellation. ``close`` does the same.
    """

    @property
    def id(self) -> int: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def started(self) -> bool:
        """Whether a step has worked on it: it waits no more, though its first token may not have
        come."""

    async def __aenter__(self) -> RequestStream: ...
    async def __aexit__(self, *args: object) -> None: ...
    def __aiter__(self) -> RequestStream: ...
    async def __anext__(self) -> TextDelta:
        """What came since the last call as one delta; waits only if there is nothing.

        A reader that is hundreds of tokens behind gets them in several. Cancellation loses
        nothing: the next call returns it.

        Raises:
            RequestFailed: the worker failed this request, or died under it.
            RequestCut: the server's shutdown ended it.
            StopAsyncIteration: the delta with the finish_reason was returned already.
            trio.BusyResourceError: another task is waiting for it.
        """

    def close(self) -> None:
        """Abort if still running; a task that waits for the next delta gets one that says so.
        Idempotent, never fails, never waits."""

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Timings: ...


class EngineApi(Protocol):
    """The part of Engine that HTTP uses. ``Engine`` implements it."""

    @property
    def status(self) -> EngineStatus: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def served_names(self) -> tuple[str, ...]: ...

    @property
    def max_model_len(self) -> int:
        """Raises NotReady before the first Ready."""

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize; long texts in a thread. Raises NotReady before the tokenizer is loaded,
        ContextLengthExceeded for texts that cannot fit whatever the tokenizer makes of them."""

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
        """Apply the chat template, or the one given, and tokenize.

        ``continue_final_message`` leaves the last message open, for the answer to go on with it.

        Raises InvalidRequest with the template's own message where it refuses, NotReady,
        ContextLengthExceeded."""

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; long lists in a thread. Raises InvalidRequest for ids outside
        the vocabulary, NotReady."""

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary writes it, empty for ids without one. Raises NotReady."""

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's ``generation_config.json`` asks for where a request says nothing; all
        None where there is none or `model.generation_config` turns it off."""

    async def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False if some were in use. Raises NotReady."""

    async def pause(self) -> None:
        """Compute no step until ``resume``; requests are taken and wait. Raises NotReady."""

    async def resume(self) -> None:
        """Go on after ``pause``. Raises NotReady."""

    def submit(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Start a request. Never waits.

        Raises:
            InvalidRequest: a parameter out of range, an id outside the vocabulary, no prompt.
            ContextLengthExceeded: it can never fit; both numbers are in the message.
            QueueFull: ``max_waiting`` requests wait already.
            NotReady: loading, restarting, draining or dead.
        """
