"""What a request asks of the sampler: public, validated, shared by parent and worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

import msgspec

from trioserve.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_ID_LIST = 1024  # logit_bias, allowed_token_ids: entries; stop_token_ids over HTTP as well
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PENALTY = 2.0  # presence, frequency; of either sign
MAX_REPETITION = 100.0  # and its inverse the least
MAX_INT = 2**63 - 1
MAX_SEED = MAX_INT

_RANGES = (
    ("temperature", 0, 100),
    ("top_k", -1, MAX_INT),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("max_tokens", 1, MAX_INT),
    ("min_tokens", 0, MAX_INT),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
    ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
    ("repetition_penalty", 1 / MAX_REPETITION, MAX_REPETITION),
)
"""Fields that are numbers: the least and the most; None is not looked at."""


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
    ``bad_words`` are texts whose tokens are never completed. ``logprob_token_ids`` are tokens
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
        for name, low, high in _RANGES:
            if (value := getattr(self, name)) is not None:
                _in_range(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is over max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        _check_texts("stop", self.stop, "stop strings", MAX_STOP_STRINGS)
        _check_texts("bad_words", self.bad_words, "bad words", MAX_BAD_WORDS)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        self._check_logit_bias(vocab_size)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids is empty, which allows nothing; leave it out to allow all",
                    param="allowed_token_ids",
                )
            _check_count("allowed_token_ids", self.allowed_token_ids, MAX_ID_LIST)
            check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _check_count("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        check_token_ids("logprob_token_ids", self.logprob_token_ids, vocab_size)

    def _check_logit_bias(self, vocab_size: int) -> None:
        _check_count("logit_bias", self.logit_bias, MAX_ID_LIST)
        for token_id, value in self.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"logit_bias has the key {show_number(token_id)}; "
                    f"token ids lie between 0 and {vocab_size - 1}",
                    param="logit_bias",
                )
            if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
                raise InvalidRequest(
                    f"logit_bias[{token_id}] must lie between {-MAX_LOGIT_BIAS:g} and "
                    f"{MAX_LOGIT_BIAS:g}, not {show_number(value)}",
                    param="logit_bias",
                )

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
                f"{param}[{index}] is {show_number(token_id)}; "
                f"token ids lie between 0 and {vocab_size - 1}",
                param=param,
            )


def show_number(value: float) -> str:
    """A number for a message, whatever its size: Python refuses to spell very long ones."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a number beyond 64 bits"
    return str(value)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # so NaN is out
        raise InvalidRequest(
            f"{name} must {_range_text(low, high)}, not {show_number(value)}", param=name
        )


def _range_text(low: float, high: float) -> str:
    if high < MAX_INT:
        return f"lie between {low:g} and {high:g}"
    if low < -1:
        return "fit in 64 bits with sign"
    return f"be at least {low:g} and fit in 64 bits with sign"


def _check_count(param: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(f"{param} has {len(values)} entries; {most} are the most", param=param)


def _check_texts(param: str, texts: Sequence[str], what: str, most: int) -> None:
    if len(texts) > most:
        raise InvalidRequest(f"at most {most} {what}", param=param)
    if any(not text for text in texts):
        raise InvalidRequest(f"{what} must not be empty", param=param)
    if any(len(text) > MAX_STOP_CHARS for text in texts):
        raise InvalidRequest(f"{what} have at most {MAX_STOP_CHARS} characters", param=param)
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param}[{index}] holds half a surrogate pair at character {error.start}; "
                "send whole characters",
                param=param,
            ) from None


_DEFAULTS = {
    name: msgspec.structs.astuple(SamplingParams())[:index]
    for index, name in enumerate(SamplingParams.__struct_fields__)
}
"""For each field the defaults of those before it, which an array has to begin with."""
