"""One sequence as the Scheduler sees it. Pure: no torch, no I/O, no clock."""

from __future__ import annotations

from enum import IntEnum

from trioserve.ipc.messages import TokenLogprobs, Work
from trioserve.sampling_params import SamplingParams


class SequenceStatus(IntEnum):
    """Where a sequence is. From FINISHED on it is terminal and holds nothing."""

    WAITING = 0
    PREEMPTED = 1  # waits again; its answer's beginning is known
    RUNNING = 2
    FINISHED = 3
    ABORTED = 4
    FAILED = 5


class Sequence:
    """Tokens, blocks and progress of one Work. Only the Scheduler writes this.

    Intervals over ``token_ids``::

        [0, num_prompt_tokens)                      prompt
        [num_prompt_tokens, num_tokens)             answer
        [0, num_computed_tokens)                    in the KV cache
        [num_computed_tokens, num_tokens)           left to compute; exactly one in decode
        [0, len(block_ids) * block_size)            has room in the KV cache
        [0, num_registered * block_size)            findable by others, if ``cacheable``
        [0, len(digests) * block_size)              digests known; depends on tokens alone

    ``max_num_tokens`` is where the answer ends with "length". ``in_flight`` is the step this
    sequence is being computed in, or 0.
    """

    __slots__ = (
        "announced",
        "arrival",
        "bad_words_ids",
        "block_ids",
        "cache_salt",
        "cacheable",
        "digests",
        "followers",
        "id",
        "in_flight",
        "leader",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_passes",
        "num_prompt_tokens",
        "num_registered",
        "priority",
        "prompt_entries",
        "prompt_logprobs",
        "sampling",
        "seed",
        "sent",
        "started",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, work: Work, *, arrival: int, priority: int, max_model_len: int) -> None:
        self.id = work.id
        self.token_ids = list(work.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling: SamplingParams = work.sampling
        self.stop_token_ids = frozenset(work.sampling.stop_token_ids)
        self.seed = work.seed
        self.bad_words_ids = work.bad_words_ids
        self.cache_salt = work.cache_salt.encode()
        self.priority = priority
        self.arrival = arrival
        self.max_num_tokens = max_model_len
        if work.sampling.max_tokens is not None:
            wanted = self.num_prompt_tokens + work.sampling.max_tokens
            self.max_num_tokens = min(max_model_len, wanted)
        self.status = SequenceStatus.WAITING
        self.block_ids: list[int] = []
        self.digests: list[bytes] = []
        self.num_computed_tokens = 0
        self.num_registered = 0
        self.cacheable = True
        self.sent = False  # the executor has it
        self.in_flight = 0
        self.announced = False  # the parent knows that it waits no more
        self.started = False  # a delta with ``num_cached_tokens`` has been sent
        self.num_cached_tokens: int | None = None  # of the first admission
        self.leader: Sequence | None = None  # computes what this one, waiting, will find
        self.followers: dict[int, tuple[Sequence, int]] = {}  # and the blocks shared with each
        self.prompt_logprobs = work.sampling.prompt_logprobs  # None once they are delivered
        self.prompt_entries: list[TokenLogprobs] = []  # of the tokens from the second on, so far
        self.num_passes = 0  # how often later ones were admitted while this one had no room

    @property
    def num_tokens(self) -> int:
        """All tokens known: prompt and answer."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Known tokens that are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    def clear_progress(self) -> None:
        """Forget what depends on the blocks, which the caller has released."""
        self.block_ids = []
        self.num_computed_tokens = 0
        self.num_registered = 0
        self.cacheable = True
        self.sent = False
        self.in_flight = 0
        self.prompt_entries = []
