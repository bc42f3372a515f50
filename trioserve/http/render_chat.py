"""``chat.completion`` and its chunks; pure."""

from __future__ import annotations

from typing import Any

import orjson

from trioserve.engine.api import TextDelta, TokenLogprob, Usage
from trioserve.http.generation import ChoiceSoFar
from trioserve.http.render import (
    Head,
    OpenAIRenderer,
    array,
    finite,
    in_batches,
    prompt_logprobs_object,
)

PLAIN_END = b'},"logprobs":null,"finish_reason":null}'


class ChatRenderer(OpenAIRenderer):
    """Renders one chat answer.

    Args:
        head: what all chunks repeat.
        num_choices: answers shown.
        echo: text before each answer.
        prompt_token_ids: shown if the shape says so.
        prompt_text: shown if it is not None.
    """

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        head: Head,
        num_choices: int,
        *,
        echo: str,
        prompt_token_ids: list[int],
        prompt_text: str | None,
    ) -> None:
        super().__init__(head, num_choices)
        self._echo = echo
        self._plain_starts = [
            b'{"index":%d,"delta":{"content":' % index for index in range(num_choices)
        ]
        self._prompt: dict[str, Any] = {}
        if self._shape.token_ids:
            self._prompt["prompt_token_ids"] = prompt_token_ids
        if prompt_text is not None:
            self._prompt["prompt_text"] = prompt_text

    def opening(self) -> bytes:
        """For each choice a chunk with the role alone, and one with the echo, if there is one."""
        chunks = []
        for index in range(len(self._plain_starts)):
            role = _choice(index, {"role": "assistant", "content": ""})
            chunks.append(self._chunk(orjson.dumps(role), self._prompt))
            if self._echo:
                chunks.append(self._chunk(self._plain_choice(index, self._echo)))
        return b"".join(chunks)

    def delta(self, choice: int, delta: TextDelta) -> bytes:
        """The chunk for a delta; none if it shows nothing."""
        more = self._delta(delta)
        if self._plain and delta.text and delta.finish_reason is None:
            return self._chunk(self._plain_choice(choice, delta.text))
        if not self._shows(delta):
            return b""
        rendered = _choice(choice, {"content": delta.text} if delta.text else {})
        rendered["logprobs"] = self._logprobs(delta.logprobs or [])
        rendered["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            rendered["stop_reason"] = delta.stop_reason
        if self._shape.token_ids:
            rendered["token_ids"] = delta.token_ids
        return self._chunk(orjson.dumps(rendered), more)

    def whole(self, choices: list[ChoiceSoFar], usage: Usage) -> dict[str, Any]:
        """The answer in one piece. The choices' log probabilities are used up."""
        rendered = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        num_top, prompt = self._shape.prompt_logprobs, choices[0].prompt_logprobs
        return self._whole(rendered, usage) | {
            "prompt_logprobs": prompt_logprobs_object(prompt, num_top),
            "prompt_token_ids": self._prompt.get("prompt_token_ids"),
            "prompt_text": self._prompt.get("prompt_text"),
        }

    def _whole_choice(self, index: int, choice: ChoiceSoFar) -> dict[str, Any]:
        tokens, choice.logprobs = choice.logprobs, []
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": self._echo + "".join(choice.text),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": self._logprobs(tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._shape.token_ids else None,
        }

    def _plain_choice(self, index: int, text: str) -> bytes:
        return self._plain_starts[index] + orjson.dumps(text) + PLAIN_END

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        num_top = self._shape.logprobs
        if num_top is None:
            return None
        entries = ([self._entry(token, num_top) for token in batch] for batch in in_batches(tokens))
        return {"content": array(entries), "refusal": None}

    def _entry(self, token: TokenLogprob, num_top: int) -> dict[str, Any]:
        others = [*token.top[:num_top]]
        if token.wanted:
            shown = {other.token_id for other in others}
            others += [other for other in token.wanted if other.token_id not in shown]
        return self._token(token) | {"top_logprobs": [self._token(other) for other in others]}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        as_id = self._shape.tokens_as_ids
        return {
            "token": f"token_id:{token.token_id}" if as_id else token.token,
            "logprob": finite(token.logprob),
            "bytes": list(token.token_bytes),
        }


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
