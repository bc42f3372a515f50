"""Other engines, run in a process of their own: one JSON line in, one out.

    python bench/lib/peers.py openvino-genai MODEL.gguf

First line out: the seconds the load took, and what was chosen. Each line in is a list of prompts
(texts) and the tokens wanted of each; each line out has, for every prompt, when its tokens came, in
seconds from the moment the line was read. All prompts of a line run at once, greedy, without a stop
before the end.
Runs in the peer's own Python, so it needs nothing but that and the standard library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass
class Stream:
    """A prompt on its way through batches of tokens."""

    token_ids: list[int]  # the prompt, then what came of it
    num_done: int = 0  # tokens that are in the cache
    times: list[float] = field(default_factory=list)


def next_batch(
    streams: list[Stream], max_tokens: int, num_tokens: int
) -> list[tuple[int, int, int, bool]]:
    """What is computed next: (stream, position, token, whether a token comes of it).

    As a server does it: all streams that decode, then prompts in their order, as far as
    ``num_tokens`` goes.
    """
    batch: list[tuple[int, int, int, bool]] = []
    open_streams = [
        (index, one) for index, one in enumerate(streams) if len(one.times) < max_tokens
    ]
    for index, one in sorted(open_streams, key=lambda pair: not pair[1].times):
        room = num_tokens - len(batch)
        for position in range(one.num_done, min(len(one.token_ids), one.num_done + room)):
            is_last = position == len(one.token_ids) - 1
            batch.append((index, position, one.token_ids[position], is_last))
    return batch


def llama_cpp(path: str, *, own_layouts: bool = True) -> Run:
    """Through the library's own interface, many sequences in one batch.

    ``own_layouts``: let it lay weights out as it likes them on this processor.
    """
    import llama_cpp as api

    quiet = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(quiet, None)
    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.use_extra_bufts = own_layouts
    model = api.llama_model_load_from_file(path.encode(), params)
    if model is None:
        raise SystemExit(f"llama.cpp cannot load {path}")
    sessions: dict[tuple[int, int], LlamaSession] = {}

    def run(prompts: list[str], max_tokens: int) -> list[list[float]]:
        began = time.perf_counter()
        streams = [Stream(tokenize(api, model, prompt)) for prompt in prompts]
        longest = max(len(one.token_ids) for one in streams) + max_tokens
        size = len(streams), -(-longest // 256) * 256
        if size not in sessions:  # in the round that warms up
            sessions[size] = LlamaSession(api, model, *size)
        session = sessions[size]
        session.clear()
        while batch := next_batch(streams, max_tokens, session.num_tokens):
            chosen = session.decode(batch)
            now = time.perf_counter() - began
            for index, position, _, _ in batch:
                streams[index].num_done = position + 1
            for index, token_id in chosen:
                streams[index].token_ids.append(token_id)
                streams[index].times.append(now)
        return [one.times for one in streams]

    run.quiet = quiet  # type: ignore[attr-defined]  # the library calls it as long as it lives
    return run


def try_llama_cpp(path: str) -> dict[str, bool]:
    """What ``llama_cpp`` may use here, tried in a process of its own: a build for this very
    processor has been seen to end with an illegal instruction (its AMX code, 0.3.36)."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import peers; "
    code += "peers.llama_cpp(sys.argv[2])(['the of and to ' * 16], 2)"
    command = [sys.executable, "-c", code, os.path.dirname(os.path.abspath(__file__)), path]
    status = subprocess.run(command, capture_output=True).returncode
    if status >= 0:
        return {"own_layouts": True}
    told = f"llama.cpp ends with signal {-status} with its layouts for this processor; without them"
    print(told, file=sys.stderr)
    return {"own_layouts": False}


def tokenize(api: Any, model: Any, text: str) -> list[int]:
    """Token ids, with those that begin a text."""
    data = text.encode()
    found = (api.llama_token * (len(data) + 8))()
    vocab = api.llama_model_get_vocab(model)
    count = api.llama_tokenize(vocab, data, len(data), found, len(found), True, True)
    return list(found[:count])


class LlamaSession:
    """A context of llama.cpp for so many sequences of so many tokens each, on all processors."""

    def __init__(self, api: Any, model: Any, num_streams: int, length: int) -> None:
        self._api = api
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_streams * length, num_streams
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.num_tokens = params.n_batch = min(params.n_batch, num_streams * length)
        self._context = api.llama_init_from_model(model, params)
        if self._context is None:
            raise SystemExit(f"llama.cpp makes no context of {num_streams} x {length} tokens")
        self._batch = api.llama_batch_init(self.num_tokens, 0, 1)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def clear(self) -> None:
        """Forget all sequences."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def decode(self, batch: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Compute a batch; the most likely token of each row that wants one."""
        import numpy as np

        into = self._batch
        into.n_tokens = len(batch)
        for place, (stream, position, token_id, wanted) in enumerate(batch):
            into.token[place], into.pos[place] = token_id, position
            into.n_seq_id[place], into.seq_id[place][0] = 1, stream
            into.logits[place] = wanted
        if status := self._api.llama_decode(self._context, into):
            raise SystemExit(f"llama.cpp cannot decode: status {status}")
        chosen = []
        for place, (stream, _, _, wanted) in enumerate(batch):
            if wanted:
                logits = self._api.llama_get_logits_ith(self._context, place)
                row = np.ctypeslib.as_array(logits, (self._vocab_size,))
                chosen.append((stream, int(row.argmax())))
        return chosen


ENGINES: dict[str, Callable[..., Run]] = {
    "openvino-genai": openvino_genai,
    "llama-cpp": llama_cpp,
}
TRIALS: dict[str, Callable[[str], dict[str, bool]]] = {"llama-cpp": try_llama_cpp}


def main(name: str, path: str) -> None:
    def answer(value: Any) -> None:
        print(json.dumps(value), flush=True)

    found = TRIALS[name](path) if name in TRIALS else {}
    began = time.perf_counter()
    try:
        run = ENGINES[name](path, **found)
    except ImportError as error:
        answer({"missing": str(error)})
        return
    answer({"load_s": time.perf_counter() - began, **found})
    for line in sys.stdin:
        asked = json.loads(line)
        answer(run(asked["prompts"], asked["max_tokens"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
