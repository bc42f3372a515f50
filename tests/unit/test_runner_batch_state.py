"""The arrays of a step, against what they mean."""

from __future__ import annotations

import pytest

from trioserve.core.batch import NewSequence, ScheduledRow
from trioserve.core.batch_state import BatchState
from trioserve.sampling_params import SamplingParams


def new(id: int, num_tokens: int, block_ids: list[int], computed: int = 0) -> NewSequence:
    return NewSequence(
        id=id,
        token_ids=[100 * id + i for i in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        block_ids=block_ids,
        sampling=SamplingParams(),
        seed=0,
    )


def row(id: int, start: int, count: int, sample: bool = False) -> ScheduledRow:
    return ScheduledRow(id, start, count, [], sample)


@pytest.fixture
def state() -> BatchState:
    return BatchState(max_sequences=2, max_model_len=40, max_tokens=8, block_size=8)


def test_decode_rows(state: BatchState) -> None:
    state.add(new(1, 9, [5, 3]))
    state.add(new(2, 3, [7]))
    step = state.make_step([row(2, 2, 1, True), row(1, 8, 1, True)])
    assert step.token_ids.tolist() == [202, 108]
    assert step.context.positions.tolist() == [2, 8]
    assert step.context.slots.tolist() == [7 * 8 + 2, 3 * 8]
    assert step.context.query_starts.tolist() == [0, 1, 2]
    assert step.context.row_starts.tolist() == [2, 8]
    tables = step.context.block_tables[step.context.row_tables]
    assert tables[0, 0] == 7
    assert tables[1, :2].tolist() == [5, 3]
    assert step.logits_rows.tolist() == [0, 1]
    assert (step.sampled_ids, step.sampled_positions) == ([2, 1], [3, 9])


def test_mixed_rows_and_chunks(state: BatchState) -> None:
    state.add(new(1, 20, [0, 4, 2]))
    state.add(new(2, 5, [9]))
    step = state.make_step([row(2, 4, 1, True), row(1, 6, 5)])
    assert step.token_ids.tolist() == [204, 106, 107, 108, 109, 110]
    assert step.context.slots.tolist() == [76, 6, 7, 32, 33, 34]
    assert step.logits_rows.tolist() == [0]
    assert step.sampled_ids == [2]
    nothing = state.make_step([row(1, 0, 3)])
    assert nothing.logits_rows.tolist() == []


def test_sampled_tokens_come_back(state: BatchState) -> None:
    state.add(new(1, 8, [1]))
    state.set_tokens([1], [8], [555])
    state.add_blocks(1, [6])
    step = state.make_step([row(1, 8, 1, True)])
    assert step.token_ids.tolist() == [555]
    assert step.context.slots.tolist() == [48]


def test_a_row_tried_again_takes_its_blocks_once(state: BatchState) -> None:
    state.add(new(1, 8, [1]))
    state.add_blocks(1, [6])
    state.add_blocks(1, [6])
    state.set_tokens([1], [8], [1])
    with pytest.raises(ValueError, match="sequence 1 reaches past its blocks"):
        state.make_step([row(1, 16, 1)])
    state.add_blocks(1, [3])
    assert state.make_step([row(1, 16, 1)]).context.slots.tolist() == [24]


def test_a_sequence_that_returns_starts_over(state: BatchState) -> None:
    state.add(new(1, 17, [1, 2, 3]))
    state.remove(1)
    state.remove(1)
    assert 1 not in state
    state.add(new(1, 5, [4]))
    assert state.make_step([row(1, 0, 5)]).context.slots.tolist() == [32, 33, 34, 35, 36]
    assert len(state) == 1


def test_more_sequences_and_tokens_than_it_was_made_for(state: BatchState) -> None:
    for id in range(1, 12):
        state.add(new(id, 10, [id, id + 20]))
    step = state.make_step([row(id, 0, 10, True) for id in range(1, 12)])
    assert step.token_ids.tolist() == [100 * id + i for id in range(1, 12) for i in range(10)]
    assert step.context.slots.tolist()[-1] == 31 * 8 + 1
    assert step.logits_rows.tolist() == list(range(9, 110, 10))


def test_what_does_not_fit_is_refused(state: BatchState) -> None:
    with pytest.raises(ValueError, match="41 tokens"):
        state.add(new(1, 41, [0]))
    with pytest.raises(ValueError, match="6 blocks"):
        state.add(new(1, 4, [0, 1, 2, 3, 4, 5]))
    assert 1 not in state
    with pytest.raises(KeyError):
        state.make_step([row(1, 0, 1)])


def test_the_last_token_of_the_longest_sequence_has_a_place(state: BatchState) -> None:
    state.add(new(1, 40, [0, 1, 2, 3, 4]))
    state.set_tokens([1], [40], [9])


def test_a_step_of_the_same_shape_sees_what_has_changed(state: BatchState) -> None:
    state.add(new(1, 8, [1, 2]))
    state.add(new(2, 9, [3, 4]))
    both = [row(1, 7, 1, True), row(2, 8, 1, True)]
    assert state.make_step(both).token_ids.tolist() == [107, 208]
    state.set_tokens([1, 2], [8, 9], [70, 80])
    more = [row(1, 8, 1, True), row(2, 9, 1, True)]
    step = state.make_step(more)
    assert step.token_ids.tolist() == [70, 80]
    assert step.context.slots.tolist() == [16, 33]
    chunk = state.make_step([row(1, 0, 2)])  # in the same buffers
    assert chunk.context.query_starts.tolist() == [0, 2]
    assert state.make_step(more).context.query_starts.tolist() == [0, 1, 2]
    state.remove(2)
    state.add(new(3, 4, [6]))
    state.add(new(2, 9, [5, 7]))  # under the same id, on another line
    step = state.make_step([row(1, 8, 1, True), row(2, 8, 1, True)])
    assert step.token_ids.tolist() == [70, 208]
    assert step.context.slots.tolist() == [16, 56]
    with pytest.raises(KeyError):
        state.make_step([row(1, 8, 1), row(9, 0, 1)])
    assert state.make_step(more[:1]).token_ids.tolist() == [70]
