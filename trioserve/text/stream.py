"""From the worker's deltas of one request to the text its reader sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from trioserve.engine.api import TextDelta, TokenLogprob
from trioserve.ipc.messages import Delta, TokenLogprobs
from trioserve.sampling_params import SamplingParams
from trioserve.text.detokenizer import Detokenizer
from trioserve.text.stop_strings import StopMatcher
from trioserve.text.tokenizer import Tokenizer, spell

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


class TextStream:
    """One answer: detokenizing, stop strings, ``min_tokens``, log probabilities. Owned by whoever
    owns the request; no I/O.

    A token is delivered together with the text its bytes belong to: while a character is not
    whole or a stop string may have begun, the tokens are held back with the text. So over a whole
    answer the tokens' bytes joined are the text's bytes, up to the cut that a stop string makes
    inside its last tokens. Control tokens and the token that ended the answer have no text; their
    bytes are empty, their name is shown. With ``skip_special_tokens`` off control tokens are text
    like others, the one that ended the answer only with ``include_stop_str_in_output``. How deltas
    are cut does not matter: two merged give the same text, tokens and end as one after the other.

    A stop string counts only if it lies wholly in the text of the tokens after the first
    ``min_tokens``. On a match the answer ends with the token that completed it; ``finished`` turns
    true while the worker still runs, and the owner has to abort the work.

    Attributes:
        finished: the last delta was returned; all later ones are ignored.
        finish_reason: "stop", "length" or "abort" once finished.
        stop_reason: the stop string or stop token id that ended it, if one did.
        num_output_tokens: tokens delivered so far, the token that ended the answer included.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        """Raises ModelError for a tokenizer that cannot be decoded token by token."""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.num_output_tokens = 0
        self._tokenizer = tokenizer
        self._shown = tokenizer.shown if sampling.skip_special_tokens else tokenizer.spelt
        self._sampling = sampling
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, sampling.skip_special_tokens)
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._wants_logprobs = sampling.logprobs is not None
        self._num_tokens = 0  # seen
        self._num_decoded = 0  # characters made
        self._num_shown = 0  # characters delivered
        # Tokens not delivered yet, each with the number of characters to be shown before it.
        self._held: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._prompt: list[TokenLogprob | None] | None = None  # not delivered yet
        self._prompt_text: Detokenizer | None = None  # while its tokens come

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push_prompt(self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]) -> None:
        """Take in log probabilities of the prompt's next tokens; the first token's is None.

        They are delivered by the next ``push``, whose delta need not hold anything.
        """
        if self._prompt is None or self._prompt_text is None:
            skip = self._sampling.skip_special_tokens
            self._prompt, self._prompt_text = [], Detokenizer(self._tokenizer, (), skip)
        for token_id, given in zip(token_ids, scores, strict=True):
            data, _ = self._prompt_text.step(token_id)
            self._prompt.append(None if given is None else self._logprob(given, data, False))

    def push(self, delta: Delta) -> TextDelta | None:
        """What of the answer can be shown after this delta; None if that is nothing new.

        ``delta.prompt_logprobs`` are not looked at: see ``push_prompt``. A delta with
        ``finish_reason`` "stop" must hold the token that ended it, as its last.
        """
        if self.finished:
            return None
        end = self._hidden_from(delta)
        logprobs = delta.logprobs if self._wants_logprobs else None
        shown: list[str] = []
        for index, token_id in enumerate(delta.token_ids):
            data, text = self._detokenizer.step(token_id) if index < end else (b"", "")
            self._num_tokens += 1
            self._num_decoded += len(text)
            needed = self._num_decoded + (self._detokenizer.num_held_bytes > 0)
            entry = None
            if logprobs is not None:
                entry = self._logprob(logprobs[index], data, hidden=index >= end)
            self._held.append((needed, token_id, entry))
            if text and self._look_for_stop(text, shown):
                break
        else:
            if delta.finish_reason is not None:
                self._end(delta, shown)
        return self._deliver("".join(shown))

    def _hidden_from(self, delta: Delta) -> int:
        """Index of the token that ended the answer, whose text is not part of it."""
        num_tokens = len(delta.token_ids)
        if delta.finish_reason != "stop":
            return num_tokens
        sampling = self._sampling
        is_text = delta.stop_token_id is not None or not sampling.skip_special_tokens
        if is_text and sampling.include_stop_str_in_output:
            return num_tokens
        return num_tokens - 1

    def _look_for_stop(self, text: str, shown: list[str]) -> bool:
        if self._num_tokens <= self._sampling.min_tokens:
            shown.append(text)
            return False
        text, matched = self._matcher.push(text)
        shown.append(text)
        if matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", matched
        return True

    def _end(self, delta: Delta, shown: list[str]) -> None:
        tail = self._detokenizer.finish()
        if tail and self._look_for_stop(tail, shown):
            return
        shown.append(self._matcher.finish())
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_token_id

    def _deliver(self, text: str) -> TextDelta | None:
        self._num_shown += len(text)
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        while self._held and (self.finished or self._held[0][0] <= self._num_shown):
            _, token_id, entry = self._held.popleft()
            token_ids.append(token_id)
            if entry is not None:
                logprobs.append(entry)
        self.num_output_tokens += len(token_ids)
        prompt, self._prompt = self._prompt, None
        if not (text or token_ids or self.finished or prompt):
            return None
        return TextDelta(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs if self._wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_logprobs=prompt,
        )

    def _logprob(self, given: TokenLogprobs, data: bytes, hidden: bool) -> TokenLogprob:
        chosen = given.token_id
        name, usual = self._shown(chosen)
        if data != usual and not hidden:
            name = spell(data)  # the first token of a text, without its leading space
        top = []
        for rank, (token_id, logprob) in enumerate(given.top, 1):
            other, raw = (name, data) if token_id == chosen else self._shown(token_id)
            top.append(TokenLogprob(other, token_id, raw, _finite(logprob), (), rank))
        wanted: tuple[TokenLogprob, ...] = ()
        if given.wanted:
            wanted = tuple(
                TokenLogprob(*self._entry(token_id), _finite(logprob), ())
                for token_id, logprob in given.wanted
            )
        logprob = _finite(given.logprob)
        return TokenLogprob(name, chosen, data, logprob, tuple(top), given.rank, wanted)

    def _entry(self, token_id: int) -> tuple[str, int, bytes]:
        name, data = self._shown(token_id)
        return name, token_id, data


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # NaN is not greater either
