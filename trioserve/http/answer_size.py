"""How many log probabilities an answer may hold; they are what makes one large."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.errors import InvalidRequest
from trioserve.sampling_params import SamplingParams


def check_num_logprobs(
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    *,
    max_model_len: int,
    most: int,
) -> None:
    """Refuse a request whose answer could hold more than ``most`` log probabilities.

    Each token of an answer counts with its alternatives, for every answer to every prompt and as if
    all were as long as they may be; so do a prompt's tokens, once for each answer that shows them.

    Args:
        prompts: token ids.
        samplings: one for each answer to a prompt.
        max_model_len: tokens of a prompt and its answer together.

    Raises:
        InvalidRequest: with both numbers.
    """
    first = samplings[0]
    if first.logprobs is None and first.prompt_logprobs is None:
        return
    of_prompts, of_answers = _per_prompt_token(first), _per_token(first)
    num_logprobs = 0
    for prompt in prompts:
        room = max(max_model_len - len(prompt), 0)
        num_tokens = room if first.max_tokens is None else min(first.max_tokens, room)
        num_logprobs += len(prompt) * of_prompts + num_tokens * of_answers
    num_logprobs *= len(samplings)
    if num_logprobs > most:
        raise InvalidRequest(
            f"the answer could hold {num_logprobs} log probabilities, all prompts, answers, tokens"
            f" and alternatives counted; http.max_answer_logprobs allows {most}. Ask for fewer"
            " alternatives, a lower max_tokens or n, or split the request",
            param="prompt_logprobs" if first.logprobs is None else "logprobs",
        )


def _per_token(sampling: SamplingParams) -> int:
    if sampling.logprobs is None:
        return 0
    return 1 + sampling.logprobs + len(sampling.logprob_token_ids)


def _per_prompt_token(sampling: SamplingParams) -> int:
    if sampling.prompt_logprobs is None:
        return 0
    return 1 + sampling.prompt_logprobs
