"""The contract between parent and worker: every message, its sender and its answer.

Commands go from the parent to the worker, events back. Each is a frozen msgspec struct, encoded as
a tagged array; opaque bytes are allowed, code is not (never pickle). Both ends are the same
version: ``Hello`` carries it and the parent refuses another.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trioserve.sampling_params import SamplingParams

PROTOCOL = 2

STAGES = (
    "resolve",
    "fetch",
    "inspect",
    "spawn",
    "python",
    "device",
    "distributed",
    "weights",
    "profile",
    "kv-cache",
    "warm-up",
    "capture",
    "self-test",
    "ready",
)
"""All stages in order. The first four happen in the parent, the rest in the worker; ``spawn`` and
``python`` run beside the three before them."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# --------------------------------------------------------------- commands: parent → worker


class Init(_Message, frozen=True, tag="init"):
    """First command, once: import what the device needs. Answered by Stage events, or by Fatal."""

    config: dict[str, Any]  # trioserve.config.schema.Config, as builtins


class Load(_Message, frozen=True, tag="load"):
    """Second command, once, when the parent knows the model. Answered by Stage events and Ready, or
    by Fatal."""

    model: dict[str, Any]  # trioserve.models.spec.ResolvedModel, as builtins


class Work(_Message, frozen=True, tag="work"):
    """One sequence to generate. Answered by exactly one terminal: a delta with a finish_reason,
    or WorkFailed."""

    id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int  # always set: the request's own, or drawn by the parent
    priority: int = 0
    cache_salt: str = ""  # part of the prefix key
    # sampling.bad_words as token ids: each is a sequence never to be completed in the output
    bad_words_ids: tuple[tuple[int, ...], ...] = ()


class Abort(_Message, frozen=True, tag="abort"):
    """End these sequences. Idempotent; each that still ran is answered by a delta with
    finish_reason "abort", ids that are unknown or finished are passed over."""

    ids: list[int]


class Control(_Message, frozen=True, tag="control"):
    """Act on the scheduler between two steps. Answered by Controlled.

    ``action``: "pause" (start no waiting sequence and compute no step until "resume"; what is
    submitted waits), "resume", or "reset_prefix_cache" (forget all cached blocks that no sequence
    uses; the answer's ``ok`` is false if some were in use and are kept).
    """

    token: int
    action: str


class Check(_Message, frozen=True, tag="check"):
    """Ask for the invariants to be checked now and the counters reported. Answered by Checked."""

    token: int


class Exit(_Message, frozen=True, tag="exit"):
    """Leave after the current step, with exit code 0. Same as the end of the command pipe."""


# ----------------------------------------------------------------- events: worker → parent


class Hello(_Message, frozen=True, tag="hello"):
    """First event, before anything heavy is imported."""

    protocol: int
    version: str
    pid: int


class Stage(_Message, frozen=True, tag="stage"):
    """A start-up stage begins ("start"), moves on ("progress") or ends ("end")."""

    name: str
    state: str  # "start" | "progress" | "end"
    fraction: float | None = None  # 0..1 where it is known
    detail: str = ""
    num_bytes: int | None = None  # handled so far
    seconds: float | None = None  # with "end"


class Ready(_Message, frozen=True, tag="ready"):
    """A token has been produced. ``info`` holds the resolved value of all that was "auto"."""

    info: ReadyInfo


class ReadyInfo(_Message, frozen=True):
    """What the worker settled on."""

    architecture: str
    num_parameters: int
    weight_bytes: int  # in memory
    weights: str  # layout, e.g. "fp16"
    dtype: str
    device: str
    threads: int
    attention: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    rss_bytes: int

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens the KV cache can hold."""
        return self.num_blocks * self.block_size


class TokenLogprobs(_Message, frozen=True, gc=False):
    """Log probabilities at one position: of the chosen token, and of the best k, best first."""

    token_id: int
    logprob: float
    rank: int  # of the chosen token, 1 for the most likely
    top: list[tuple[int, float]]
    wanted: tuple[tuple[int, float], ...] = ()  # of sampling.logprob_token_ids, in their order


class Delta(_Message, frozen=True):
    """What one step added to one sequence; no token says that it has begun its prefill."""

    id: int
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_token_id: int | None = None  # set if one of sampling.stop_token_ids ended it
    logprobs: list[TokenLogprobs] | None = None  # one per token
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache; first delta
    # One per prompt token, the first None; once, with or before the first token.
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class StepStats(_Message, frozen=True):
    """Counters after a step; the totals only grow."""

    num_running: int
    num_waiting: int
    num_blocks_used: int  # referenced by a sequence
    num_blocks: int
    prefix_queries: int  # total, tokens
    prefix_hits: int  # total, tokens
    num_preemptions: int  # total
    prompt_tokens: int  # total computed by prefill
    output_tokens: int  # total sampled
    step_s: float


class StepOutput(_Message, frozen=True, tag="step"):
    """The outcome of one step."""

    step: int
    deltas: list[Delta]
    stats: StepStats


class WorkFailed(_Message, frozen=True, tag="failed"):
    """Terminal: this sequence alone could not go on. ``code`` is "invalid" (the request was at
    fault), or "internal"."""

    id: int
    code: str
    message: str


class Checked(_Message, frozen=True, tag="checked"):
    """Answer to Check: what is still held. ``fault`` names a broken invariant, or is empty."""

    token: int
    stats: StepStats
    num_sequences: int
    fault: str


class Controlled(_Message, frozen=True, tag="controlled"):
    """Answer to Control; ``detail`` says more where ``ok`` is false."""

    token: int
    ok: bool
    detail: str = ""


class Fatal(_Message, frozen=True, tag="fatal"):
    """The worker is about to exit non-zero. ``error`` is one line; the parent's last line."""

    stage: str
    error: str
    traceback: str
    kind: str = "internal"  # "internal", or "user": the remedy is in ``error``, no traceback shown


Command = Init | Load | Work | Abort | Control | Check | Exit
Event = Hello | Stage | Ready | StepOutput | WorkFailed | Checked | Controlled | Fatal
