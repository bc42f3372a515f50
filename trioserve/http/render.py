"""The JSON of answers in OpenAI's shapes; pure."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable
from typing import Any

import attrs

from trioserve.engine.api import TextDelta, TokenLogprob, Usage
from trioserve.errors import RequestError
from trioserve.http.errors import error_object
from trioserve.http.generation import ChoiceSoFar
from trioserve.http.sse import encode_event

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
DONE = b"data: [DONE]\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@attrs.frozen
class Head:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    with_usage: bool  # the usage chunk was asked for: others say null
    want_logprobs: bool


class _Renderer:
    """What both routes have in common."""

    kind: str  # of chunks

    def __init__(self, head: Head) -> None:
        self._head = head

    def closing(self, usage: Callable[[], Usage]) -> bytes:
        """The usage in a chunk without choices, if it was asked for, and the mark of success."""
        if not self._head.with_usage:
            return DONE
        return encode_event(self._base(self.kind, []) | {"usage": usage_object(usage())}) + DONE

    def failure(self, error: RequestError) -> bytes:
        """An event with the error; no mark follows it."""
        return encode_event(error_object(error))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._base(self.kind, [choice])
        if self._head.with_usage:
            chunk["usage"] = None
        return encode_event(chunk)

    def _base(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": None,
            "choices": choices,
        }


class ChatRenderer(_Renderer):
    """``chat.completion`` and its chunks."""

    kind = "chat.completion.chunk"

    def __init__(self, head: Head, num_choices: int) -> None:
        super().__init__(head)
        self._num_choices = num_choices

    def opening(self) -> bytes:
        """One chunk per choice with the role alone."""
        role = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(_chat_choice(index, role, None)) for index in range(self._num_choices)
        )

    def delta(self, choice: int, delta: TextDelta) -> bytes:
        """The chunk for a delta; none if it shows nothing."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return b""
        content = {"content": delta.text} if delta.text else {}
        rendered = _chat_choice(choice, content, self._logprobs(delta.logprobs or []))
        rendered["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            rendered["stop_reason"] = delta.stop_reason
        return self._chunk(rendered)

    def whole(self, choices: list[ChoiceSoFar], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        rendered = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(choice.text),
                    "refusal": None,
                },
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._base("chat.completion", rendered) | {"usage": usage_object(usage)}

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._head.want_logprobs:
            return None
        content = [
            _chat_token(token) | {"top_logprobs": [_chat_token(other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _chat_choice(index: int, delta: dict[str, Any], logprobs: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": _finite(token.logprob),
        "bytes": list(token.token_bytes),
    }


class CompletionRenderer(_Renderer):
    """``text_completion``, whole and in chunks.

    Args:
        head: what all chunks repeat.
        echoes: for each choice the text shown before the answer, empty for none.
    """

    kind = "text_completion"

    def __init__(self, head: Head, echoes: list[str]) -> None:
        super().__init__(head)
        self._echoes = echoes
        self._offsets = [_Offsets(len(echo)) for echo in echoes]

    def opening(self) -> bytes:
        """The echoed prompts, if any."""
        return b"".join(
            self._chunk(_text_choice(index, echo, None, None, None))
            for index, echo in enumerate(self._echoes)
            if echo
        )

    def delta(self, choice: int, delta: TextDelta) -> bytes:
        """The chunk for a delta; none if it shows nothing."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return b""
        logprobs = self._logprobs(choice, delta.logprobs or [])
        return self._chunk(
            _text_choice(choice, delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        )

    def whole(self, choices: list[ChoiceSoFar], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        rendered = [
            _text_choice(
                index,
                self._echoes[index] + "".join(choice.text),
                self._logprobs(index, choice.logprobs),
                choice.finish_reason,
                choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return self._base(self.kind, rendered) | {"usage": usage_object(usage)}

    def _logprobs(self, choice: int, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._head.want_logprobs:
            return None
        offsets = self._offsets[choice]
        return {
            "tokens": [_token_key(token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            # The chosen token is always among them, so there may be one more than asked for.
            "top_logprobs": [
                {_token_key(other): _finite(other.logprob) for other in (*token.top, token)}
                for token in tokens
            ],
            "text_offset": [offsets.next(token.token_bytes) for token in tokens],
        }


def _text_choice(
    index: int, text: str, logprobs: Any, finish_reason: str | None, stop_reason: str | int | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


class _Offsets:
    """Where each token begins in the text, in characters; tokens may end inside one."""

    def __init__(self, start: int) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_bytes: bytes) -> int:
        """The offset of the next token."""
        offset = self._offset
        self._offset += len(self._decoder.decode(token_bytes))
        return offset


def _token_key(token: TokenLogprob) -> str:
    """The token's text, or its bytes where they are no text: keys must tell tokens apart."""
    try:
        token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
    return token.token


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
