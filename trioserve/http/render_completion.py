"""``text_completion``, whole and in chunks; pure."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import orjson

from trioserve.engine.api import TextDelta, TokenLogprob, Usage
from trioserve.http.generation import ChoiceSoFar
from trioserve.http.render import (
    Head,
    OpenAIRenderer,
    finite,
    in_batches,
    joined,
    prompt_logprobs_object,
)

PLAIN_END = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

Entries = list[TokenLogprob | None]
Columns = dict[str, list[bytes]]  # the inside of each of COLUMNS as JSON, in pieces


@attrs.frozen
class Prompt:
    """One prompt of the request.

    Attributes:
        token_ids: as submitted.
        echo: text shown before each answer, None if the prompt is not shown. It is empty if all
            of the prompt's tokens are control tokens; they have log probabilities all the same.
        first_token: text of its first token, which has no log probability to come with it.
    """

    token_ids: list[int]
    echo: str | None = None
    first_token: str = ""

    def entries(self, given: Entries) -> list[TokenLogprob]:
        """Its tokens with what the engine said of all but the first."""
        data = self.first_token.encode()
        first = TokenLogprob(self.first_token, self.token_ids[0], data, 0.0, [])
        return [first, *(entry for entry in given[1:] if entry is not None)]


@attrs.frozen
class _PromptJson:
    """What an answer says of its prompt: what it echoes, by columns, and ``prompt_logprobs``."""

    columns: Columns
    objects: orjson.Fragment | None


class CompletionRenderer(OpenAIRenderer):
    """Renders one completion; choices are numbered prompt by prompt.

    Args:
        head: what all chunks repeat.
        prompts: at least one.
        per_prompt: answers shown for each.
        scores: only the prompts are shown, not the token that each answer has.
    """

    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, head: Head, prompts: list[Prompt], per_prompt: int, *, scores: bool) -> None:
        num_choices = len(prompts) * per_prompt
        super().__init__(head, num_choices)
        self._prompts = prompts
        self._per_prompt = per_prompt
        self._scores = scores
        self._offsets = [_Offsets(prompts[index // per_prompt]) for index in range(num_choices)]
        self._plain_starts = [b'{"index":%d,"text":' % index for index in range(num_choices)]
        # An echo with log probabilities has to wait for them; so does what follows the echo.
        self._echo_waits = head.shape.logprobs is not None and any(
            p.echo is not None for p in prompts
        )
        self._waiting: dict[int, list[tuple[int, TextDelta]]] = {}
        if self._echo_waits:
            self._waiting = {index: [] for index in range(len(prompts))}
        self._last_prompt = -1, _PromptJson({}, None)
        # Choices whose first chunk is still to come, which has the prompt's ids.
        self._unsaid = set(range(num_choices)) if head.shape.token_ids else set[int]()

    def opening(self) -> bytes:
        """The echoed prompts, if they need not wait."""
        if self._echo_waits:
            return b""
        return b"".join(
            self._chunk(orjson.dumps(self._shown(index, prompt.echo)))
            for index in range(self._num_running)
            if (prompt := self._prompts[index // self._per_prompt]).echo
        )

    def delta(self, choice: int, delta: TextDelta) -> bytes:
        """The chunks for a delta; none if it shows nothing yet."""
        if self._scores:
            delta = msgspec.structs.replace(
                delta,
                text="",
                token_ids=[],
                logprobs=None,
                finish_reason=delta.finish_reason and "length",
                stop_reason=None,
            )
        number = choice // self._per_prompt
        waiting = self._waiting.get(number)
        if waiting is None:
            return self._render(choice, delta)
        waiting.append((choice, delta))
        if delta.prompt_logprobs is None:
            return b""
        del self._waiting[number]
        return self._echo(number, delta.prompt_logprobs) + b"".join(
            self._render(index, kept) for index, kept in waiting
        )

    def closing(self, usage: Callable[[], Usage]) -> bytes:
        """The usage in a chunk without choices, if it was asked for, and the mark of success."""
        assert not self._waiting
        return super().closing(lambda: self._counted(usage()))

    def whole(self, choices: list[ChoiceSoFar], usage: Usage) -> dict[str, Any]:
        """The answer in one piece. The choices' log probabilities are used up."""
        rendered = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        return self._whole(rendered, self._counted(usage))

    def _counted(self, usage: Usage) -> Usage:
        return msgspec.structs.replace(usage, completion_tokens=0) if self._scores else usage

    def _echo(self, number: int, given: Entries) -> bytes:
        prompt = self._prompts[number]
        first, text = number * self._per_prompt, prompt.echo or ""
        columns = self._echoed_columns(first, given)  # the same for each choice, and long
        logprobs = {name: joined(column) for name, column in columns.items()}
        return b"".join(
            self._chunk(orjson.dumps(self._shown(index, text, logprobs)))
            for index in range(first, first + self._per_prompt)
        )

    def _render(self, index: int, delta: TextDelta) -> bytes:
        more = self._delta(delta)
        if self._plain and delta.text and delta.finish_reason is None:
            return self._chunk(self._plain_starts[index] + orjson.dumps(delta.text) + PLAIN_END)
        if not self._shows(delta):
            return b""
        choice = self._shown(index, delta.text, self._logprobs(index, delta.logprobs or []))
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if self._shape.token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(orjson.dumps(choice), more)

    def _shown(self, index: int, text: str, logprobs: Any = None) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }
        if index in self._unsaid:
            self._unsaid.discard(index)
            choice["prompt_token_ids"] = self._prompts[index // self._per_prompt].token_ids
        return choice

    def _whole_choice(self, index: int, choice: ChoiceSoFar) -> dict[str, Any]:
        prompt = self._prompts[index // self._per_prompt]
        tokens, token_ids, text = choice.logprobs, choice.token_ids, "".join(choice.text)
        of_prompt = self._of_prompt(index, choice.prompt_logprobs)
        choice.logprobs, choice.prompt_logprobs = [], None
        if self._scores:
            tokens, token_ids, text = [], [], ""
        show_ids = self._shape.token_ids
        return {
            "index": index,
            "text": (prompt.echo or "") + text,
            "logprobs": self._whole_logprobs(index, tokens, of_prompt),
            "finish_reason": "length" if self._scores else choice.finish_reason,
            "stop_reason": None if self._scores else choice.stop_reason,
            "token_ids": token_ids if show_ids else None,
            "prompt_token_ids": prompt.token_ids if show_ids else None,
            "prompt_logprobs": of_prompt.objects,
        }

    def _whole_logprobs(
        self, index: int, tokens: list[TokenLogprob], prompt: _PromptJson
    ) -> dict[str, Any] | None:
        if self._shape.logprobs is None:
            return None
        columns = self._columns_json(tokens, self._offsets[index].of_answer(tokens))
        echoed = prompt.columns
        return {name: joined([*echoed.get(name, ()), *columns[name]]) for name in COLUMNS}

    def _of_prompt(self, index: int, given: Entries | None) -> _PromptJson:
        """What the answer says of the prompt of choice ``index``: the same for all its choices,
        which come one after another, and made once for them."""
        number = index // self._per_prompt
        if self._last_prompt[0] != number:
            columns: Columns = {}
            if self._shape.logprobs is not None and given is not None:
                columns = self._echoed_columns(index, given)
            objects = prompt_logprobs_object(given, self._shape.prompt_logprobs)
            self._last_prompt = number, _PromptJson(columns, objects)
        return self._last_prompt[1]

    def _echoed_columns(self, index: int, given: Entries) -> Columns:
        prompt = self._prompts[index // self._per_prompt]
        if prompt.echo is None:
            return {}
        tokens = prompt.entries(given)
        return self._columns_json(tokens, self._offsets[index].of_prompt(tokens), is_prompt=True)

    def _columns_json(
        self, tokens: list[TokenLogprob], offsets: list[int], *, is_prompt: bool = False
    ) -> Columns:
        columns: Columns = {name: [] for name in COLUMNS}
        for batch, places in zip(in_batches(tokens), in_batches(offsets), strict=True):
            shown = self._columns(batch)
            shown["text_offset"] = places
            if is_prompt and batch[0] is tokens[0]:  # nothing comes before it to judge it by
                shown["token_logprobs"][0] = shown["top_logprobs"][0] = None
            for name, column in shown.items():
                columns[name].append(orjson.dumps(column)[1:-1])
        return columns

    def _logprobs(self, index: int, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._shape.logprobs is None:
            return None
        shown = self._columns(tokens)
        shown["text_offset"] = self._offsets[index].of_answer(tokens)
        return shown

    def _columns(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        num_top = self._shape.logprobs
        return {
            "tokens": [self._key(token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            # The chosen token is always among them, so there may be one more than asked for.
            "top_logprobs": [
                {
                    self._key(other): finite(other.logprob)
                    for other in (*token.top[:num_top], *token.wanted, token)
                }
                for token in tokens
            ],
        }

    def _key(self, token: TokenLogprob) -> str:
        """The token's text, or its bytes where they are no text: keys must tell tokens apart."""
        if self._shape.tokens_as_ids:
            return f"token_id:{token.token_id}"
        try:
            token.token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
        return token.token


class _Offsets:
    """Where each token of one choice begins in its text, in characters; tokens may end inside one.

    The prompt's tokens may have more text than was given as the prompt: what a tokenizer puts
    before it. Such tokens begin where the text does.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._num_echoed = self._offset = len(prompt.echo or "")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_answer(self, tokens: list[TokenLogprob]) -> list[int]:
        """Offsets of the answer's next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.token_bytes))
        return offsets

    def of_prompt(self, tokens: list[TokenLogprob]) -> list[int]:
        """Offsets of all the prompt's tokens."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offset = self._num_echoed - len(
            b"".join(t.token_bytes for t in tokens).decode(errors="replace")
        )
        offsets = []
        for token in tokens:
            offsets.append(min(max(offset, 0), self._num_echoed))
            offset += len(decoder.decode(token.token_bytes))
        return offsets
