"""How long does one sampling step take? JSON: microseconds per step, median and fastest.

    python bench/sampler.py [--threads 2] [--vocab-size 49152]

The logits are normal with deviation 3, which is flatter than most models' and so no easy case for
top_p. The cost of making fresh logits is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from trioserve.core.sampler import Sampler
from trioserve.sampling_params import SamplingParams

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "all": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "greedy_logprobs_5": SamplingParams(temperature=0, logprobs=5),
}


def measure(sampling: SamplingParams, num_rows: int, vocab_size: int) -> dict[str, float]:
    """Microseconds of steady steps of equal rows."""
    sampler = Sampler(vocab_size, [0])
    ids = list(range(num_rows))
    for id in ids:
        sampler.add(id, sampling, seed=id, num_prompt_tokens=8)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    scratch = torch.empty_like(logits)
    times = []
    for step in range(23):
        scratch.copy_(logits)
        begin = time.perf_counter()
        sampler.sample(ids, [8 + step] * num_rows, scratch)
        times.append(time.perf_counter() - begin)
    return {
        "median_us": round(statistics.median(times[3:]) * 1e6, 1),
        "min_us": round(min(times[3:]) * 1e6, 1),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=49152)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = {
        f"{name}/{num_rows}": measure(sampling, num_rows, args.vocab_size)
        for name, sampling in CASES.items()
        for num_rows in (1, 32)
    }
    settings = {"threads": args.threads, "vocab_size": args.vocab_size, "torch": torch.__version__}
    print(json.dumps({"bench": "sampler", **settings, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
