"""``[engine] deterministic``: the same logits to the bit, whatever the schedule."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.config.schema import EngineConfig, SchedulerConfig
from trioserve.core import model_runner
from trioserve.core.scheduler import Scheduler
from trioserve.errors import ModelError
from trioserve.sampling_params import SamplingParams

from .test_runner import WHOLE, Session, config, lively_model, prompts, start

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=10, logprobs=3)


@pytest.fixture(autouse=True)
def _lively(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_runner, "load_model", lively_model)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def deterministic(weights: str, threads: int = 2, **changes):
    engine = EngineConfig(threads=threads, deterministic=True)
    return config(weights=weights, engine=engine, **changes)


class Random(Session):
    """A session whose scheduler has limits and a cache of its own."""

    def __init__(self, runner, num_blocks: int, **limits) -> None:
        super().__init__(runner, num_blocks)
        self.scheduler = Scheduler(num_blocks=num_blocks, block_size=8, max_model_len=96, **limits)


@pytest.fixture(scope="module")
def runners():
    """Runner and reference session by layout: each prompt alone, in one chunk, no prefix hits."""
    made = {}

    def make(weights: str):
        if weights not in made:
            scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96)
            runner = start(deterministic(weights, scheduler=scheduler), 120)
            alone = {}
            for id, prompt in enumerate(prompts()):
                session = Random(
                    runner, 120, max_num_seqs=1, max_num_batched_tokens=96, prefix_caching=False
                )
                session.add_with(id, prompt, SAMPLED)
                session.run()
                alone[id] = session
            made[weights] = runner, alone
        return made[weights]

    return make


@pytest.mark.parametrize("weights", ["fp16", "int8", WHOLE])
@settings(max_examples=12)
@given(
    num_blocks=st.sampled_from([14, 20, 40, 120]),
    max_num_seqs=st.integers(1, 8),
    max_tokens=st.sampled_from([8, 9, 17, 24, 50, 96]),
    prefix_caching=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_schedule_gives_the_same_bits(
    runners, weights, num_blocks, max_num_seqs, max_tokens, prefix_caching, seed
):
    runner, alone = runners(weights)
    session = Random(
        runner,
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        prefix_caching=prefix_caching,
    )
    chance = random.Random(seed)
    waiting = list(enumerate(prompts()))
    chance.shuffle(waiting)
    while waiting or session.scheduler.has_work:
        for id, prompt in waiting[: chance.randrange(4)]:
            session.add_with(id, prompt, SAMPLED)
        waiting = [item for item in waiting if item[0] not in session.prompts]
        if session.scheduler.has_work:
            session.step()
    for id, reference in alone.items():
        assert session.answers[id] == reference.answers[id]
        assert session.logprobs[id] == reference.logprobs[id]
    expected = {key: row for one in alone.values() for key, row in one.logits.items()}
    assert session.logits.keys() == expected.keys()
    for key, row in session.logits.items():
        assert torch.equal(row, expected[key]), key


def test_threads_change_nothing():
    answers = []
    for threads in (1, 2):
        session = Session(start(deterministic("fp16", threads), 40), 40)
        for id, prompt in enumerate(prompts()):
            session.add(id, prompt)
        session.run()
        answers.append(session.logits)
    assert all(torch.equal(row, answers[1][key]) for key, row in answers[0].items())


def test_without_it_bits_do_differ():
    """Or the tests above would show nothing."""
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96)
    runner = start(config(weights="fp16", scheduler=scheduler), 120)
    sessions = []
    for tokens in (96, 9):
        session = Random(runner, 120, max_num_seqs=8, max_num_batched_tokens=tokens)
        session.add_with(1, prompts()[1], SAMPLED)
        session.run()
        sessions.append(session.logits)
    assert not all(torch.equal(row, sessions[1].get(key)) for key, row in sessions[0].items())


@pytest.mark.parametrize(("attention", "weights"), [("torch", "fp16"), ("numba", "fp32")])
def test_what_cannot_keep_it_is_refused(attention, weights):
    settings = attrs.evolve(
        config(attention, weights), engine=EngineConfig(threads=1, deterministic=True)
    )
    with pytest.raises(ModelError, match=r"\[engine\] deterministic = true needs"):
        start(settings, 40)


def test_weights_beyond_float16_are_refused(monkeypatch: pytest.MonkeyPatch):
    def large(resolved, layout, progress=None):
        model = lively_model(resolved, layout)
        model.layers[1].down = lively_model(resolved, "fp32").layers[1].down
        return model

    monkeypatch.setattr(model_runner, "load_model", large)
    with pytest.raises(ModelError, match="beyond float16"):
        start(deterministic("fp16"), 40)
