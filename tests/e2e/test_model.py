"""SmolLM2 through the whole product: engine, worker, paged cache; held to transformers' answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

import trioserve
from trioserve.engine.engine import Engine
from trioserve.ipc.messages import StepStats

from ..models.golden import (
    FP16_TOLERANCE,
    FP32_TOLERANCE,
    Golden,
    GreedyComparison,
    load_goldens,
)
from .server import running

EXAMPLES = Path(__file__).parents[2] / "examples"


async def answer(engine: Engine, prompt: list[int], num_tokens: int) -> list[int]:
    sampling = trioserve.SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0
    )
    async with engine.generate(prompt, sampling) as stream:
        return [token_id async for delta in stream for token_id in delta.token_ids]


async def compare(engine: Engine, golden: Golden, tolerance: float) -> int:
    comparison = GreedyComparison(golden, tolerance)
    while not comparison.done:
        comparison.feed(await answer(engine, comparison.prompt, comparison.num_left))
    return comparison.num_ties


async def compare_all(config: dict[str, Any], tolerance: float) -> tuple[int, StepStats]:
    """All goldens at once; returns the number of ties and the counters at the end."""
    ties: list[int] = []
    async with trioserve.open_engine(config) as engine:

        async def compare_one(golden: Golden) -> None:
            ties.append(await compare(engine, golden, tolerance))

        async with trio.open_nursery() as nursery:
            for golden in load_goldens():
                nursery.start_soon(compare_one, golden)
        checked = await engine.check()
    assert checked.fault == ""
    assert (checked.num_sequences, checked.stats.num_blocks_used) == (0, 0)
    assert len(ties) == 50
    return sum(ties), checked.stats


async def test_fp32_batched_with_chunks_hits_and_preemptions_equals_transformers() -> None:
    config = {
        "model": {"weights": "fp32", "max_model_len": 512},
        # Room for some 1,900 tokens: fifty sequences of up to 400 have to take turns.
        "cache": {"memory": "84MiB"},
        "scheduler": {"max_num_batched_tokens": 96, "max_num_seqs": 24},
    }
    ties, stats = await compare_all(config, FP32_TOLERANCE)
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert ties <= 5


@pytest.mark.parametrize(("weights", "most_ties"), [("fp16", 25), ("packed", 5)])
async def test_narrow_weights_stay_within_their_tolerance(weights: str, most_ties: int) -> None:
    ties, stats = await compare_all({"model": {"weights": weights}}, FP16_TOLERANCE)
    assert stats.num_preemptions == 0
    assert ties <= most_ties


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_run_as_printed(example: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip()
    assert result.stderr == ""
    if example.stem == "embed":
        assert "sky: 24 tokens" in result.stdout
        assert "tea: 24 tokens" in result.stdout


def test_the_official_client_works_unchanged(tmp_path: Path) -> None:
    import openai

    with running(tmp_path, env=without_transformers(tmp_path), http={}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        [model] = client.models.list().data
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        asked: Any = {"model": model.id, "messages": messages, "temperature": 0, "max_tokens": 24}
        plain = client.chat.completions.create(**asked)
        text = plain.choices[0].message.content
        assert text is not None
        assert "Paris" in text
        chunks = list(
            client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        usage = chunks[-1].usage
        assert usage is not None
        assert plain.usage is not None
        assert usage.completion_tokens == plain.usage.completion_tokens
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens  # the first answer's prompt
        assert psutil.Process(server.process.pid).memory_info().rss < 130e6


def without_transformers(directory: Path) -> dict[str, str]:
    """An environment in which importing transformers, anywhere in the tree, fails loudly."""
    for name in ("transformers", "gguf"):
        poisoned = directory / "poison" / name
        poisoned.mkdir(parents=True)
        (poisoned / "__init__.py").write_text(
            f"raise RuntimeError('{name} imported by a server')\n"
        )
    return {"PYTHONPATH": str(directory / "poison")}
