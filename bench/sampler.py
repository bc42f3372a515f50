"""How long does one sampling step take? JSON: microseconds per step, median and fastest.

    python bench/sampler.py [--threads 2] [--vocab-size 49152]

The logits are normal with deviation 3, which is flatter than most models' and so no easy case for
top_p. The cost of making fresh logits is not counted. Each sequence has a prompt of 1,000 distinct
tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from trioserve.core.sampler import Sampler
from trioserve.sampling_params import SamplingParams

BAD_WORDS = tuple(f"word {i}" for i in range(50))
BAD_WORDS_IDS = [(i, 2 * i) for i in range(len(BAD_WORDS))]
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "all": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "greedy_logprobs_5": SamplingParams(temperature=0, logprobs=5),
    "greedy_logprobs_20": SamplingParams(temperature=0, logprobs=20),
    "greedy_penalties": SamplingParams(
        temperature=0, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1
    ),
    "greedy_output_penalties": SamplingParams(temperature=0, frequency_penalty=0.1),
    "greedy_bias_10": SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(10), 1.0)),
    "greedy_allowed_100": SamplingParams(temperature=0, allowed_token_ids=tuple(range(100))),
    "greedy_bad_words": SamplingParams(temperature=0, bad_words=BAD_WORDS),
    "greedy_min_tokens": SamplingParams(temperature=0, min_tokens=1000),
}


def measure(sampling: SamplingParams, num_rows: int, vocab_size: int) -> dict[str, float]:
    """Microseconds of steady steps of equal rows."""
    sampler = Sampler(vocab_size, [0])
    ids = list(range(num_rows))
    prompt = [(7919 * i) % vocab_size for i in range(1000)]
    words = BAD_WORDS_IDS if sampling.bad_words else ()
    for id in ids:
        sampler.add(id, sampling, id, len(prompt), prompt, words)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    scratch = torch.empty_like(logits)
    times = []
    for step in range(23):
        scratch.copy_(logits)
        begin = time.perf_counter()
        sampler.sample(ids, [len(prompt) + step] * num_rows, scratch)
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
