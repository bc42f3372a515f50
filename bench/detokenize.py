"""What does the text of one output token cost in the parent, and does it stay flat?

Feeds ids one at a time through TextStream (detokenizer, stop strings, log probabilities) and
prints microseconds of CPU time per token for answers of 200, 2,000 and 20,000 tokens as JSON.
Without ``--tokenizer`` a small byte-level one is trained on the spot; cost hardly depends on it.

    python bench/detokenize.py [--tokenizer tokenizer.json] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from trioserve.ipc.messages import Delta, TokenLogprobs
from trioserve.sampling_params import SamplingParams
from trioserve.text.stream import TextStream
from trioserve.text.tokenizer import Tokenizer

LENGTHS = (200, 2_000, 20_000)
TEXT = "The answer is short: 日本 and 👨‍👩‍👧 are written in bytes, and the dog sleeps.\n"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one stop string": {"stop": ("\n\nUser:",)},
    "four stop strings": {"stop": ("\n\nUser:", "###", "</answer>", "the dog barks")},
    "64 characters of stop": {"stop": ("z" * 64,)},
    "always held back": {"stop": (TEXT * 2 + "!",)},
    "5 logprobs": {"logprobs": 5},
}


def small_tokenizer(folder: str) -> str:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([TEXT.split("日")[0]] * 4, trainer)
    path = str(Path(folder) / "tokenizer.json")
    library.save(path)
    return path


def make_deltas(ids: list[int], num_tokens: int, num_logprobs: int | None) -> list[Delta]:
    deltas = []
    for index in range(num_tokens):
        token_id = ids[index % len(ids)]
        logprobs = None
        if num_logprobs is not None:
            top = [((token_id + rank) % 256, -0.5 - rank) for rank in range(num_logprobs)]
            logprobs = [TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)]
        deltas.append(Delta(id=1, token_ids=[token_id], logprobs=logprobs))
    return deltas


def us_per_token(tokenizer: Tokenizer, case: dict[str, Any], num_tokens: int, repeat: int) -> float:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    deltas = make_deltas(ids, num_tokens, case.get("logprobs"))
    best = float("inf")
    for _ in range(max(repeat, 2_000 * repeat // num_tokens)):
        stream = TextStream(tokenizer, ids, SamplingParams(**case))
        start = time.process_time()
        for delta in deltas:
            stream.push(delta)
        best = min(best, time.process_time() - start)
        assert not stream.finished
    return round(best / num_tokens * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(args.tokenizer or small_tokenizer(folder))
    result = {
        "question": "microseconds of CPU time per output token in TextStream, best of the repeats",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "tokenizer": args.tokenizer or "trained on the spot",
        "us_per_token": {
            name: {str(n): us_per_token(tokenizer, case, n, args.repeat) for n in LENGTHS}
            for name, case in CASES.items()
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
