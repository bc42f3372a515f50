"""Other engines, run in a process of their own: one JSON line in, one out.

    python bench/lib/peers.py openvino-genai MODEL.gguf

First line out: the seconds the load took. Each line in is a list of prompts (texts) and the tokens
wanted of each; each line out has, for every prompt, when its tokens came, in seconds from the
moment the line was read. All prompts of a line run at once, greedy, without a stop before the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

CACHE_GB = 2
Run = Callable[[list[str], int], list[list[float]]]


def openvino_genai(path: str) -> Run:
    import openvino_genai as genai

    settings = genai.SchedulerConfig()
    settings.cache_size = CACHE_GB
    settings.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(path, settings, "CPU")
    numbers = iter(range(1 << 60))

    def run(prompts: list[str], max_tokens: int) -> list[list[float]]:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = max_tokens
        wanted.ignore_eos, wanted.do_sample = True, False
        wanted.apply_chat_template = False
        began = time.perf_counter()
        handles = [pipeline.add_request(next(numbers), prompt, wanted) for prompt in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - began
            for handle, seen in zip(handles, times, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        seen.extend([now] * len(output.generated_ids))
        return times

    return run


def llama_cpp(path: str) -> Run:
    """One prompt after another: the Python package has no batching of requests."""
    import llama_cpp

    model = llama_cpp.Llama(path, n_ctx=2048, verbose=False, logits_all=False)

    def run(prompts: list[str], max_tokens: int) -> list[list[float]]:
        began = time.perf_counter()
        times = []
        for prompt in prompts:
            model.reset()
            seen: list[float] = []
            for _ in model.generate(model.tokenize(prompt.encode()), temp=0.0):
                seen.append(time.perf_counter() - began)
                if len(seen) == max_tokens:
                    break
            times.append(seen)
        return times

    return run


ENGINES: dict[str, Callable[[str], Run]] = {
    "openvino-genai": openvino_genai,
    "llama-cpp": llama_cpp,
}


def main(name: str, path: str) -> None:
    def answer(value: Any) -> None:
        print(json.dumps(value), flush=True)

    began = time.perf_counter()
    try:
        run = ENGINES[name](path)
    except ImportError as error:
        answer({"missing": str(error)})
        return
    answer({"load_s": time.perf_counter() - began})
    for line in sys.stdin:
        asked = json.loads(line)
        answer(run(asked["prompts"], asked["max_tokens"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
