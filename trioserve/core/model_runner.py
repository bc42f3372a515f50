"""The model on this machine's processors: an Executor.

``execute`` applies a batch's deltas and runs the forward pass, ``sample`` turns its logits into
tokens. Both keep nothing of a sequence but what the batches say.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from attrs import frozen
from torch import Tensor

from trioserve.config.schema import Config
from trioserve.core.batch import (
    MemoryProfile,
    NewSequence,
    SampledRow,
    ScheduledBatch,
    ScheduledRow,
)
from trioserve.core.batch_state import BatchState
from trioserve.core.candidates import first_best
from trioserve.core.kv_cache import format_bytes
from trioserve.core.prompt_logprobs import Part, PromptScorer, rows_of
from trioserve.core.sampler import Sampler
from trioserve.core.stages import RunningStage, StageReporter
from trioserve.devices import cpu
from trioserve.errors import ModelError, StartupError
from trioserve.models.attention import (
    AttentionBackend,
    KVCacheSpec,
    NumbaAttention,
    make_backend,
)
from trioserve.models.fusing import ATTENTION, LAYERS, WHOLE, compile_ahead, compile_kernels
from trioserve.models.linear import DYNAMIC, Layout, choose_layout, choose_panels
from trioserve.models.registry import load_model
from trioserve.models.spec import ResolvedModel
from trioserve.sampling_params import SamplingParams

log = logging.getLogger("trioserve.model_runner")

PROFILE_TOKENS = 128
"""Tokens of the step that the profile measures, which it scales to the largest."""
WARM_UP_TOKENS = 32
"""Prompt tokens of a warm-up step: as many as it takes to run every path, not to keep one waiting.
Steps of many rows have run in the profile."""


@frozen(kw_only=True)
class StepHandle:
    """A step that has been launched."""

    ids: list[int]
    positions: list[int]
    logits: Tensor  # float32 [len(ids), vocab_size]
    prompt_parts: Sequence[Part] = ()
    prompt_hidden: Tensor | None = None  # float32 [rows of the parts, hidden_size]


class ModelRunner:
    """Owns the model, the KV cache and the state of the sequences in the batch.

    Called by EngineCore, from one thread. A step that raises has taken in the batch's deltas or
    will when it is tried again: its rows can be computed one by one after it.
    """

    def __init__(self, resolved: ResolvedModel, config: Config) -> None:
        self._resolved = resolved
        self._config = config
        self._spec = resolved.spec
        self.vocab_size = resolved.spec.vocab_size
        self.num_parameters = 0
        self.weight_bytes = 0
        self.kv_bytes_per_token = 0
        self._max_tokens = config.scheduler.max_num_batched_tokens
        self._max_rows = min(config.scheduler.max_num_seqs, self._max_tokens)
        self._attention: AttentionBackend
        self._kernels: Any = None  # trioserve.models.panels.PanelKernels, where numba works
        self._layout: Layout
        self._model: Any
        self._state: BatchState
        self._sampler: Sampler
        self._scorer = PromptScorer(resolved.num_token_ids or resolved.spec.vocab_size)

    # ------------------------------------------------------------------------- start-up

    def load(self, report: StageReporter) -> None:
        """Stages device, distributed, weights. Raises ModelError for files at fault."""
        with report.stage("device") as stage:
            self._choose_device(stage)
        self._sampler = Sampler(
            self._spec.vocab_size,
            self._spec.eos_token_ids,
            tokenizer_vocab_size=self._resolved.num_token_ids,
            best=first_best if self._kernels is None else self._kernels.best,
        )
        with report.stage("distributed", "one rank"):
            pass
        with report.stage("weights", self._layout) as stage:
            model = load_model(
                self._resolved,
                self._layout,
                lambda fraction, num_bytes: stage.progress(fraction, num_bytes=num_bytes),
            )
            if self._kernels is not None and isinstance(self._attention, NumbaAttention):
                model = self._kernels.finish(model, self._attention)
            self._model = model
            self.num_parameters = model.num_parameters
            self.weight_bytes = model.weight_bytes
            stage.detail = f"{self._weights_name}, {format_bytes(self.weight_bytes)}"

    def _choose_device(self, stage: RunningStage) -> None:
        """Threads, attention backend, weight layout; each is logged with its reason."""
        self._processor = processor = cpu.detect(self._config)
        torch.set_num_threads(processor.threads)
        log.info("device: %s", processor.describe())
        stage.progress(detail=f"{processor.describe()}; kernels")
        started = time.monotonic()
        wanted = self._config.model.weights
        in_panels = wanted != "fp32" and processor.reads_float16
        names = ATTENTION + (LAYERS if in_panels else ()) + (WHOLE if wanted in DYNAMIC else ())
        if self._config.kernels.attention != "torch":
            compile_ahead(
                names,
                processor.threads,
                lambda text: stage.progress(detail=f"{processor.describe()}; {text}"),
            )
        spec = self._spec
        layer = KVCacheSpec(
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
        )
        self._attention = attention = make_backend(
            self._config.kernels.attention,
            [layer] * spec.num_layers,
            self._config.cache.block_size,
            processor.threads,
            exact=self._config.engine.deterministic,
            rounded=self._config.model.dtype == "bfloat16",
        )
        self.kv_bytes_per_token = attention.bytes_per_token
        if in_panels:
            self._kernels = compile_kernels(attention)
        if self._kernels is not None:
            self._layout, reason = choose_panels(self._config.model.weights, self._resolved)
        elif self._config.engine.deterministic:
            raise ModelError(
                "[engine] deterministic = true needs weights in panels: not [model] weights = "
                "fp32, and a processor and a numba that can read float16"
            )
        else:
            attention.compile()
            self._layout, reason = choose_layout(self._config.model.weights)
        if self._config.model.dtype == "bfloat16" and self._dtype != "bfloat16":
            raise ModelError(
                "[model] dtype = bfloat16 needs a processor with AMX, numba's kernels with other "
                "weights than fp32, and [engine] deterministic = false; set it to auto"
            )
        log.info("weights: %s (%s); products of %s", self._layout, reason, self._dtype)
        log.info("attention: %s", attention.describe())
        stage.detail = (
            f"{processor.describe()}; attention {attention.describe()}; "
            f"kernels ready in {time.monotonic() - started:.1f} s"
        )

    @property
    def _weights_name(self) -> str:
        return "fp16" if self._layout == "panels" else self._layout

    @property
    def _dtype(self) -> str:
        """What is multiplied where there are many rows; sums are float32 in any case."""
        attention = self._attention
        rounded = isinstance(attention, NumbaAttention) and attention.team.parts == 1
        return "bfloat16" if rounded and self._kernels is not None else "float32"

    def profile(self, report: StageReporter) -> MemoryProfile:
        """Stage profile: run a step of the most rows with a cache just large enough, and measure.

        What it takes grows with the tokens, so a short one stands for the largest.
        """
        with report.stage("profile") as stage:
            num_tokens = min(self._max_tokens, max(PROFILE_TOKENS, self._max_rows))
            length = num_tokens // self._max_rows
            blocks = -(-max(length, 1) // self._config.cache.block_size)
            self._allocate(self._max_rows * blocks, blocks * self._config.cache.block_size)
            self._run_alone([(0, 1)])  # libraries set up what they keep
            peak = cpu.PeakMemory()
            self._run_alone([(0, length)] * self._max_rows)
            activation_bytes = peak.rise() * -(-self._max_tokens // num_tokens)
            total_bytes, free_bytes = cpu.memory()
            stage.detail = f"{format_bytes(activation_bytes)} working memory"
        return MemoryProfile(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            weight_bytes=self.weight_bytes,
            activation_bytes=activation_bytes,
        )

    def init_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache: ``num_blocks`` blocks over all layers.

        Raises:
            StartupError: the system refuses the memory.
        """
        try:
            self._allocate(num_blocks, max_model_len)
        except (MemoryError, RuntimeError) as error:
            size = num_blocks * self._config.cache.block_size * self.kv_bytes_per_token
            raise StartupError(
                "kv-cache",
                f"the system refuses {format_bytes(size)} for the KV cache; "
                f"set [cache] memory to less",
            ) from error

    def warm_up(self, report: StageReporter) -> None:
        """Stages warm-up and capture: run each kind of step that the profile has not, with what the
        cache can hold."""
        with report.stage("warm-up") as stage:
            steps = self._warm_up_steps()
            for done, (name, rows) in enumerate(steps):
                stage.progress(done / len(steps), detail=name)
                self._run_alone(rows)
            stage.detail = ", ".join(name for name, _ in steps)
        with report.stage("capture", "nothing to capture on this device"):
            pass

    def info(self) -> dict[str, Any]:
        """For ReadyInfo: architecture, weights, dtype, device, threads, attention."""
        return {
            "architecture": self._spec.architecture,
            "weights": self._weights_name,
            "dtype": self._dtype,
            "device": "cpu",
            "threads": self._processor.threads,
            "attention": self._attention.name,
        }

    # --------------------------------------------------------------------------- a step

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepHandle:
        """Apply the deltas and run the forward pass; the handle goes to ``sample``."""
        for sequence_id in batch.removed_ids:
            self._forget(sequence_id)
        for new in batch.new:
            self._forget(new.id)
            self._state.add(new)
            self._sampler.add(
                new.id,
                new.sampling,
                new.seed,
                new.num_prompt_tokens,
                new.token_ids,
                new.bad_words_ids,
            )
            self._scorer.add(new)
        for row in batch.rows:
            if row.new_block_ids:
                self._state.add_blocks(row.id, row.new_block_ids)
        step = self._state.make_step(batch.rows)
        self._attention.prepare(step.context)
        parts = self._scorer.parts(batch.rows, step.context.query_starts)
        num_sampled = len(step.sampled_ids)
        rows = torch.cat([step.logits_rows, rows_of(parts)]) if parts else step.logits_rows
        hidden = self._model.hidden(
            step.token_ids, step.context.positions, self._attention, step.context, rows
        )
        return StepHandle(
            ids=step.sampled_ids,
            positions=step.sampled_positions,
            logits=self._model.logits(hidden[:num_sampled] if parts else hidden),
            prompt_parts=parts,
            prompt_hidden=hidden[num_sampled:] if parts else None,
        )

    @torch.inference_mode()
    def sample(
        self, handle: StepHandle, masks: Mapping[int, Tensor] | None = None
    ) -> list[SampledRow]:
        """Sample every row with ``sample``, in row order; then what other rows say of prompts.

        Args:
            handle: of ``execute``.
            masks: for some sequence ids, bool [vocab_size], True for tokens that may come.
        """
        for index, sequence_id in enumerate(handle.ids):
            if masks and sequence_id in masks:
                handle.logits[index].masked_fill_(~masks[sequence_id], float("-inf"))
        sampled = self._sampler.sample(handle.ids, handle.positions, handle.logits)
        # A row that failed has a token too, which nobody will read.
        self._state.set_tokens(handle.ids, handle.positions, [row.token_id for row in sampled])
        return self._with_scores(sampled, handle) if handle.prompt_parts else sampled

    def _with_scores(self, sampled: list[SampledRow], handle: StepHandle) -> list[SampledRow]:
        assert handle.prompt_hidden is not None
        scores = self._scorer.score(handle.prompt_parts, handle.prompt_hidden, self._model.logits)
        scored = [
            msgspec.structs.replace(row, prompt_logprobs=scores.pop(row.id, None))
            for row in sampled
        ]
        return [
            *scored,
            *(SampledRow(id, 0, prompt_logprobs=found) for id, found in scores.items()),
        ]

    # ------------------------------------------------------------------------- internals

    def _forget(self, sequence_id: int) -> None:
        if sequence_id in self._state:
            self._state.remove(sequence_id)
            self._sampler.remove(sequence_id)
            self._scorer.remove(sequence_id)

    def _allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._attention.init_cache(num_blocks)
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self._state = BatchState(
            max_sequences=self._max_rows,
            max_model_len=max_model_len,
            max_tokens=self._max_tokens,
            block_size=self._config.cache.block_size,
        )

    def _warm_up_steps(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """Kinds of steps as (name, rows of (start, tokens)), cut to what fits."""
        chunk = min(WARM_UP_TOKENS, self._max_tokens, self._max_model_len)
        steps = [("decode", [(0, 1)]), (f"prefill {chunk}", [(0, chunk)])]
        if chunk > 2:
            steps.append(("mixed", [(0, 1), (1, chunk - 2)]))
        block_size = self._config.cache.block_size
        return [
            (name, kind)
            for name, kind in steps
            if sum(-(-(start + count) // block_size) for start, count in kind) <= self._num_blocks
        ]

    def _run_alone(self, rows: list[tuple[int, int]]) -> None:
        """Run one step of made-up sequences, given as (start, tokens), and forget them."""
        block_size = self._config.cache.block_size
        new, scheduled = [], []
        next_block = 0
        sampling = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
        for index, (start, count) in enumerate(rows):
            sequence_id = -1 - index
            length = start + count
            num_blocks = -(-length // block_size)
            new.append(
                NewSequence(
                    id=sequence_id,
                    token_ids=[i % self.vocab_size for i in range(length)],
                    num_prompt_tokens=length,
                    num_computed_tokens=start,
                    block_ids=list(range(next_block, next_block + num_blocks)),
                    sampling=sampling,
                    seed=index,
                )
            )
            next_block += num_blocks
            scheduled.append(ScheduledRow(sequence_id, start, count, [], True))
        batch = ScheduledBatch(step=0, removed_ids=[], new=new, rows=scheduled)
        try:
            self.sample(self.execute(batch))
        finally:
            for sequence in new:
                self._forget(sequence.id)
