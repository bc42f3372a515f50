"""What a request asks of the sampler: public, validated, shared by parent and worker."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from trioserve.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_ID_LIST = 1024  # logit_bias, allowed_token_ids: entries; stop_token_ids over HTTP as well
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one sequence is sampled and when it ends.

    ``temperature == 0`` is greedy. ``top_k == 0`` means no limit. ``seed`` makes the result a
    function of (logits, seed, position) alone, never of batch mates; without one the engine draws
    a fresh seed. ``max_tokens is None`` means all the context that is left. Stop strings are
    decided in the parent, everything else in the worker; neither stop strings nor stop tokens
    end a sequence before ``min_tokens``.

    The order in which the worker applies what changes logits is told in docs/sampling.md.
    Presence and frequency penalties count the output, the repetition penalty prompt and output.
    ``logit_bias`` maps token ids to what is added; ``allowed_token_ids`` of None allows all;
    ``bad_words`` are texts of which none is ever completed. ``logprob_token_ids`` are tokens
    whose log probability is wanted at each position beside the best. ``prompt_logprobs`` of k
    asks for those of the prompt's tokens, with the k best at each position.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: the chosen token; k: the k best as well
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are wanted with each token of the answer."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def validate(self, vocab_size: int) -> None:
        """Check every field against its range.

        Raises:
            InvalidRequest: naming the first field at fault and its type or range.
        """
        self._check_types()
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_k < -1:
            raise InvalidRequest(f"top_k must be -1, 0 or above, not {self.top_k}", param="top_k")
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed must fit in 64 bits with sign", param="seed")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens must be at least 1, not {self.max_tokens}", param="max_tokens"
            )
        if self.min_tokens < 0:
            raise InvalidRequest("min_tokens must not be negative", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is over max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        if any(len(text) > MAX_STOP_CHARS for text in self.stop):
            raise InvalidRequest(
                f"stop strings have at most {MAX_STOP_CHARS} characters", param="stop"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"logprobs must lie between 0 and {MAX_LOGPROBS}, not {self.logprobs}",
                param="logprobs",
            )
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)

    def _check_types(self) -> None:
        # A program may have put anything in; a worker that is sent it would see a broken frame.
        values = msgspec.structs.astuple(self)
        try:
            msgspec.convert(values, SamplingParams)
        except msgspec.ValidationError:
            for name, value in zip(self.__struct_fields__, values, strict=True):
                try:
                    msgspec.convert([*_DEFAULTS[name], value], SamplingParams)
                except msgspec.ValidationError as fault:
                    wrong = str(fault).partition(" - at ")[0]
                    raise InvalidRequest(f"{name}: {wrong}", param=name) from None
            raise


def check_token_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequest naming the index and the valid range if an id is out of vocabulary."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}[{index}] is {token_id}; token ids lie between 0 and {vocab_size - 1}",
                param=param,
            )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(
            f"{name} must lie between {low:g} and {high:g}, not {value}", param=name
        )


_DEFAULTS = {
    name: msgspec.structs.astuple(SamplingParams())[:index]
    for index, name in enumerate(SamplingParams.__struct_fields__)
}
"""For each field the defaults of those before it, which an array has to begin with."""
