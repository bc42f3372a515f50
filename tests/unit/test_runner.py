"""The runner behind the Scheduler, against a forward pass over the whole sequence at once.

Every logit of every sampled position is compared under teacher forcing, through chunks, prefix
hits, preemption and mixed batches, and it is asserted that all of these did happen.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trioserve.config.schema import (
    CacheConfig,
    Config,
    EngineConfig,
    KernelsConfig,
    ModelConfig,
    SchedulerConfig,
)
from trioserve.core import model_runner
from trioserve.core.batch import NewSequence, ScheduledBatch, ScheduledRow
from trioserve.core.kv_cache import plan_kv_cache
from trioserve.core.model_runner import ModelRunner
from trioserve.core.scheduler import Scheduler
from trioserve.core.stages import StageReporter
from trioserve.errors import ModelError, StartupError
from trioserve.ipc.messages import Stage, TokenLogprobs, Work
from trioserve.kernels.cpu import runtime, whole_panels
from trioserve.kernels.cpu.panel_product import PanelProduct
from trioserve.kernels.cpu.runtime import Team
from trioserve.kernels.cpu.whole_product import PRESENT, WholeProduct
from trioserve.models.llama import Llama
from trioserve.models.llama_tensors import expected_tensors
from trioserve.models.panels import PROJECTIONS, FusedLlama
from trioserve.models.spec import ModelSpec, ResolvedModel
from trioserve.sampling_params import SamplingParams

SPEC = ModelSpec(
    architecture="llama",
    num_layers=2,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=211,
    max_position=96,
)
MODEL = ResolvedModel(
    name="tiny", source="random:llama", format="random", spec=SPEC, tokenizer_path=""
)
TOLERANCE = 2e-4


def lively_model(resolved: ResolvedModel, layout, progress=None) -> Llama:
    """Weights large enough that every token of the context changes the answer."""
    source = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=source) * 0.25
        for name, shape in expected_tensors(resolved.spec).items()
    }
    return Llama(resolved.spec, tensors, layout)


class WholeSequence:
    """Attention over one sequence at once: no cache."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, context) -> Tensor:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)


PLAIN_PRODUCT = PanelProduct(Team(1, None))
PLAIN_WHOLE = WholeProduct(Team(1, None)) if PRESENT else None
WHOLE = pytest.param(
    "int8-dynamic",
    marks=pytest.mark.skipif(not PRESENT, reason="this processor has no products of bytes"),
)


def plain_logits(weights: str, token_ids: list[int]) -> Tensor:
    """[n, vocab], the logits after each token, layer by layer; float32 and float16 with torch's own
    products."""
    model = lively_model(MODEL, weights)
    if weights in ("int8", "int8-dynamic"):
        for projection in (
            model.head,
            *(getattr(one, n) for one in model.layers for n in PROJECTIONS),
        ):
            is_whole = projection.panels.kind in whole_panels.KINDS
            projection.product = PLAIN_WHOLE if is_whole else PLAIN_PRODUCT
    n = len(token_ids)
    ids, positions = torch.tensor(token_ids), torch.arange(n)
    return model.forward(ids, positions, WholeSequence(), None, positions)


def config(
    attention: str = "numba", weights: str = "fp32", dtype: str = "auto", **changes
) -> Config:
    settings = Config(
        model=ModelConfig(weights=weights, dtype=dtype),
        cache=CacheConfig(memory="1MiB", block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24),
        kernels=KernelsConfig(attention=attention),
        engine=EngineConfig(threads=1),
    )
    return attrs.evolve(settings, **changes)


class Recorder:
    """A reporter that keeps the stages that ended."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.report = StageReporter(self.stages.append)

    @property
    def ended(self) -> list[str]:
        return [stage.name for stage in self.stages if stage.state == "end"]


def start(settings: Config, num_blocks: int, max_model_len: int = 96) -> ModelRunner:
    runner = ModelRunner(MODEL, settings)
    report = Recorder().report
    runner.load(report)
    runner.profile(report)
    runner.init_kv_cache(num_blocks, max_model_len)
    runner.warm_up(report)
    return runner


@pytest.fixture(autouse=True)
def _lively(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(model_runner, "load_model", lively_model)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Session:
    """Runs works to their end and keeps each logit row by (sequence, position)."""

    def __init__(self, runner: ModelRunner, num_blocks: int, *, max_model_len: int = 96) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=8,
            max_num_seqs=8,
            max_num_batched_tokens=24,
            max_model_len=max_model_len,
        )
        self.prompts: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.scores: dict[int, list[TokenLogprobs | None]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.events: Counter[str] = Counter()

    def add(self, id: int, prompt: list[int], **sampling) -> None:
        self.add_with(
            id, prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 12} | sampling)
        )

    def add_with(self, id: int, prompt: list[int], sampling: SamplingParams) -> None:
        self.prompts[id] = prompt
        self.answers[id] = []
        self.logprobs[id] = []
        self.scheduler.add(Work(id, prompt, sampling, seed=id))

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch is not None
        self.count(batch)
        handle = self.runner.execute(batch)
        for id, position, row in zip(handle.ids, handle.positions, handle.logits, strict=True):
            self.logits[id, position] = row.clone()
        deltas, failed = self.scheduler.update(batch, self.runner.sample(handle))
        assert not failed
        for delta in deltas:
            self.answers[delta.id] += delta.token_ids
            if delta.prompt_logprobs is not None:
                assert delta.id not in self.scores
                assert self.answers[delta.id] == delta.token_ids  # with the first token
                self.scores[delta.id] = delta.prompt_logprobs
            self.logprobs[delta.id] += delta.logprobs or []
        self.scheduler.check_integrity()

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def count(self, batch: ScheduledBatch) -> None:
        decodes = [row.num_tokens == 1 and row.sample for row in batch.rows]
        self.events["mixed"] += any(decodes) and not all(decodes)
        self.events["chunk"] += sum(not row.sample for row in batch.rows)
        self.events["hit"] += sum(new.num_computed_tokens > 0 for new in batch.new)
        self.events["recompute"] += sum(
            len(new.token_ids) > new.num_prompt_tokens for new in batch.new
        )
        self.events["largest batch"] = max(self.events["largest batch"], len(batch.rows))

    def check(self, weights: str = "fp32") -> None:
        """All logits against the plain forward pass; greedy tokens are its best, or a tie."""
        # A last digit may turn the way in which a row's value is rounded to 16 bits.
        tolerance = TOLERANCE * (20 if weights == "int8-dynamic" else 1)
        for id, prompt in self.prompts.items():
            answer = self.answers[id]
            plain = plain_logits(weights, prompt + answer)
            for index, token in enumerate(answer):
                position = len(prompt) + index
                expected = plain[position - 1]
                found = self.logits[id, position]
                torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
                assert expected.max() - expected[token] < tolerance


def prompts(seed: int = 0) -> list[list[int]]:
    """Short and long ones, two families with common beginnings."""
    rng = random.Random(seed)

    def draw(n: int) -> list[int]:
        return [rng.randrange(SPEC.vocab_size) for _ in range(n)]

    common = draw(33)
    return [
        draw(1),
        draw(60),
        common + draw(5),
        common + draw(20),
        draw(8),
        common[:24] + draw(9),
        draw(47),
        draw(7),
        draw(16),
        common + draw(1),
    ]


@pytest.mark.parametrize(
    ("attention", "weights"),
    [(attention, weights) for attention in ("numba", "torch") for weights in ("fp32", "fp16")]
    + [("numba", "int8"), pytest.param("numba", *WHOLE.values, marks=WHOLE.marks)],
)
def test_everything_equals_the_plain_forward_pass(attention: str, weights: str) -> None:
    num_blocks = 26
    runner = start(config(attention, weights), num_blocks)
    session = Session(runner, num_blocks)
    for id, prompt in enumerate(prompts()):
        session.add(id, prompt, max_tokens=20)
    session.run()
    session.check(weights)
    fused = attention == "numba" and weights != "fp32"
    assert isinstance(runner._model, FusedLlama) == fused
    stats = session.scheduler.stats(0.0)
    assert session.events["chunk"] > 5
    assert session.events["hit"] > 2
    assert session.events["mixed"] > 5
    assert session.events["recompute"] > 0
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert session.events["largest batch"] > 3
    assert len(runner._state) <= 1 + session.events["largest batch"]


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_alone_and_in_a_batch(weights: str) -> None:
    """The same tokens, and logits within the tolerance, whoever else is there."""
    runner = start(config(weights=weights), 100)
    together = Session(runner, 100)
    for id, prompt in enumerate(prompts()):
        together.add(id, prompt)
    together.run()
    for id, prompt in enumerate(prompts()):
        alone = Session(runner, 100)
        alone.add(id, prompt)
        alone.run()
        assert alone.answers[id] == together.answers[id]
        for key, row in alone.logits.items():
            torch.testing.assert_close(row, together.logits[key], atol=TOLERANCE, rtol=0)


def test_seeded_sampling_does_not_depend_on_batch_mates() -> None:
    runner = start(config(), 100)
    together = Session(runner, 100)
    for id, prompt in enumerate(prompts()):
        together.add(id, prompt, temperature=0.8, top_p=0.95)
    together.run()
    alone = Session(runner, 100)
    alone.add(3, prompts()[3], temperature=0.8, top_p=0.95)
    alone.run()
    assert alone.answers[3] == together.answers[3]
    greedy = Session(runner, 100)
    greedy.add(3, prompts()[3])
    greedy.run()
    assert greedy.answers[3] != alone.answers[3]


def test_a_sequence_up_to_the_longest_length() -> None:
    runner = start(config(), 12)
    session = Session(runner, 12)
    session.add(0, prompts()[1], max_tokens=None)
    session.run()
    assert len(session.answers[0]) == 36
    session.check()


KINDS = pytest.mark.parametrize(
    ("attention", "weights"), [("numba", "fp16"), ("numba", "fp32"), ("torch", "fp32")]
)


@KINDS
def test_a_row_that_overflows_fails_alone(attention: str, weights: str) -> None:
    runner = start(config(attention, weights), 40)
    model = getattr(runner._model, "model", runner._model)
    model.embedding.rows[5] = float("nan")
    clean = Session(runner, 40)
    clean.add(1, [1, 2, 3])
    clean.run()
    session = Session(runner, 40)
    for id, prompt in enumerate([[4, 5, 6], [1, 2, 3], [7] * 30]):
        session.add(id, prompt)
    failures = []
    while session.scheduler.has_work:
        batch = session.scheduler.schedule()
        assert batch is not None
        sampled = runner.sample(runner.execute(batch))
        deltas, failed = session.scheduler.update(batch, sampled)
        failures += [failure.id for failure in failed]
        for delta in deltas:
            session.answers[delta.id] += delta.token_ids
    assert failures == [0]
    assert session.answers[1] == clean.answers[1]
    assert len(session.answers[2]) == 12


@KINDS
def test_a_step_that_raises_can_be_tried_row_by_row(attention: str, weights: str) -> None:
    """A token id outside the vocabulary takes its own row down, and no other."""
    runner = start(config(attention, weights), 40)
    reference = Session(runner, 40)
    reference.add(1, [1, 2, 3, 4, 5, 6, 7])
    reference.run()
    session = Session(runner, 40)
    session.add(1, [1, 2, 3, 4, 5, 6, 7])
    session.step()
    session.step()  # its next token begins a block
    session.add(2, [3, SPEC.vocab_size, 4])
    batch = session.scheduler.schedule()
    assert batch is not None
    assert batch.rows[0].new_block_ids
    with pytest.raises(IndexError):
        runner.execute(batch)
    sampled, failed = [], []
    for row in batch.rows:
        alone = ScheduledBatch(batch.step, [], [], [row])
        try:
            sampled += runner.sample(runner.execute(alone))
        except IndexError as error:
            failed += session.scheduler.fail([row.id], str(error))
    deltas, _ = session.scheduler.update(batch, sampled)
    assert [failure.id for failure in failed] == [2]
    session.answers[1] += deltas[0].token_ids
    session.run()
    assert session.answers[1] == reference.answers[1]


def test_masks_forbid_tokens() -> None:
    runner = start(config(), 40)
    session = Session(runner, 40)
    session.add(0, [1, 2, 3])
    session.add(1, [1, 2, 3])
    batch = session.scheduler.schedule()
    assert batch is not None
    handle = runner.execute(batch)
    mask = torch.zeros(SPEC.vocab_size, dtype=torch.bool)
    mask[17] = True
    first = runner.sample(handle, {handle.ids[0]: mask})
    assert first[0].token_id == 17


def test_layers_run_one_by_one_where_they_cannot_be_fused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def large(resolved: ResolvedModel, layout, progress=None) -> Llama:
        model = lively_model(resolved, layout)
        model.layers[1].down = lively_model(resolved, "fp32").layers[1].down
        return model

    monkeypatch.setattr(model_runner, "load_model", large)
    with caplog.at_level("INFO"):
        runner = start(config(weights="fp16"), 40)
    assert not isinstance(runner._model, FusedLlama)
    assert "layers: one by one, not all weights lie in panels" in caplog.text
    session = Session(runner, 40)
    for id, prompt in enumerate(prompts()):
        session.add(id, prompt)
    session.run()
    assert all(len(answer) == 12 for answer in session.answers.values())


@pytest.mark.parametrize("weights", ["int8", "packed"])
def test_codes_without_kernels_are_an_error(monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    monkeypatch.setitem(sys.modules, "trioserve.models.panels", None)
    with pytest.raises(ModelError, match=f"weights = {weights} cannot be used.*set it to fp16"):
        start(config(weights=weights), 40)


def test_packed_without_codes_is_an_error() -> None:
    with pytest.raises(
        ModelError, match=r"weights = packed cannot be used: .* holds no 4- or 8-bit"
    ):
        start(config(weights="packed"), 40)


def test_a_decoder_kernel_that_fails_is_no_crash(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "trioserve.models.panels", None)
    runner = start(config(weights="fp16"), 40)
    assert "layers run one by one: their kernel does not work here" in caplog.text
    assert runner._layout == "fp16"
    session = Session(runner, 40)
    session.add(0, [1, 2, 3])
    session.run()
    session.check("fp16")


@pytest.mark.skipif(Team(1).tiles is None, reason="this processor has no AMX")
def test_rounding_is_asked_for_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "load_model", lively_model)
    prompt = list(range(3, 15))
    plain = plain_logits("fp16", prompt)[-1]
    for dtype, told in (("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")):
        runner = start(config(weights="fp16", dtype=dtype), 40)
        assert runner.info()["dtype"] == told
        session = Session(runner, 40)
        session.add(0, prompt)
        session.step()
        [found] = session.logits.values()
        difference = (found - plain).abs().max()
        if told == "float32":
            assert difference < TOLERANCE
        else:
            assert TOLERANCE < difference < 0.05 * plain.abs().max()


@pytest.mark.parametrize(
    ("weights", "deterministic"), [("fp32", False), ("fp16", True)], ids=["fp32", "deterministic"]
)
def test_bfloat16_where_it_cannot_be_is_an_error(weights: str, deterministic: bool) -> None:
    settings = config(weights=weights, dtype="bfloat16")
    settings = attrs.evolve(settings, engine=EngineConfig(threads=1, deterministic=deterministic))
    with pytest.raises(ModelError, match=r"\[model\] dtype = bfloat16 needs .*set it to auto"):
        start(settings, 40)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_without_a_tile_unit_nothing_is_rounded(
    monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(runtime, "_tile_unit", lambda: None)
    runner = start(config(weights=weights, dtype="auto"), 40)
    assert runner.info()["dtype"] == "float32"
    with pytest.raises(ModelError, match="needs a processor with AMX"):
        start(config(weights=weights, dtype="bfloat16"), 40)


class TestStartUp:
    def test_stages_and_sizes(self) -> None:
        recorder = Recorder()
        runner = ModelRunner(MODEL, config())
        runner.load(recorder.report)
        profile = runner.profile(recorder.report)
        settings = config()
        plan = plan_kv_cache(
            profile,
            bytes_per_token=runner.kv_bytes_per_token,
            config=settings,
            model_max_len=SPEC.max_position,
        )
        runner.init_kv_cache(plan.num_blocks, plan.max_model_len)
        runner.warm_up(recorder.report)
        assert recorder.ended == [
            *("device", "distributed", "weights", "profile", "warm-up", "capture")
        ]
        assert profile.weight_bytes == runner.weight_bytes > 0
        assert runner.num_parameters > 0
        assert plan.kv_bytes <= 1 << 20
        assert runner.info() == {
            "architecture": "llama",
            "weights": "fp32",
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "attention": "numba",
        }

    @pytest.mark.parametrize(("num_blocks", "max_model_len"), [(1, 8), (2, 9), (1, 2)])
    def test_the_smallest_caches_warm_up(self, num_blocks: int, max_model_len: int) -> None:
        runner = start(config(), num_blocks, max_model_len)
        session = Session(runner, num_blocks, max_model_len=max_model_len)
        session.add(0, [1], max_tokens=None)
        session.run()
        assert len(session.answers[0]) == max_model_len - 1

    def test_memory_that_the_system_refuses(self) -> None:
        runner = start(config(), 1, 8)
        with pytest.raises(StartupError, match=r"the system refuses .* for the KV cache"):
            runner.init_kv_cache(1 << 40, 96)

    def test_a_backend_that_cannot_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "trioserve.kernels.cpu.runtime", None)
        with pytest.raises(ModelError, match="attention = numba does not work here"):
            start(config(), 8)

    def test_state_outlives_no_sequence(self) -> None:
        runner = start(config(), 40)
        assert len(runner._state) == 0
        batch = ScheduledBatch(
            1,
            [],
            [NewSequence(5, [1, 2], 2, 0, [0], SamplingParams(), 0)],
            [ScheduledRow(5, 0, 2, [], True)],
        )
        runner.sample(runner.execute(batch))
        assert len(runner._state) == 1
        runner.execute(ScheduledBatch(2, [5, 6], [], []))
        assert len(runner._state) == 0
