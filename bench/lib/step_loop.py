"""A worker's step loop in this process, with a clock on each part of a step.

Everything is what a worker has: scheduler, model, sampler, and a pipe that another process reads.
Only the clocks are added, from outside, so that a server pays nothing for them.

Where all layers are one kernel no clock can look into it. There the parts are told by leaving them
out: the kernel without its products, without its attention, and without both. A part takes what is
saved by leaving it out, the mean of with and without the other; without both the rest remains.
Steps of all four kinds come in turns. The head's product has the last norm with it.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attrs import frozen

from trioserve.config.schema import Config
from trioserve.core.engine_core import EngineCore
from trioserve.core.stages import StageReporter
from trioserve.ipc.child import Channel, EventSender, Inbox
from trioserve.ipc.messages import Abort, Work
from trioserve.ipc.status_page import PAGE_BYTES, StatusWriter
from trioserve.models.spec import ModelSpec, ResolvedModel
from trioserve.sampling_params import SamplingParams

PARTS = ("schedule", "inputs", "products", "attention", "rest", "sample", "emit")
ROOM = 240  # tokens of each stream that are computed under the clock, at most
WARM_UP = 3
TABLES = {  # what the kernel of all layers counts its work by
    "products": ("_linears", ("rows", "panels")),
    "attention": ("_attentions", ("num_tokens", "num_items", "num_rows")),
}

WHOLE: frozenset[str] = frozenset()
VARIANTS = (WHOLE, *(frozenset({part}) for part in TABLES), frozenset(TABLES))


@frozen
class Case:
    """A kind of step: ``streams`` that decode, each with ``context`` tokens in the cache, and
    ``prompts`` of ``tokens`` tokens that are prefilled whole."""

    streams: int = 0
    context: int = 0
    prompts: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        decode = f"decode {self.streams} at {self.context}" if self.streams else ""
        count = f"{self.prompts} x " if self.prompts > 1 else ""
        prefill = f"prefill {count}{self.tokens}" if self.prompts else ""
        return " + ".join(filter(None, (decode, prefill)))

    @property
    def new_tokens(self) -> int:
        """Tokens that a step computes."""
        return self.streams + self.prompts * self.tokens

    def num_blocks(self, block_size: int) -> int:
        """Blocks of the cache that it needs."""
        longest = self.context + ROOM + 2
        prompt = -(-(self.tokens + 1) // block_size)
        return self.streams * (-(-longest // block_size) + 1) + self.prompts * prompt


def cache_bytes_per_token(spec: ModelSpec) -> int:
    """Of the KV cache, over all layers, as the paged kernels lay it out."""
    lanes = -(-spec.head_dim // 16) * 16
    return spec.num_layers * spec.num_kv_heads * (spec.head_dim + lanes) * 4


def typical(steps: list[dict[str, float]]) -> dict[str, float]:
    """The mean of the middle half of steps, by their total: its parts make up its total, which
    those of medians do not."""
    ordered = sorted(steps, key=lambda step: step["total"])
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return {name: statistics.fmean(step[name] for step in middle) for name in ordered[0]}


def shares(seconds: dict[frozenset[str], float]) -> dict[str, float]:
    """What each of two parts takes of the whole, from the seconds without them: the mean of what
    is saved by leaving it out beside the other, and where the other is left out already. The two
    and what is left without both make the whole."""
    found = {}
    both = frozenset(TABLES)
    for part in TABLES:
        only, other = frozenset({part}), both - {part}
        saved = seconds[WHOLE] - seconds[only] + seconds[other] - seconds[both]
        found[part] = saved / 2
    return found


class StepLoop:
    """Owns a ModelRunner and an EngineCore that has started. To be closed.

    ``settings`` should do without a prefix cache, and ask for as much cache as the cases need.
    """

    def __init__(self, resolved: ResolvedModel, settings: Config) -> None:
        from trioserve.core.model_runner import ModelRunner

        page = os.memfd_create("status")
        os.ftruncate(page, PAGE_BYTES)
        self._reader = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
        )
        assert self._reader.stdin is not None
        send = EventSender(self._reader.stdin.fileno()).send
        channel = Channel(Inbox(), send, StatusWriter(page))
        os.close(page)
        self.runner: Any = ModelRunner(resolved, settings)
        self._core: Any = EngineCore(settings, resolved, self.runner, channel, StageReporter(send))
        self._core.start()
        self._spec = resolved.spec
        self._next_id = 0
        self._fill_cache()
        model = self.runner._model
        self._layers = FusedLayers(model.decoder) if hasattr(model, "decoder") else None
        plain = model.model if self._layers is not None else model
        linears = [
            getattr(layer, name)
            for layer in plain.layers
            for name in ("qkv", "output", "gate_up", "down")
        ]
        self.layer_weights = sum(one.in_features * one.out_features for one in linears)
        self.head_weights = plain.head.in_features * plain.head.out_features
        self.product_bytes = sum(one.num_bytes for one in (*linears, plain.head))
        self._spent: dict[str, float] = defaultdict(float)
        self._attach(model, plain)

    def close(self) -> None:
        """End the process that reads the pipe."""
        assert self._reader.stdin is not None
        self._reader.stdin.close()
        self._reader.wait()

    def measure(self, case: Case, seconds: float) -> dict[str, Any]:
        """Run steps of a kind for about so long; milliseconds of a typical one.

        Raises:
            RuntimeError: a step did something else than the case says.
        """
        ids = self._begin_streams(case)
        variants = VARIANTS if self._layers is not None else (WHOLE,)
        seen: dict[frozenset[str], list[dict[str, float]]] = {variant: [] for variant in variants}
        for _ in range(WARM_UP):
            self._step(case, WHOLE)
        ends = time.perf_counter() + seconds
        most = (ROOM - WARM_UP) // len(variants)
        while len(seen[WHOLE]) < most and (len(seen[WHOLE]) < 3 or time.perf_counter() < ends):
            for variant in variants:
                seen[variant].append(self._step(case, variant))
        self._core._handle(Abort(ids))
        steps = len(seen[WHOLE]) * len(variants) + WARM_UP
        return self._result(case, seen, case.streams * (case.context + steps // 2))

    # --------------------------------------------------------------------------- internals

    def _result(
        self,
        case: Case,
        seen: dict[frozenset[str], list[dict[str, float]]],
        cached_tokens: int,
    ) -> dict[str, Any]:
        usual = {variant: typical(steps) for variant, steps in seen.items()}
        found = usual[WHOLE]
        if len(usual) > 1:
            layers = {variant: step["layers"] for variant, step in usual.items()}
            for part, taken in shares(layers).items():
                found[part] += taken
                found["rest"] -= taken
        result = {
            "case": case.name,
            "streams": case.streams,
            "context": case.context,
            "prompts": case.prompts,
            "prompt_tokens": case.tokens,
            "new_tokens": case.new_tokens,
            "steps": len(seen[WHOLE]),
            "ms": {name: round(found[name] * 1e3, 3) for name in ("total", *PARTS)},
            "best_ms": round(min(step["total"] for step in seen[WHOLE]) * 1e3, 3),
            "tokens_per_s": round(case.new_tokens / found["total"], 1),
        }
        if case.streams:
            read = cached_tokens * self.runner.kv_bytes_per_token
            result["kv_mb"] = round(read / 1e6, 4)
            if found["attention"] > 0 and not case.prompts:
                result["kv_gb_per_s"] = round(read / found["attention"] / 1e9, 1)
        return result

    def _step(self, case: Case, left_out: frozenset[str]) -> dict[str, float]:
        """One step; seconds by part. In a kernel that cannot be looked into, ``rest`` is all."""
        ids = [self._add(case.tokens, 1) for _ in range(case.prompts)]
        if self._layers is not None:
            self._layers.left_out = left_out
        self._spent.clear()
        began = time.perf_counter()
        deltas, failed = self._core._run_step()
        self._core._emit(deltas, failed, 0.0)
        total = time.perf_counter() - began
        done = [delta.id for delta in deltas if delta.finish_reason is not None]
        if failed or sorted(done) != ids or len(deltas) != case.streams + case.prompts:
            raise RuntimeError(f"{case.name}: {len(deltas)} rows came of a step, {failed or done}")
        spent = self._spent
        inner = ("layers", "products", "attention")
        return {
            "total": total,
            "schedule": total - spent["execute"] - spent["sample"] - spent["emit"],
            "inputs": spent["execute"] - spent["model"],
            "rest": spent["model"] - spent["products"] - spent["attention"],
            **{name: spent[name] for name in (*inner, "sample", "emit")},
        }

    def _add(self, length: int, max_tokens: int) -> int:
        """Queue a sequence of random tokens; its id."""
        id = self._next_id
        self._next_id += 1
        token_ids = random.Random(id).choices(range(self._spec.vocab_size), k=length)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._core._scheduler.add(Work(id, token_ids, sampling, seed=0))
        return id

    def _begin_streams(self, case: Case) -> list[int]:
        """Bring ``streams`` to where they decode. The cache holds random numbers: no model runs."""
        ids = [self._add(case.context - 1, ROOM + 2) for _ in range(case.streams)]
        with self._without_model():
            deltas, failed = self._core._run_step() if ids else ([], [])
        if failed or [delta.id for delta in deltas if delta.token_ids] != ids:
            raise RuntimeError(f"{case.name}: not all streams have begun; {failed}")
        return ids

    @contextmanager
    def _without_model(self) -> Iterator[None]:
        """One step has room for anything meanwhile."""
        scheduler, runner = self._core._scheduler, self.runner
        model, runner._model = runner._model, NoModel(self._spec.vocab_size)
        budget, scheduler.max_num_batched_tokens = scheduler.max_num_batched_tokens, 1 << 30
        try:
            yield
        finally:
            runner._model, scheduler.max_num_batched_tokens = model, budget

    def _fill_cache(self) -> None:
        """Random numbers everywhere: a page that was never written is not read from memory."""
        import torch

        pattern = torch.randn(1 << 18)
        for tensor in (tensor for pair in self.runner._attention.caches for tensor in pair):
            flat = tensor.view(-1)
            for start in range(0, len(flat), len(pattern)):
                piece = flat[start : start + len(pattern)]
                piece.copy_(pattern[: len(piece)])

    def _attach(self, model: Any, plain: Any) -> None:
        """Put the clocks on."""
        core, runner, spent = self._core, self.runner, self._spent
        for owner, name, part in (
            (core, "_emit", "emit"),
            (runner, "execute", "execute"),
            (runner, "sample", "sample"),
            (model, "hidden", "model"),
            (model, "logits", "model"),
            (plain, "head", "products"),
            *((layer, "qkv", "products") for layer in plain.layers),
            *((layer, "output", "products") for layer in plain.layers),
            *((layer, "gate_up", "products") for layer in plain.layers),
            *((layer, "down", "products") for layer in plain.layers),
        ):
            setattr(owner, name, Timed(getattr(owner, name), spent, part))
        if self._layers is not None:
            self._layers.kernel = Timed(self._layers.kernel, spent, "layers")
        else:
            runner._attention.forward = Timed(runner._attention.forward, spent, "attention")


class Timed:
    """A callable whose time goes to one part."""

    def __init__(self, inner: Callable[..., Any], spent: dict[str, float], part: str) -> None:
        self._inner, self._spent, self._part = inner, spent, part

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._inner(*arguments, **named)
        finally:
            self._spent[self._part] += time.perf_counter() - started

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FusedLayers:
    """Stands in for the kernel of a ``kernels.cpu.decoder.Decoder`` and can leave a part out."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.kernel = decoder._kernel
        self.left_out = WHOLE
        decoder._kernel = self

    def __call__(self, params: Any) -> None:
        if not self.left_out:
            self.kernel(params)
            return
        kept = [
            (lines := getattr(self._decoder, name), lines.copy()) for name, _ in TABLES.values()
        ]
        for part in self.left_out:
            name, fields = TABLES[part]
            for field in fields:
                getattr(self._decoder, name)[field] = 0
        try:
            self.kernel(params)
        finally:
            for lines, before in kept:
                lines[:] = before


class NoModel:
    """Stands in for a model while sequences are brought to where they decode."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def hidden(
        self, token_ids: Any, positions: Any, attention: Any, context: Any, rows: Any
    ) -> Any:
        return rows.new_zeros((len(rows), 1)).float()

    def logits(self, hidden: Any) -> Any:
        return hidden.new_zeros((len(hidden), self._vocab_size))
