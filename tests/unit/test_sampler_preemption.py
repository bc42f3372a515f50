"""Preemption, chunks, prefix hits and steps tried again change no token, whatever is asked for."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from trioserve.config.schema import (
    CacheConfig,
    Config,
    EngineConfig,
    KernelsConfig,
    ModelConfig,
    SchedulerConfig,
)
from trioserve.core.batch import ScheduledBatch
from trioserve.core.model_runner import ModelRunner
from trioserve.core.scheduler import Scheduler
from trioserve.core.stages import StageReporter
from trioserve.ipc.messages import TokenLogprobs, Work
from trioserve.models.spec import ModelSpec, ResolvedModel
from trioserve.sampling_params import SamplingParams

VOCAB = 97
EOS = 96
BLOCK_SIZE = 8
MAX_LEN = 64
SPEC = ModelSpec(
    architecture="llama",
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=16,
    vocab_size=VOCAB,
    max_position=MAX_LEN,
    eos_token_ids=(EOS,),
)
MODEL = ResolvedModel(
    name="tiny", source="random:llama", format="random", spec=SPEC, tokenizer_path=""
)
CONFIG = Config(
    model=ModelConfig(weights="fp32"),
    cache=CacheConfig(memory="1MiB", block_size=BLOCK_SIZE),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=12),
    kernels=KernelsConfig(attention="torch"),
    engine=EngineConfig(threads=1),
)


class Table:
    """Stands for the model: logits by (token, position) alone, so that no rounding is in play."""

    def __init__(self) -> None:
        self._rows = torch.randn(MAX_LEN + 1, 8, VOCAB, generator=torch.Generator().manual_seed(1))

    def hidden(self, token_ids: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        rows = rest[-1]
        return self._rows[positions[rows], token_ids[rows] % 8] * 2

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Session:
    """Runs works to their end."""

    def __init__(self, num_blocks: int) -> None:
        self.runner = ModelRunner(MODEL, CONFIG)
        self.runner.load(StageReporter(lambda stage: None))
        self.runner.init_kv_cache(num_blocks, MAX_LEN)
        self.runner._model = Table()
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=12,
            max_model_len=MAX_LEN,
            eos_token_ids=SPEC.eos_token_ids,
        )
        self.answers: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.events: Counter[str] = Counter()

    def run(self, works: list[Work], *, twice: bool = False) -> dict[int, list[int]]:
        """``twice``: each step is computed a second time, row by row, as after a fault."""
        for work in works:
            self.scheduler.add(work)
            self.answers[work.id], self.logprobs[work.id] = [], []
        while self.scheduler.has_work:
            batch = self.scheduler.schedule()
            assert batch is not None
            self.events["recompute"] += sum(
                len(new.token_ids) > new.num_prompt_tokens for new in batch.new
            )
            self.events["hit"] += sum(new.num_computed_tokens > 0 for new in batch.new)
            self.events["chunk"] += sum(not row.sample for row in batch.rows)
            sampled = self.runner.sample(self.runner.execute(batch))
            if twice:
                entering = {new.id: new for new in batch.new}
                alone = [
                    ScheduledBatch(
                        batch.step, [], [entering[row.id]] if row.id in entering else [], [row]
                    )
                    for row in batch.rows
                ]
                again = [self.runner.sample(self.runner.execute(one)) for one in alone]
                assert [row for part in again for row in part] == sampled
            deltas, failed = self.scheduler.update(batch, sampled)
            assert not failed
            for delta in deltas:
                self.answers[delta.id] += delta.token_ids
                self.logprobs[delta.id] += delta.logprobs or []
        return self.answers


def make_works(sampling: dict[str, Any]) -> list[Work]:
    rng = random.Random(3)
    common = [rng.randrange(VOCAB) for _ in range(17)]
    works = []
    for id in range(1, 9):
        prompt = common[: rng.randrange(18)] + [rng.randrange(VOCAB) for _ in range(1 + id % 5)]
        words = tuple((rng.randrange(VOCAB), rng.randrange(VOCAB)) for _ in range(100))
        params = SamplingParams(max_tokens=20 + id, **sampling)
        works.append(Work(id, prompt, params, seed=id, bad_words_ids=(*words, (5,))))
    return works


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {
        "temperature": 0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
    },
    "random": {
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 0.8,
        "frequency_penalty": 1.5,
        "min_tokens": 12,
        "logit_bias": {EOS: 3.0, 7: 1.0},
        "allowed_token_ids": tuple(range(2, VOCAB)),
    },
    "all": {
        "temperature": 1.1,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "logprobs": 2,
        "logprob_token_ids": (EOS, 0),
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_sa_01_preemption_and_batch_mates_change_no_token(name: str) -> None:
    works = make_works(KINDS[name])
    alone: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    for work in works:
        session = Session(MAX_LEN)
        alone |= session.run([work])
        logprobs |= session.logprobs
    for num_blocks, twice in ((200, False), (9, False), (9, True)):
        session = Session(num_blocks)
        assert session.run(works, twice=twice) == alone
        assert session.logprobs == logprobs
        assert session.events["chunk"] > 2
        if num_blocks == 9:
            assert session.events["recompute"] > 1
            assert session.scheduler.stats(0.0).num_preemptions > 1
    # What was asked for did matter.
    bare = SamplingParams(temperature=works[0].sampling.temperature, max_tokens=20)
    plain = Session(200).run([msgspec.structs.replace(work, sampling=bare) for work in works])
    assert sum(plain[id] != alone[id][:20] for id in plain) > 4
    assert all(5 not in alone[work.id] for work in works)
    for work in works:
        answer = alone[work.id]
        pairs = set(pairwise(answer))
        assert not pairs & set(work.bad_words_ids)


def test_sa_01_the_same_request_again_hits_the_cache_and_says_the_same() -> None:
    session = Session(200)
    works = make_works(KINDS["random"])
    first = {id: list(answer) for id, answer in session.run(works).items()}
    hits = session.events["hit"]
    again = [msgspec.structs.replace(work, id=work.id + 100) for work in reversed(works)]
    session.run(again)
    assert session.events["hit"] > hits
    for id, answer in first.items():
        assert session.answers[id + 100] == answer


def test_a_request_that_leaves_itself_no_token_ends_as_invalid() -> None:
    """Its blocks stay findable, as nothing was wrong with what was computed."""
    session = Session(200)
    sampling = SamplingParams(temperature=0, allowed_token_ids=(4, 6), max_tokens=10)
    prompt = list(range(10, 27))
    words = ((4, 4), (4, 6), (6, 4), (6, 6))
    session.scheduler.add(Work(1, prompt, sampling, seed=0, bad_words_ids=words))
    failed = []
    tokens = 0
    while session.scheduler.has_work:
        batch = session.scheduler.schedule()
        assert batch is not None
        deltas, failures = session.scheduler.update(
            batch, session.runner.sample(session.runner.execute(batch))
        )
        tokens += sum(len(delta.token_ids) for delta in deltas)
        failed += failures
    assert tokens == 1
    (failure,) = failed
    assert failure.code == "invalid"
    assert "bad_words" in failure.message
    session.run([Work(2, prompt, SamplingParams(max_tokens=1), seed=0)])
    assert session.events["hit"] == 1
