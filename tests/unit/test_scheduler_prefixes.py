"""Equal prefixes are computed once: who follows whom, and what becomes of followers."""

from __future__ import annotations

import pytest

from trioserve.core.batch import ScheduledBatch
from trioserve.core.scheduler import MAX_FOLLOWERS, Scheduler
from trioserve.core.sequence import Sequence

from .scheduling import make, run, shares, step, steps_to_first_token, work

PROMPT = list(range(100, 1100))


def big(**changes: object) -> Scheduler:
    settings = {
        "num_blocks": 2000,
        "block_size": 16,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 4000,
    }
    return make(**{**settings, **changes})


def drain(scheduler: Scheduler, num_steps: int = 5000) -> int:
    """Run to the end; prompt tokens computed."""
    for _ in range(num_steps):
        if not scheduler.has_work:
            return scheduler.stats(0.0).prompt_tokens
        step(scheduler)
    raise AssertionError("no end")


def running(scheduler: Scheduler) -> list[int]:
    return list(scheduler._running)


def followers(scheduler: Scheduler) -> list[int]:
    return [seq.id for seq in scheduler._sequences.values() if seq.leader is not None]


def lead(scheduler: Scheduler, num_followers: int) -> ScheduledBatch:
    """Launch a step with all of sequence 0, in which as many others come to follow it."""
    for id in range(num_followers + 1):
        scheduler.add(work(id, PROMPT, max_tokens=1))
    batch = scheduler.schedule()
    assert batch is not None
    assert running(scheduler) == [0]
    return batch


def sequence(scheduler: Scheduler, id: int) -> Sequence:
    return scheduler._sequences[id]


@pytest.mark.parametrize("length", [1000, 992, 17, 16])
def test_n_choices_compute_the_prompt_once(length: int) -> None:
    scheduler = big()
    for id in range(8):
        scheduler.add(work(id, PROMPT[:length], max_tokens=4))
    assert drain(scheduler) <= length + 7 * 16
    stats = scheduler.stats(0.0)
    assert stats.prefix_hits >= 7 * (length - 16)
    assert stats.output_tokens == 8 * 4


def test_without_prefix_caching_each_computes_its_own() -> None:
    scheduler = big(prefix_caching=False)
    for id in range(3):
        scheduler.add(work(id, PROMPT, max_tokens=1))
    step(scheduler)
    assert followers(scheduler) == []
    assert drain(scheduler) == 3000


def test_a_follower_waits_for_what_it_shares_and_no_longer() -> None:
    scheduler = big()
    scheduler.add(work(0, PROMPT, max_tokens=1))
    scheduler.add(work(1, [*PROMPT[:300], *range(5000, 5020)], max_tokens=1))
    step(scheduler)
    assert running(scheduler) == [0]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    step(scheduler)  # 512 tokens of the leader are computed
    batch, deltas = step(scheduler)
    assert shares(batch)[1] == 320 - 288
    assert [delta.id for delta in deltas] == [1]
    assert drain(scheduler) == 1000 + 320 - 288


def test_a_leader_is_served_as_its_most_urgent_follower_would_be() -> None:
    """Two short prompts arrive while a long one with the same beginning crawls behind another."""
    scheduler = big(max_num_batched_tokens=64)
    scheduler.add(work(0, 3900, max_tokens=1))  # has the lane of the first come
    scheduler.add(work(1, [*PROMPT, *range(10_000, 12_500)], max_tokens=1))
    step(scheduler)
    assert running(scheduler) == [0, 1]
    for id in range(2, 6):
        scheduler.add(work(id, 1500 + id, max_tokens=1))  # all shorter than 1
    step(scheduler)
    scheduler.add(work(10, [*PROMPT[:160], 7, 7], max_tokens=1))
    # The shortest's half of the budget is 32 a step: 160 tokens of the leader, then its own two.
    assert steps_to_first_token(scheduler, 10) <= 8


def test_a_worse_leader_is_lifted_by_a_better_follower() -> None:
    scheduler = big(policy="priority", max_num_batched_tokens=64)
    scheduler.add(work(0, PROMPT, priority=9, max_tokens=1))
    step(scheduler)
    for id in range(1, 4):
        scheduler.add(work(id, 900 + id, priority=5, max_tokens=1))
    step(scheduler)
    scheduler.add(work(10, [*PROMPT[:320], 7, 7], priority=0, max_tokens=1))
    assert steps_to_first_token(scheduler, 10) <= 7


def test_when_a_leader_is_aborted_the_next_takes_over() -> None:
    scheduler = big()
    for id in range(4):
        scheduler.add(work(id, PROMPT[: 1000 - id], max_tokens=1))
    step(scheduler)
    (leader,) = running(scheduler)
    assert len(followers(scheduler)) == 1
    scheduler.abort([leader])
    scheduler.check_integrity()
    assert followers(scheduler) == []
    step(scheduler)
    (leader,) = running(scheduler)
    assert sequence(scheduler, leader).num_cached_tokens == 256  # what the first had computed
    assert drain(scheduler) <= 1000 + 3 * 16


def test_a_leader_aborted_in_flight_leaves_nothing_to_wait_for() -> None:
    scheduler = big(max_num_batched_tokens=2000)
    batch = lead(scheduler, 3)
    assert followers(scheduler) == [1, 2, 3]
    scheduler.abort([0])
    assert followers(scheduler) == []
    run(scheduler, batch)
    assert drain(scheduler) == 1000 + 2 * 8


def test_when_a_leader_fails_nothing_of_it_is_reused() -> None:
    scheduler = big()
    for id in range(3):
        scheduler.add(work(id, PROMPT[: 1000 - id], max_tokens=1))
    step(scheduler)
    scheduler.fail(running(scheduler), "told to")
    step(scheduler)
    (leader,) = running(scheduler)
    assert sequence(scheduler, leader).num_cached_tokens == 0
    assert drain(scheduler) <= 256 + 1000 + 16


def test_a_follower_can_be_aborted_or_failed() -> None:
    scheduler = big(max_num_batched_tokens=2000)
    batch = lead(scheduler, 3)
    assert followers(scheduler) == [1, 2, 3]
    assert [delta.finish_reason for delta in scheduler.abort([2])] == ["abort"]
    assert [failure.id for failure in scheduler.fail([3], "told to")] == [3]
    scheduler.check_integrity()
    assert scheduler.num_waiting == 1
    run(scheduler, batch)
    assert drain(scheduler) == 1000 + 8


def test_a_reset_sets_followers_free() -> None:
    scheduler = big(max_num_batched_tokens=2000)
    batch = lead(scheduler, 1)
    assert followers(scheduler) == [1]
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    assert followers(scheduler) == []
    run(scheduler, batch)
    assert drain(scheduler) == 2000


def test_another_salt_follows_nobody() -> None:
    scheduler = big()
    for id in range(2):
        scheduler.add(work(id, PROMPT, salt=str(id), max_tokens=1))
    step(scheduler)
    assert followers(scheduler) == []
    assert drain(scheduler) == 2000


def test_followers_hold_nobody_up() -> None:
    scheduler = big(max_num_seqs=256)
    for id in range(MAX_FOLLOWERS * 4):
        scheduler.add(work(id, PROMPT, max_tokens=1))
    scheduler.add(work(1000, 900, max_tokens=1))
    # The shortest's half of the budget, as if it were alone with the leader.
    assert steps_to_first_token(scheduler, 1000) == 8
    assert drain(scheduler) <= 1000 + MAX_FOLLOWERS * 4 * 16 + 900


def test_they_are_set_aside_a_few_at_a_time() -> None:
    scheduler = big(max_num_batched_tokens=2000)
    lead(scheduler, MAX_FOLLOWERS + 10)
    assert len(followers(scheduler)) == MAX_FOLLOWERS
    assert scheduler.num_waiting == MAX_FOLLOWERS + 10


def test_a_preempted_leader_lets_its_followers_go() -> None:
    scheduler = make(num_blocks=12, max_num_batched_tokens=3, max_model_len=40)
    scheduler.add(work(0, 4, max_tokens=36, ignore_eos=True))
    while scheduler.num_running == 0 or scheduler.stats(0.0).output_tokens == 0:
        step(scheduler)
    for id in (1, 2):
        scheduler.add(work(id, PROMPT[: 31 - id], max_tokens=1))
    while scheduler.stats(0.0).num_preemptions == 0:
        step(scheduler)
        if running(scheduler) == [0, 1]:
            assert followers(scheduler) == [2]
    assert running(scheduler) == [0]
    assert followers(scheduler) == []
    drain(scheduler)
