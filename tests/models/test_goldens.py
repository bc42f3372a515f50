"""SmolLM2 as it is served, against what transformers answered (``make_goldens.py``)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import trio

from trioserve.config.schema import ModelConfig
from trioserve.models.registry import load_model
from trioserve.models.resolve import resolve_model

from .causal import CausalAttention, greedy
from .golden import (
    FP16_TOLERANCE,
    FP32_TOLERANCE,
    Golden,
    GreedyComparison,
    compare_greedy,
    load_goldens,
)

GOLDENS = load_goldens()
FP16_LOGIT_TOLERANCE = 0.1
DECODED = ["raw-short", "raw-emoji", "chat-capital"]


@pytest.fixture(scope="module")
def resolved():
    return trio.run(partial(resolve_model, ModelConfig(), report=lambda stage: None))


@pytest.fixture(scope="module")
def fp32(resolved):
    return load_model(resolved, "fp32")


@pytest.fixture(scope="module")
def fp16(resolved):
    return load_model(resolved, "fp16")


def teacher_forced(model, golden: Golden) -> np.ndarray:
    """Logits ``[steps, vocab]`` behind the prompt and each golden token but the last."""
    token_ids = torch.tensor(golden.prompt + golden.tokens[:-1])
    rows = torch.arange(len(golden.prompt) - 1, len(token_ids))
    positions = torch.arange(len(token_ids))
    attention = CausalAttention(model.spec.num_layers)
    return model.forward(token_ids, positions, attention, None, rows).numpy()


def errors(model, golden: Golden) -> tuple[np.ndarray, np.ndarray]:
    """Per step: the largest difference of the golden's eight logits, and the choice made."""
    logits = teacher_forced(model, golden)
    found = np.take_along_axis(logits, golden.top_ids, axis=1)
    return np.abs(found - golden.top).max(axis=1), logits.argmax(axis=1)


def test_goldens_are_varied():
    lengths = [len(golden.prompt) for golden in GOLDENS]
    assert len(GOLDENS) == 50
    assert min(lengths) == 1
    assert max(lengths) > 250
    assert all(len(golden.tokens) == 64 for golden in GOLDENS)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_float32_logits_and_choices(fp32, golden):
    worst, choices = errors(fp32, golden)
    assert worst.max() < FP32_TOLERANCE
    for step, token in enumerate(choices):
        assert golden.behind_best(step, token) < FP32_TOLERANCE


def test_float16_weights(fp16):
    """Over all prompts' 3,200 positions: close logits, and a choice that differs only in ties."""
    agreed, differences = [], []
    for golden in GOLDENS:
        worst, choices = errors(fp16, golden)
        differences.append(worst)
        assert worst.max() < FP16_LOGIT_TOLERANCE, golden.name
        for step, token in enumerate(choices):
            assert golden.behind_best(step, token) < FP16_TOLERANCE, (golden.name, step)
        agreed.append(choices == golden.tokens)
    assert np.median(differences) < 0.01
    assert np.mean(agreed) > 0.999


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("layout", ["fp32", "fp16"])
def test_greedy_decoding(name, layout, request):
    """Token by token over kept keys and values, as it is served."""
    model = request.getfixturevalue(layout)
    tolerance = FP32_TOLERANCE if layout == "fp32" else FP16_TOLERANCE
    golden = next(golden for golden in GOLDENS if golden.name == name)
    compare_greedy(golden, lambda ids, n: greedy(model, ids, n), tolerance, num_steps=24)


# ------------------------------------------------------------------- the comparison itself


def made_golden() -> Golden:
    """Step 1 is a near-tie between 20 and 21; the other steps are clear."""
    top = np.array([[9, 5], [7, 6.9999], [8, 4]], np.float32)
    return Golden(
        name="made",
        text="",
        messages=None,
        prompt=[1],
        tokens=[10, 20, 30],
        top_ids=np.array([[10, 11], [20, 21], [30, 31]], np.int32),
        top=top,
    )


def test_equal_answers_are_accepted():
    assert compare_greedy(made_golden(), lambda prompt, n: [10, 20, 30][len(prompt) - 1 :]) == 0


def test_a_near_tie_goes_on_behind_the_golden_token():
    comparison = GreedyComparison(made_golden())
    comparison.feed([10, 21, 77])
    assert comparison.prompt == [1, 10, 20]
    assert comparison.num_left == 1
    comparison.feed([30])
    assert comparison.done
    assert comparison.num_ties == 1


@pytest.mark.parametrize("answer", [[11], [10, 22], [10, 20, 31], []])
def test_wrong_answers_are_refused(answer):
    with pytest.raises(AssertionError, match="made"):
        GreedyComparison(made_golden()).feed(answer)


def test_an_answer_in_pieces():
    comparison = GreedyComparison(made_golden(), num_steps=2)
    comparison.feed([10])
    comparison.feed([20, 99])
    assert comparison.done
