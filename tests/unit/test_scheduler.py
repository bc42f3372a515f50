"""The scheduler's rules one by one; the rule machine in tests/stateful looks at the rest."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.core.batch import SampledRow
from trioserve.core.scheduler import MAX_PASSES
from trioserve.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from trioserve.ipc.messages import Delta, TokenLogprobs, WorkFailed

from .scheduling import EOS, make, run, shares, step, steps_to_first_token, work

# ----------------------------------------------------------------------------- admission


def test_the_cache_must_hold_one_sequence() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 4096 .* 1024 tokens"):
        make(num_blocks=64, block_size=16, max_model_len=4096)
    make(num_blocks=16, block_size=4, max_model_len=64)


def test_kv_01_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    scheduler = make()
    for length in (64, 65, 1500):
        with pytest.raises(
            ContextLengthExceeded, match=rf"{length} tokens, the context 64"
        ) as info:
            scheduler.add(work(1, length))
        assert info.value.param == "prompt"
    assert not scheduler.has_work
    scheduler.add(work(1, 63))
    deltas = []
    while scheduler.has_work:
        deltas += step(scheduler)[1]
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [([7], "length")]


def test_kv_01_max_tokens_is_cut_by_the_context() -> None:
    scheduler = make()
    scheduler.add(work(1, 60, max_tokens=900))
    deltas = []
    while scheduler.has_work:
        deltas += step(scheduler)[1]
    assert len(deltas) == 4
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "match"),
    [([], "empty"), ([1, -1, 5], "from -1 to 5"), ([2**40], str(2**40))],
)
def test_impossible_prompts_are_refused(prompt: list[int], match: str) -> None:
    scheduler = make()
    with pytest.raises(InvalidRequest, match=match):
        scheduler.add(work(1, prompt))
    assert not scheduler.has_work


def test_an_id_in_use_is_refused() -> None:
    scheduler = make()
    scheduler.add(work(1, 5))
    with pytest.raises(InvalidRequest, match="1"):
        scheduler.add(work(1, 5))
    step(scheduler)
    with pytest.raises(InvalidRequest, match="1"):
        scheduler.add(work(1, 5))
    scheduler.abort([1])
    scheduler.add(work(1, 5))


def test_a_small_budget_limits_the_running() -> None:
    scheduler = make(max_num_batched_tokens=2)
    for id in range(5):
        scheduler.add(work(id, 1 if id else 30, max_tokens=20))
    for _ in range(60):
        batch, _ = step(scheduler)
        assert batch.num_tokens <= 2
        assert scheduler.num_running <= 2


def test_admission_leaves_a_block_for_each_running() -> None:
    scheduler = make(num_blocks=16)
    scheduler.add(work(1, 7))
    scheduler.add(work(2, 7))
    step(scheduler)
    scheduler.add(work(3, 45))  # 12 blocks, 12 are free
    batch, _ = step(scheduler)
    assert 3 not in shares(batch)
    scheduler.abort([2])
    batch, _ = step(scheduler)
    assert 3 in shares(batch)


# ------------------------------------------------------------------------------ fairness


def test_kv_03_long_prompts_never_displace_decodes() -> None:
    scheduler = make(num_blocks=200)
    scheduler.add(work(0, 3, max_tokens=40))
    step(scheduler)
    for id in range(1, 5):
        scheduler.add(work(id, 60))
    for _ in range(39):
        batch, deltas = step(scheduler)
        assert batch.rows[0].id == 0
        assert batch.rows[0].num_tokens == 1
        assert batch.num_tokens <= 16
        assert deltas[0].id == 0


@pytest.mark.parametrize("budget", [2, 3, 7, 16])
@pytest.mark.parametrize("num_long", [1, 4, 30])
def test_kv_03_a_short_prompt_waits_for_no_number_of_long_ones(num_long: int, budget: int) -> None:
    scheduler = make(
        num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=budget, max_model_len=1000
    )
    for id in range(num_long):
        scheduler.add(work(id, 900))
    step(scheduler)
    scheduler.add(work(99, 20))
    # All of its lane, which has half the budget in turns.
    assert steps_to_first_token(scheduler, 99) <= 2 * 20 // budget + 2


def test_kv_03_short_prompts_never_stop_the_oldest() -> None:
    scheduler = make(num_blocks=400, max_model_len=200)
    scheduler.add(work(0, 160))
    for id in range(1, 500):
        scheduler.add(work(id, 8, max_tokens=1))
        scheduler.add(work(1000 + id, 8, max_tokens=1))
        batch, deltas = step(scheduler)
        assert shares(batch)[0] >= 8
        if any(delta.id == 0 for delta in deltas):
            break
    assert id <= 160 / 8


def test_kv_03_equals_are_served_first_come() -> None:
    scheduler = make(num_blocks=200)
    for id in range(6):
        scheduler.add(work(id, 30, max_tokens=1))
    order = []
    while scheduler.has_work:
        order += [delta.id for delta in step(scheduler)[1]]
    assert order == list(range(6))


def test_a_head_without_room_is_passed_a_few_times_only() -> None:
    scheduler = make(num_blocks=16)
    scheduler.add(work(0, 29, ignore_eos=True))
    step(scheduler)
    step(scheduler)  # it decodes, in 8 of 16 blocks
    scheduler.add(work(1, 50))  # 13 blocks
    for id in range(2, 30):
        scheduler.add(work(id, 3, max_tokens=1))
    finished = []
    while not any(id == 1 for id in finished):
        batch, deltas = step(scheduler)
        finished += [row.id for row in batch.rows if row.id == 1]
        finished += [delta.id for delta in deltas if delta.finish_reason and delta.id]
    before = finished[: finished.index(1)]
    assert before == list(range(2, 2 + MAX_PASSES))


def test_priority_goes_first_and_the_worst_is_preempted() -> None:
    scheduler = make(policy="priority", num_blocks=16)
    scheduler.add(work(0, 23, priority=5))
    scheduler.add(work(1, 23, priority=1))
    scheduler.add(work(2, 5, priority=9))
    batch, _ = step(scheduler)
    assert shares(batch) == {1: 16}
    preempted = []
    while scheduler.stats(0).num_preemptions == 0:
        before = set(scheduler._running)
        step(scheduler)
        preempted = list(before - set(scheduler._running))
    assert preempted == [2] if 2 in before else preempted == [0]
    assert 1 in scheduler._running


def test_fcfs_ignores_priority() -> None:
    scheduler = make()
    scheduler.add(work(0, 16, priority=5))
    scheduler.add(work(1, 16, priority=1))
    assert shares(step(scheduler)[0]) == {0: 16}


# ---------------------------------------------------------------------------- preemption


def test_the_last_admitted_is_recomputed_in_front_of_the_queue() -> None:
    scheduler = make(num_blocks=16, prefix_caching=False)
    scheduler.add(work(0, 26, ignore_eos=True))
    scheduler.add(work(1, 26, ignore_eos=True))
    outputs: dict[int, list[int]] = {0: [], 1: []}
    token_id = 50
    while scheduler.stats(0).num_preemptions == 0:
        token_id += 1
        batch, deltas = step(scheduler, token_id)
        for delta in deltas:
            outputs[delta.id] += delta.token_ids
    assert batch.removed_ids == [1]
    assert list(scheduler._running) == [0]
    scheduler.add(work(2, 3))
    batch, _ = step(scheduler)
    assert 1 not in shares(batch)
    scheduler.abort([0])
    batch, _ = step(scheduler)
    assert batch.removed_ids == [0]
    new = {new.id: new for new in batch.new}
    assert new[1].token_ids == work(1, 26).prompt_token_ids + outputs[1]
    assert new[1].num_prompt_tokens == 26
    assert new[1].num_computed_tokens == 0


def test_a_preempted_sequence_waits_before_older_ones_that_never_ran() -> None:
    scheduler = make(num_blocks=16)
    scheduler.add(work(0, 29, ignore_eos=True))
    step(scheduler)
    step(scheduler)
    scheduler.add(work(1, 50))  # has no room
    scheduler.add(work(2, 8, ignore_eos=True))  # passes it
    while scheduler.stats(0).num_preemptions == 0:
        step(scheduler)
    assert list(scheduler._running) == [0]
    scheduler.abort([0])
    batch, _ = step(scheduler)
    assert batch.rows[0].id == 2


def test_rows_of_one_token_come_before_chunks() -> None:
    scheduler = make(max_num_batched_tokens=8)
    prompt = list(range(100, 105))
    scheduler.add(work(0, prompt, max_tokens=1))
    step(scheduler)
    scheduler.add(work(1, 30))
    scheduler.add(work(2, prompt))  # four hits, one token to compute
    batch, _ = step(scheduler)
    assert shares(batch) == {2: 1, 1: 7}
    assert [row.id for row in batch.rows] == [2, 1]


# -------------------------------------------------------------------------- prefix cache


def test_equal_prompts_at_once_are_computed_once() -> None:
    scheduler = make(num_blocks=200, max_num_batched_tokens=64)
    prompt = list(range(100, 140))
    for id in range(8):
        scheduler.add(work(id, prompt, max_tokens=3))
    assert shares(step(scheduler)[0]) == {0: 40}
    batch, deltas = step(scheduler)
    assert shares(batch) == {0: 1, **dict.fromkeys(range(1, 8), 4)}
    assert {delta.num_cached_tokens for delta in deltas if delta.id} == {36}
    stats = scheduler.stats(0.5)
    assert (stats.prefix_queries, stats.prefix_hits) == (8 * 40, 7 * 36)
    assert stats.prompt_tokens == 40 + 7 * 4
    assert stats.output_tokens == 1 + 8
    assert stats.step_s == 0.5


def test_a_copy_waits_one_step_only_for_blocks_that_come() -> None:
    """The owner of the prefix advances by a token a step: its followers do not wait for it all."""
    scheduler = make(num_blocks=400, max_num_batched_tokens=16, max_model_len=400)
    prompt = list(range(300))
    scheduler.add(work(0, prompt))
    step(scheduler)
    scheduler.add(work(1, [*prompt[:8], 5000, 5001]))
    assert steps_to_first_token(scheduler, 1) == 1


def test_salt_separates() -> None:
    scheduler = make()
    prompt = list(range(100, 113))
    for id, salt in enumerate(["", "a", "b", "a"]):
        scheduler.add(work(id, prompt, salt=salt, max_tokens=1))
        _, (delta,) = step(scheduler)
        assert delta.num_cached_tokens == (12 if id == 3 else 0)


def test_what_a_failed_sequence_computed_is_never_hit() -> None:
    scheduler = make()
    prompt = list(range(100, 141))
    scheduler.add(work(0, prompt))
    step(scheduler)
    batch = scheduler.schedule()
    assert batch is not None
    _, (failure,) = scheduler.update(batch, [SampledRow(0, 0, error="NaN at token 3")])
    assert failure == WorkFailed(0, "internal", "NaN at token 3")
    scheduler.add(work(1, prompt))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.removed_ids == [0]
    assert batch.new[0].num_computed_tokens == 0
    run(scheduler, batch)
    assert [failure.id for failure in scheduler.fail([1, 0, 77], "told")] == [1]
    scheduler.add(work(2, prompt))
    assert scheduler.schedule().new[0].num_computed_tokens == 0  # type: ignore[union-attr]


def test_a_row_without_a_result_fails() -> None:
    scheduler = make()
    scheduler.add(work(0, 3))
    batch = scheduler.schedule()
    assert batch is not None
    _, (failure,) = scheduler.update(batch, [])
    assert (failure.id, failure.code) == (0, "internal")
    assert not scheduler.has_work


def test_after_a_reset_nothing_older_is_hit() -> None:
    scheduler = make()
    prompt = list(range(100, 140))
    scheduler.add(work(0, prompt))
    step(scheduler)
    scheduler.reset_prefix_cache()
    while scheduler.stats(0).output_tokens == 0:
        step(scheduler)  # what it adds now continues blocks from before the reset
    scheduler.abort([0])
    assert not any(scheduler.pool._digests)
    scheduler.add(work(1, prompt, max_tokens=1))
    deltas = []
    while scheduler.has_work:
        deltas += step(scheduler)[1]
    assert deltas[0].num_cached_tokens == 0


# --------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("settings", "tokens", "end"),
    [
        ({}, [5, EOS], ("stop", None)),
        ({"ignore_eos": True, "max_tokens": 3}, [5, EOS, 5], ("length", None)),
        ({"stop_token_ids": (9,)}, [5, 9], ("stop", 9)),
        ({"stop_token_ids": (EOS,)}, [EOS], ("stop", None)),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [EOS], ("stop", EOS)),
        ({"min_tokens": 3}, [EOS, EOS, EOS], ("stop", None)),
        ({"min_tokens": 2, "stop_token_ids": (9,)}, [9, 9], ("stop", 9)),
        ({"max_tokens": 2, "stop_token_ids": (9,)}, [5, 9], ("stop", 9)),
        ({"max_tokens": 1}, [EOS], ("stop", None)),
        ({"max_tokens": 1}, [5], ("length", None)),
    ],
)
def test_ends(settings: dict[str, Any], tokens: list[int], end: tuple[str, int | None]) -> None:
    scheduler = make()
    scheduler.add(work(0, 3, **settings))
    deltas = []
    for token_id in tokens:
        assert scheduler.has_work
        deltas += step(scheduler, token_id)[1]
    assert [delta.token_ids for delta in deltas] == [[token_id] for token_id in tokens]
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert (deltas[-1].finish_reason, deltas[-1].stop_token_id) == end
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0
    assert scheduler.schedule() is None


def test_logprobs_pass_through() -> None:
    scheduler = make()
    scheduler.add(work(0, 3))
    batch = scheduler.schedule()
    assert batch is not None
    logprobs = TokenLogprobs(7, -0.5, 1, [])
    (delta,), _ = scheduler.update(batch, [SampledRow(0, 7, logprobs)])
    assert delta.logprobs == [logprobs]
    assert step(scheduler)[1][0].logprobs is None


def test_a_prefill_of_several_steps_is_announced_once() -> None:
    scheduler = make(max_num_batched_tokens=4, max_model_len=64)
    scheduler.add(work(1, 12, max_tokens=2))
    deltas: list[Delta] = []
    while scheduler.has_work:
        deltas += run(scheduler, scheduler.schedule())[0]
    assert [delta.token_ids for delta in deltas] == [[], [7], [7]]
    assert deltas[1].num_cached_tokens == 0
    scheduler.add(work(2, 3, max_tokens=1))
    deltas = run(scheduler, scheduler.schedule())[0]
    assert [delta.token_ids for delta in deltas] == [[7]]


def test_abort_answers_once_wherever_it_is() -> None:
    scheduler = make(max_num_seqs=2)
    for id in range(4):
        scheduler.add(work(id, 3))
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    deltas = scheduler.abort([3, 0, 3, 99])
    assert [(d.id, d.token_ids, d.finish_reason) for d in deltas] == [
        (3, [], "abort"),
        (0, [], "abort"),
    ]
    assert scheduler.abort([3, 0]) == []
    scheduler.check_integrity()
    batch, _ = step(scheduler)
    assert batch.removed_ids == [0]
    assert scheduler.num_sequences == 2


def test_a_batch_in_flight_retires_after_its_sequence_has_gone() -> None:
    scheduler = make()
    scheduler.add(work(0, 3))
    scheduler.add(work(1, 3))
    batch = scheduler.schedule()
    scheduler.abort([0])
    assert scheduler.pool.num_used == 1
    scheduler.add(work(0, 5))  # another under the same id, as far as the scheduler knows
    second = scheduler.schedule()
    assert second is not None
    assert shares(second) == {0: 5}  # 1 is in flight
    deltas, failed = run(scheduler, batch)
    assert [delta.id for delta in deltas] == [1]
    assert failed == []


def test_nothing_to_do_keeps_what_is_to_be_forgotten() -> None:
    scheduler = make()
    scheduler.add(work(0, 3, max_tokens=1))
    step(scheduler)
    assert scheduler.schedule() is None
    scheduler.add(work(1, 3))
    batch = scheduler.schedule()
    assert batch is not None
    assert (batch.step, batch.removed_ids) == (2, [0])


def test_decoding_costs_the_same_at_any_length() -> None:
    """Digests are made when a block fills, once each."""
    scheduler = make(num_blocks=300, max_model_len=1000)
    calls = []
    digest = scheduler._prefixes._hasher.digest
    scheduler._prefixes._hasher.digest = lambda *args: calls.append(1) or digest(*args)  # type: ignore
    scheduler.add(work(0, 4, ignore_eos=True))
    for _ in range(800):
        step(scheduler)
    assert len(calls) == 803 // 4


def test_the_queue_drops_what_left() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(work(0, 60))
    step(scheduler)
    for id in range(1, 2000):
        scheduler.add(work(id, 1 + id % 50))
        scheduler.abort([id])
    assert all(len(heap) < 64 for heap in scheduler._waiting._heaps.values())
