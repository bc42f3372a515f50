"""From what a user sends to token ids, and back: the engine's use of the text layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import trio

from trioserve.errors import ContextLengthExceeded, InvalidRequest, ModelError
from trioserve.models.spec import ResolvedModel
from trioserve.sampling_params import SamplingParams, check_token_ids
from trioserve.text.chat_template import ChatTemplate, TemplateStopped
from trioserve.text.template_limits import Limits
from trioserve.text.tokenizer import Tokenizer

LONG_TEXT = 16 * 1024  # characters, or tokens; beyond it, work on it goes to a thread
CALL_CHARS = 128  # what a call costs beside its text, in characters
TURN_CHARS = 4 * 1024  # of short texts, one after another, before others get their turn
AT_ONCE = Limits(steps=20_000, size=1024 * 1024, cpu_s=0.05)
"""What a template may take while others wait: some milliseconds."""
MAX_BAD_WORD_IDS = 1024
MAX_BAD_WORD_CHARS = 8 * 1024

T = TypeVar("T")


class Prompts:
    """The text side of one inspected model.

    Stateless but for threads, a memory of bad words, and a count of the characters worked on since
    the loop was last let go on.

    Args:
        limiter: one thread, held while a long text is worked on. Templates of requests have
            another: one that never ends holds up its like, and no long prompt.
    """

    def __init__(
        self,
        model: ResolvedModel,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limiter: trio.CapacityLimiter,
    ) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self._template = template
        self._limiter = limiter
        self._template_limiter = trio.CapacityLimiter(1)
        self._num_chars = 0
        self._last_bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = ((), ())

    async def encode(self, text: str, max_model_len: int, *, add_special_tokens: bool) -> list[int]:
        """Tokenize; long texts in a thread. Cancellation abandons the result.

        Raises:
            ContextLengthExceeded: the text cannot fit, whatever the tokenizer makes of it.
        """
        limit = max_model_len
        least = self.tokenizer.min_num_tokens(text, limit + 1)
        if least > limit:
            raise ContextLengthExceeded(
                f"the prompt is too long: this model's maximum context length is {limit} tokens, a "
                f"prompt of {len(text)} characters is at least {least} tokens",
                param="prompt",
            )
        return await self._off_loop(len(text), self.tokenizer.encode, text, add_special_tokens)

    async def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The prompt of a chat. Cancellation abandons the result.

        A template that came with the request is a stranger's program: it always runs in a
        thread, so that the event loop goes on beside it. The model's own begins at once where there
        is little text; one that takes more than ``AT_ONCE`` begins anew in that thread.

        Raises:
            InvalidRequest: there is no template, the one given is broken, or it refuses these
                messages.
        """
        kwargs: dict[str, Any] = dict(template_kwargs or {})
        for name in ("add_generation_prompt", "continue_final_message"):
            if name in kwargs:
                raise InvalidRequest(
                    f"{name} is a field of its own", param=f"chat_template_kwargs.{name}"
                )
        kwargs["add_generation_prompt"] = add_generation_prompt
        kwargs["continue_final_message"] = continue_final_message
        if chat_template is not None:
            render = partial(self._render_with, chat_template, messages, **kwargs)
            return await self._in_thread(render, self._template_limiter)
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or set model.chat_template"
            )
        render = partial(self._template.render, messages)
        length = text_length([messages, template_kwargs])
        if length > LONG_TEXT:
            return await self._in_thread(partial(render, **kwargs), self._limiter)
        await self._take_turn(length)
        try:
            return render(AT_ONCE, **kwargs)
        except TemplateStopped:
            return await self._in_thread(partial(render, **kwargs), self._template_limiter)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; long lists in a thread. Cancellation abandons the result.

        Raises:
            InvalidRequest: an id outside the model's vocabulary.
        """
        return await self._off_loop(len(token_ids), self._decode, token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary writes it, empty for ids without one."""
        if not 0 <= token_id < self.tokenizer.num_token_ids:
            return ""
        return self.tokenizer.token_content(token_id) or ""

    def bad_words_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token sequences of ``sampling.bad_words``: each as it is, and after a space.

        Raises:
            InvalidRequest: they are too many or too long; half a surrogate pair.
        """
        if not sampling.bad_words:
            return ()
        words, found = self._last_bad_words
        if words != sampling.bad_words:  # prompts and choices of one request have the same
            found = self._encode_bad_words(sampling)
            self._last_bad_words = (tuple(sampling.bad_words), found)
        return found

    def _encode_bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if sum(map(len, sampling.bad_words)) > MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"bad_words have at most {MAX_BAD_WORD_CHARS} characters together",
                param="bad_words",
            )
        forms = [form for word in sampling.bad_words for form in (word, " " + word.lstrip(" "))]
        encoded = (tuple(self.tokenizer.encode(form, False)) for form in dict.fromkeys(forms))
        sequences = tuple(dict.fromkeys(ids for ids in encoded if ids))
        num_ids = sum(map(len, sequences))
        if num_ids > MAX_BAD_WORD_IDS:
            raise InvalidRequest(
                f"bad_words are {num_ids} tokens together, with and without a space before them; "
                f"at most {MAX_BAD_WORD_IDS}",
                param="bad_words",
            )
        return sequences

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        check_token_ids("tokens", token_ids, self._model.spec.vocab_size)
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    def _render_with(self, source: str, messages: list[dict[str, Any]], /, **kwargs: Any) -> str:
        try:
            template = ChatTemplate(source, self._model.bos_token, self._model.eos_token)
        except ModelError as error:
            raise InvalidRequest(str(error), param="chat_template") from None
        try:
            return template.render(messages, **kwargs)
        except TemplateStopped as stopped:
            stopped.param = "chat_template"
            raise

    async def _off_loop(self, length: int, function: Callable[..., T], *args: Any) -> T:
        """Call ``function``, in a thread if it works on a long text; cancellation abandons it."""
        if length <= LONG_TEXT:
            await self._take_turn(length)
            return function(*args)
        return await self._in_thread(partial(function, *args), self._limiter)

    async def _take_turn(self, length: int) -> None:
        """Let others go on, unless little was worked on since: a turn costs more than most texts.
        Cancellation comes through."""
        self._num_chars += CALL_CHARS + length
        if self._num_chars > TURN_CHARS:
            self._num_chars = 0
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    async def _in_thread(self, function: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        return await trio.to_thread.run_sync(function, limiter=limiter, abandon_on_cancel=True)


def text_length(value: Any) -> int:
    """Characters of all text anywhere inside a JSON-like value; a cheap measure of work."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_length, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(text_length, value))
    return 0


def as_prompt(prompt: str | Sequence[int] | list[dict[str, Any]]) -> str | list[Any]:
    """A prompt of ``Engine.generate``: a text, or a list of messages or of plain token ids.

    Arrays of other libraries are taken as well.

    Raises:
        InvalidRequest: it is none of these.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Iterable) or isinstance(prompt, Mapping | bytes | bytearray):
        raise InvalidRequest(
            f"a prompt is a text, token ids or chat messages, not {type(prompt).__name__}",
            param="prompt",
        )
    items: list[Any] = list(prompt)
    return items if is_chat(items) else [_plain(item) for item in items]


def is_chat(items: list[Any]) -> bool:
    """Whether a prompt's items are messages, and not token ids."""
    return bool(items) and isinstance(items[0], dict)


def _plain(item: Any) -> Any:
    """An integer of another library as an int; anything else as it is, to be refused."""
    if isinstance(item, bool):
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item
