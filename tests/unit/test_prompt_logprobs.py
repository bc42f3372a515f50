"""Log probabilities of prompts, against a plain forward pass, over chunks and preemptions."""

from __future__ import annotations

import itertools

import attrs
import pytest

from trioserve.core import prompt_logprobs
from trioserve.core.batch import SampledRow, ScheduledBatch
from trioserve.core.scheduler import Scheduler
from trioserve.ipc.messages import Delta, TokenLogprobs, WorkFailed

from .scheduling import make, work
from .test_runner import MODEL, SPEC, Session, _lively, config, plain_logits, prompts, start

TOLERANCE = 2e-4

__all__ = ["_lively"]  # applies here as well


def check(session: Session, id: int, num_top: int, num_token_ids: int, weights: str) -> None:
    """The scores of a prompt against log-softmax of the plain logits."""
    prompt, scores = session.prompts[id], session.scores[id]
    assert len(scores) == len(prompt)
    assert scores[0] is None
    plain = plain_logits(weights, prompt)[:, :num_token_ids].log_softmax(-1)
    for position, entry in enumerate(scores[1:], 1):
        assert entry is not None
        row, token_id = plain[position - 1], prompt[position]
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        low = int((row > row[token_id] + TOLERANCE).sum()) + 1
        high = int((row > row[token_id] - TOLERANCE).sum())
        assert low <= entry.rank <= max(low, high)
        assert len(entry.top) == num_top
        for (id, value), expected in zip(entry.top, row.topk(num_top).values, strict=True):
            assert value == pytest.approx(float(expected), abs=TOLERANCE)
            assert value == pytest.approx(float(row[id]), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("attention", "weights", "num_blocks"),
    [("numba", "fp32", 100), ("numba", "fp16", 26), ("torch", "fp32", 26)],
)
def test_they_equal_the_plain_forward_pass(
    attention: str, weights: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "ROWS", 10)
    runner = start(config(attention, weights), num_blocks)
    session = Session(runner, num_blocks)
    for id, prompt in enumerate(prompts()):
        asked = {} if id % 3 == 2 else {"prompt_logprobs": id % 3 * 5}
        session.add(id, prompt, max_tokens=20, **asked)
    session.run()
    session.check(weights)
    assert sorted(session.scores) == [0, 1, 3, 4, 6, 7, 9]
    for id in session.scores:
        check(session, id, id % 3 * 5, SPEC.vocab_size, weights)
    assert session.events["chunk"] > 5
    assert session.events["hit"] > 0
    assert (session.events["recompute"] > 0) == (num_blocks == 26)
    assert len(runner._scorer._prompts) <= 1  # the last one that ended is told with the next step


def test_ids_that_are_no_tokens_have_no_part_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = attrs.evolve(MODEL, num_token_ids=150)
    monkeypatch.setitem(start.__globals__, "MODEL", padded)
    runner = start(config(), 20)
    session = Session(runner, 20)
    session.add(0, [1, 2, 3, 149, 5], prompt_logprobs=20)
    session.run()
    check(session, 0, 20, 150, "fp32")
    entries = [entry for entry in session.scores[0] if entry is not None]
    assert max(id for entry in entries for id, _ in entry.top) < 150


def test_no_logits_but_the_sampled_are_made_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = start(config(), 40)
    sizes: list[int] = []
    logits = runner._model.logits
    monkeypatch.setattr(runner._model, "logits", lambda x: sizes.append(len(x)) or logits(x))
    session = Session(runner, 40)
    session.add(0, prompts()[1], max_tokens=2)
    session.run()
    assert max(sizes) == 1
    session.add(1, prompts()[1], max_tokens=2, prompt_logprobs=0)
    session.run()
    assert max(sizes) == 24  # of a chunk


def test_rows_of_logits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "ROWS", 7)
    runner = start(config(), 40)
    sizes: list[int] = []
    logits = runner._model.logits
    monkeypatch.setattr(runner._model, "logits", lambda x: sizes.append(len(x)) or logits(x))
    session = Session(runner, 40)
    session.add(1, prompts()[1], max_tokens=2, prompt_logprobs=0)
    session.run()
    assert max(sizes) == 7
    check(session, 1, 0, SPEC.vocab_size, "fp32")


# --------------------------------------------------------------------------- the scheduler


def outcome(
    scheduler: Scheduler, batch: ScheduledBatch | None, *, missing: int = 0
) -> tuple[list[Delta], list[WorkFailed]]:
    """What an executor says that scores prompts; ``missing`` of its entries are left out."""
    assert batch is not None
    sampled = []
    for row in batch.rows:
        seq = scheduler._sequences[row.id]
        scores = None
        if seq.prompt_logprobs is not None:
            end = min(row.start + row.num_tokens + 1, seq.num_prompt_tokens)
            targets = seq.token_ids[row.start + 1 : end]
            scores = [TokenLogprobs(id, -id, 1, []) for id in targets[missing:]]
        if row.sample or scores is not None:
            sampled.append(SampledRow(row.id, 7, prompt_logprobs=scores))
    result = scheduler.update(batch, sampled)
    scheduler.check_integrity()
    return result


def drain(scheduler: Scheduler) -> list[Delta]:
    deltas: list[Delta] = []
    while scheduler.has_work:
        more, failed = outcome(scheduler, scheduler.schedule())
        assert not failed
        deltas += more
    return deltas


def scored(deltas: list[Delta], id: int) -> list[list[int | None]]:
    """Token ids of each list of scores a sequence was given."""
    return [
        [entry and entry.token_id for entry in delta.prompt_logprobs]
        for delta in deltas
        if delta.id == id and delta.prompt_logprobs is not None
    ]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 40])
def test_they_come_once_and_whole_with_the_first_token(length: int) -> None:
    scheduler = make()
    prompt = list(range(100, 100 + length))
    scheduler.add(work(1, prompt, prompt_logprobs=0, max_tokens=3))
    deltas = [delta for delta in drain(scheduler) if delta.token_ids]
    assert scored(deltas, 1) == [[None, *prompt[1:]]]
    assert deltas[0].prompt_logprobs is not None
    assert len(deltas) == 3


def test_a_scored_prompt_reads_no_cached_block_but_leaves_its_own() -> None:
    scheduler = make()
    prompt = list(range(100, 140))
    scheduler.add(work(1, prompt, max_tokens=1))
    drain(scheduler)
    scheduler.add(work(2, prompt, prompt_logprobs=1, max_tokens=1))
    scheduler.add(work(3, prompt, prompt_logprobs=1, max_tokens=1))
    deltas = drain(scheduler)
    for id in (2, 3):
        assert scored(deltas, id) == [[None, *prompt[1:]]]
        assert next(d for d in deltas if d.id == id and d.token_ids).num_cached_tokens == 0
    stats = scheduler.stats(0.0)
    assert (stats.prefix_queries, stats.prefix_hits) == (40, 0)
    scheduler.reset_prefix_cache()
    scheduler.add(work(4, prompt, prompt_logprobs=1, max_tokens=1))
    drain(scheduler)
    scheduler.add(work(5, prompt, max_tokens=1))
    assert drain(scheduler)[-1].num_cached_tokens == 36


def test_others_follow_a_scored_prompt_and_it_follows_nobody() -> None:
    scheduler = make(num_blocks=200, max_num_batched_tokens=100)
    prompt = list(range(100, 140))
    for id, asked in ((1, None), (2, 0), (3, None)):
        scheduler.add(work(id, prompt, prompt_logprobs=asked, max_tokens=1))
    batch = scheduler.schedule()
    assert batch is not None
    assert {row.id: row.num_tokens for row in batch.rows} == {1: 40, 2: 40}
    outcome(scheduler, batch)
    assert drain(scheduler)[-1].num_cached_tokens == 36


def test_too_few_scores_fail_the_sequence_alone() -> None:
    scheduler = make()
    scheduler.add(work(1, 10, prompt_logprobs=0))
    scheduler.add(work(2, 4))
    deltas, failed = outcome(scheduler, scheduler.schedule(), missing=1)
    assert [(failure.id, failure.code) for failure in failed] == [(1, "internal")]
    assert "scored 8 of 9 prompt tokens" in failed[0].message
    assert [delta.id for delta in deltas] == [2]


@pytest.mark.parametrize("budget", [3, 64])
def test_preempted_before_its_first_token_it_is_scored_anew_and_after_it_not(budget: int) -> None:
    """With 3 tokens a step it is preempted in its prefill, with 64 as it decodes."""
    scheduler = make(num_blocks=12, max_num_batched_tokens=budget, max_model_len=40)
    scheduler.add(work(0, 4, max_tokens=36, ignore_eos=True))
    outcome(scheduler, scheduler.schedule())
    while not scheduler.stats(0.0).output_tokens:
        outcome(scheduler, scheduler.schedule())
    prompt = list(range(100, 130))
    scheduler.add(work(1, prompt, prompt_logprobs=0, max_tokens=10, ignore_eos=True))
    deltas: list[Delta] = []
    news = []
    for _ in itertools.count():
        batch = scheduler.schedule()
        if batch is None:
            break
        news += [new for new in batch.new if new.id == 1]
        deltas += outcome(scheduler, batch)[0]
    assert scheduler.stats(0.0).num_preemptions > 0
    assert scored(deltas, 1) == [[None, *prompt[1:]]]
    first, again = news[0], news[-1]
    assert first.prompt_logprobs == 0
    assert again.prompt_logprobs == (0 if budget == 3 else None)
    assert (len(again.token_ids) > len(prompt)) == (budget == 64)
