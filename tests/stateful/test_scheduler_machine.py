"""Scheduler against an executor that checks every read of the KV cache."""

from __future__ import annotations

import random
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from trioserve.core.batch import SampledRow, ScheduledBatch
from trioserve.core.scheduler import Scheduler
from trioserve.ipc.messages import Delta, Work, WorkFailed
from trioserve.sampling_params import SamplingParams

from .fake_executor import EOS, VOCAB, FakeExecutor, run_alone, scores_alone
from .machine_settings import machine_settings


class Harness:
    """A scheduler, its fake executor, and a record of every answer."""

    def __init__(
        self,
        *,
        num_spare_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        prefix_caching: bool = True,
    ) -> None:
        self.max_model_len = max_model_len
        self.budget = max_num_batched_tokens
        self.scheduler = Scheduler(
            num_blocks=-(-max_model_len // block_size) + num_spare_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=policy,  # type: ignore[arg-type]
            prefix_caching=prefix_caching,
            eos_token_ids=[EOS],
        )
        self.executor = FakeExecutor(block_size)
        self.launched: deque[tuple[ScheduledBatch, list[SampledRow]]] = deque()
        self.works: dict[int, Work] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.announced: set[int] = set()
        self.followed: set[int] = set()

    def add(self, prompt: list[int], sampling: SamplingParams, **fields: object) -> int:
        work = Work(len(self.works), prompt, sampling, seed=0, **fields)  # type: ignore[arg-type]
        self.scheduler.add(work)
        self.works[work.id] = work
        self.outputs[work.id] = []
        self.executor.salts[work.id] = work.cache_salt
        return work.id

    def launch(self, failing: frozenset[int] = frozenset()) -> bool:
        scheduler = self.scheduler
        batch = scheduler.schedule()
        scheduler.check_integrity()
        if batch is None:
            return False
        assert 0 < batch.num_tokens <= self.budget
        assert len({row.id for row in batch.rows}) == len(batch.rows)
        self._check_decodes(batch)
        self._check_nothing_is_computed_twice()
        self.launched.append((batch, self.executor.execute(batch, failing)))
        return True

    def _check_decodes(self, batch: ScheduledBatch) -> None:
        """Whoever has begun to answer and still runs is in the step (or in one in flight)."""
        rows = {row.id for other, _ in self.launched for row in other.rows}
        rows |= {row.id for row in batch.rows}
        for seq in self.scheduler._running.values():
            assert seq.num_left > 1 or seq.id in rows, f"decode {seq.id} was left out"

    def _check_nothing_is_computed_twice(self) -> None:
        """No two running prefills miss the same block of a shared prefix."""
        self.followed |= {id for s in self.scheduler._running.values() for id in s.followers}
        owners: dict[bytes, int] = {}
        size = self.scheduler.block_size
        for seq in self.scheduler._running.values():
            if not seq.cacheable or seq.num_left <= 1 or seq.prompt_logprobs is not None:
                continue
            for digest in seq.digests[seq.num_registered : (seq.num_tokens - 1) // size]:
                assert digest not in owners, f"{seq.id} computes what {owners[digest]} does"
                owners[digest] = seq.id

    def retire(self) -> None:
        batch, sampled = self.launched.popleft()
        deltas, failed = self.scheduler.update(batch, sampled)
        self.scheduler.check_integrity()
        self.take(deltas, failed)

    def step(self) -> None:
        assert self.launch()
        self.retire()

    def take(self, deltas: list[Delta], failed: list[WorkFailed] = []) -> None:  # noqa: B006
        for delta in deltas:
            assert delta.id not in self.ends, "something after the end"
            if not delta.token_ids and delta.finish_reason is None:
                assert delta.id not in self.announced, "announced twice"
                assert not self.outputs[delta.id], "announced after its first token"
                self.announced.add(delta.id)
            if not self.outputs[delta.id] and delta.token_ids:
                assert delta.num_cached_tokens is not None
                assert delta.num_cached_tokens < len(self.works[delta.id].prompt_token_ids)
            else:
                assert delta.num_cached_tokens is None or not delta.token_ids
            if delta.token_ids and not self.outputs[delta.id]:
                work = self.works[delta.id]
                asked = work.sampling.prompt_logprobs is not None
                assert delta.prompt_logprobs == (scores_alone(work) if asked else None)
            else:
                assert delta.prompt_logprobs is None
            self.outputs[delta.id] += delta.token_ids
            if delta.finish_reason is not None:
                self.ends[delta.id] = delta.finish_reason
        for failure in failed:
            assert failure.id not in self.ends, "something after the end"
            self.ends[failure.id] = failure.code

    def drain(self) -> None:
        """Run to the end; everything is free and everybody has the right answer."""
        num_steps = 0
        while self.scheduler.has_work or self.launched:
            if self.launched:
                self.retire()
            else:
                assert self.launch(), "work, but no step"
            num_steps += 1
            assert num_steps < 20_000, "no progress"
        self.scheduler.check_integrity()
        assert self.scheduler.pool.num_used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert set(self.ends) == set(self.works)
        for id, work in self.works.items():
            eos = self.scheduler.eos_token_ids
            tokens, reason = run_alone(work, self.max_model_len, eos)
            if self.ends[id] in ("abort", "internal"):
                assert self.outputs[id] == tokens[: len(self.outputs[id])]
            else:
                assert (self.outputs[id], self.ends[id]) == (tokens, reason)


PREFIXES = [[], [1, 2, 3, 4, 5, 6, 1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 1, 2, 3, 3, 3, 3, 2]]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_spare_blocks=st.integers(0, 8),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([1, 2, 3, 5, 8, 16, 64]),
        max_model_len=st.integers(2, 40),
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, **settings: object) -> None:
        self.h = Harness(**settings)  # type: ignore[arg-type]

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), (1,), (2, 3)]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "a"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int | None,
        min_tokens: int,
        ignore_eos: bool,
        stop: tuple[int, ...],
        priority: int,
        salt: str,
        prompt_logprobs: int | None,
    ) -> None:
        prompt = [*prefix, *tail][: self.h.max_model_len - 1]
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens or min_tokens),
            ignore_eos=ignore_eos,
            stop_token_ids=stop,
            prompt_logprobs=prompt_logprobs,
        )
        self.h.add(prompt, sampling, priority=priority, cache_salt=salt)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.h.launched:
                self.h.retire()
            elif self.h.scheduler.has_work:
                assert self.h.launch(), "work, but no step"

    @precondition(lambda self: len(self.h.launched) < 2)
    @rule()
    def launch(self) -> None:
        self.h.launch()

    @precondition(lambda self: self.h.launched)
    @rule()
    def retire(self) -> None:
        self.h.retire()

    @precondition(lambda self: len(self.h.launched) < 2 and self.h.works)
    @rule(data=st.data())
    def launch_failing(self, data: st.DataObject) -> None:
        failing = data.draw(st.frozensets(st.sampled_from(sorted(self.h.works)), max_size=3))
        self.h.launch(failing)

    @precondition(lambda self: self.h.works)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.h.works)), max_size=3))
        live = {id for id in ids if id not in self.h.ends}
        deltas = self.h.scheduler.abort([*ids, 10_000])
        assert {delta.id for delta in deltas} == live
        assert all(delta.finish_reason == "abort" for delta in deltas)
        self.h.scheduler.check_integrity()
        self.h.take(deltas)

    @precondition(lambda self: self.h.works)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.h.works)), max_size=1))
        self.h.take([], self.h.scheduler.fail(ids, "told to fail"))
        self.h.scheduler.check_integrity()

    @rule()
    def forget_unused(self) -> None:
        num_kept = self.h.scheduler.forget_unused()
        assert num_kept <= self.h.scheduler.pool.num_used
        self.h.scheduler.check_integrity()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.h.scheduler.reset_prefix_cache()
        self.h.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(machine_settings(150), stateful_step_count=40)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_the_machine_is_about_does_happen(policy: str) -> None:
    """Hits, chunks, preemptions with recompute, and mixed batches, counted in one long run."""
    rng = random.Random(7)
    h = Harness(
        num_spare_blocks=12,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=64,
        policy=policy,
    )
    prefixes = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    for _ in range(60):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 16))]
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 40),
            ignore_eos=True,
            prompt_logprobs=None if rng.randrange(5) else 0,
        )
        h.add([*rng.choice(prefixes), *tail], sampling, priority=rng.randrange(3))
        for _ in range(rng.randrange(4)):
            h.step()
    h.drain()
    stats = h.scheduler.stats(0.0)
    assert stats.num_preemptions >= 5
    assert stats.prefix_hits >= 200
    assert h.executor.num_hits >= 10
    assert h.executor.num_chunks >= 10
    assert h.executor.num_mixed >= 10
    assert h.executor.num_scored >= 100
    assert h.executor.num_recomputed >= 3
    assert len(h.followed) >= 5
    assert stats.output_tokens == sum(map(len, h.outputs.values()))


def test_kv_02_five_hundred_aborts_at_any_moment_leave_nothing() -> None:
    rng = random.Random(3)
    h = Harness(
        num_spare_blocks=10,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=64,
    )
    live: list[int] = []
    for _ in range(500):
        prompt = [1] * rng.randrange(1, 40) + [rng.randrange(VOCAB)]
        live.append(h.add(prompt, SamplingParams(ignore_eos=True)))
        for _ in range(rng.randrange(3)):
            h.step()
        if len(live) > 20 or rng.random() < 0.5:
            h.take(h.scheduler.abort([live.pop(rng.randrange(len(live)))]))
            h.scheduler.check_integrity()
    h.take(h.scheduler.abort(live))
    assert not h.scheduler.has_work
    assert h.scheduler.pool.num_free == h.scheduler.pool.num_blocks
    full = h.add([2] * 63, SamplingParams())
    h.step()
    assert h.scheduler.num_running == 1
    assert full not in h.ends
    h.drain()
