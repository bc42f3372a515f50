"""The worker's loop against a channel in memory: what one sequence's fault may touch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from trioserve.config.schema import CacheConfig, Config, DeviceConfig
from trioserve.core.engine_core import EngineCore
from trioserve.core.faults import Faults, parse_fault
from trioserve.core.scheduler import Scheduler
from trioserve.core.stages import StageReporter
from trioserve.devices.simulated import SimulatedExecutor
from trioserve.ipc.child import Channel, Inbox
from trioserve.ipc.messages import (
    Abort,
    Check,
    Checked,
    Command,
    Control,
    Controlled,
    Delta,
    Event,
    Exit,
    Ready,
    StepOutput,
    Work,
    WorkFailed,
)
from trioserve.ipc.status_page import PAUSED, StatusReader, StatusWriter, create_page
from trioserve.models.spec import ModelSpec, ResolvedModel
from trioserve.sampling_params import SamplingParams

MARK = 7


@pytest.fixture
def status() -> Iterator[StatusWriter]:
    page = create_page()
    writer = StatusWriter(page)
    os.close(page)
    yield writer
    writer.close()


MODEL = ResolvedModel(
    name="simulated",
    source="none",
    format="random",
    spec=ModelSpec(
        architecture="llama",
        num_layers=1,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        vocab_size=300,
        max_position=512,
    ),
    tokenizer_path="none",
)


class Script(Inbox):
    """Commands that are all there from the start; once there is nothing more to do, Exit."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []

    def get(self, timeout_s: float | None = None) -> Command | None:
        return self.commands.pop(0) if self.commands else Exit()

    def drain(self) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands


class Paced(Script):
    """Commands one at a time: one for each step, or None for a step without."""

    def __init__(self) -> None:
        super().__init__()
        self.paced: list[Command | None] = []

    def get(self, timeout_s: float | None = None) -> Command | None:
        while self.paced:
            command = self.paced.pop(0)
            if command is not None:
                return command
        return Exit()

    def drain(self) -> list[Command]:
        command = self.paced.pop(0) if self.paced else None
        return [] if command is None else [command]


class Loop:
    """An EngineCore that is fed a list of commands and then told to leave."""

    def __init__(self, status: StatusWriter, *faults: str, inbox: Script | None = None) -> None:
        self.events: list[Event] = []
        config = Config(device=DeviceConfig(kind="simulated"), cache=CacheConfig(memory="1MiB"))
        executor: Any = SimulatedExecutor(MODEL, config)
        if faults:
            executor = Faults([parse_fault(text) for text in faults], MARK).wrap(executor)
        self.inbox = inbox or Script()
        channel = Channel(self.inbox, self.events.append, status)
        self.core = EngineCore(config, MODEL, executor, channel, StageReporter(lambda stage: None))
        self.core.start()
        assert isinstance(self.events.pop(), Ready)

    def run(self, *commands: Command) -> None:
        self.inbox.commands += commands
        self.core.run()

    def text_of(self, id: int) -> list[int]:
        return [token_id for delta in self.deltas(id) for token_id in delta.token_ids]

    def deltas(self, id: int) -> list[Delta]:
        steps = [event for event in self.events if isinstance(event, StepOutput)]
        return [delta for step in steps for delta in step.deltas if delta.id == id]

    def failures(self) -> dict[int, str]:
        return {e.id: e.code for e in self.events if isinstance(e, WorkFailed)}


def work(id: int, first: int) -> Work:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return Work(id, [first, *range(100, 140)], sampling, seed=0)


WORKS = [work(1, 11), work(2, MARK), work(3, 12)]


@pytest.mark.parametrize("place", ["prefill", "decode@3", "sample@1", "sample@5"])
@pytest.mark.parametrize("kind", ["raise", "memory", "nan", "inf"])
def test_sd_04_a_fault_fails_one_sequence_and_the_others_go_on_unchanged(
    status: StatusWriter, place: str, kind: str
) -> None:
    if kind in ("nan", "inf") and not place.startswith("sample"):
        place = place.replace("prefill", "sample@1").replace("decode@3", "sample@3")
    whole, broken = Loop(status), Loop(status, f"{place}:{kind}")
    for loop in (whole, broken):
        loop.run(*WORKS)
    assert whole.failures() == {}
    assert broken.failures() == {2: "internal"}
    for id in (1, 3):
        assert broken.text_of(id) == whole.text_of(id)
        assert [d.finish_reason for d in broken.deltas(id)].count("length") == 1
    assert not [d for d in broken.deltas(2) if d.finish_reason]
    assert whole.text_of(2)[: len(broken.text_of(2))] == broken.text_of(2)
    broken.run(Check(1))
    checked = broken.events[-1]
    assert isinstance(checked, Checked)
    assert (checked.fault, checked.num_sequences, checked.stats.num_blocks_used) == ("", 0, 0)


@pytest.mark.parametrize("half_way", [False, True])
def test_sd_04_b_a_fault_at_admission_fails_one_sequence(
    status: StatusWriter, monkeypatch: pytest.MonkeyPatch, half_way: bool
) -> None:
    add = Scheduler.add

    def broken_add(self: Scheduler, work: Work) -> None:
        if work.prompt_token_ids[0] != MARK or half_way:
            add(self, work)
        if work.prompt_token_ids[0] == MARK:
            raise RuntimeError("cannot admit this")

    whole, broken = Loop(status), Loop(status)
    whole.run(*WORKS)
    monkeypatch.setattr(Scheduler, "add", broken_add)
    broken.run(*WORKS, Check(1))
    assert broken.failures() == {2: "internal"}
    assert [broken.text_of(id) for id in (1, 3)] == [whole.text_of(id) for id in (1, 3)]
    assert broken.deltas(2) == []
    broken.run(Check(1))
    checked = broken.events[-1]
    assert isinstance(checked, Checked)
    assert (checked.fault, checked.num_sequences, checked.stats.num_blocks_used) == ("", 0, 0)


def test_sd_04_blocks_of_a_failed_sequence_are_not_found_again(status: StatusWriter) -> None:
    loop = Loop(status, "decode@3:raise")
    loop.run(*WORKS)
    loop.run(work(4, 11), work(5, MARK))
    assert loop.deltas(4)[0].num_cached_tokens == 32
    assert loop.deltas(5)[0].num_cached_tokens == 0


def test_a_sequence_with_bad_tokens_is_the_requests_own_fault(status: StatusWriter) -> None:
    loop = Loop(status)
    loop.run(Work(1, [], SamplingParams(), seed=0), work(2, 11))
    assert loop.failures() == {1: "invalid"}
    assert len(loop.text_of(2)) == 12


def controlled(loop: Loop) -> dict[int, bool]:
    return {e.token: e.ok for e in loop.events if isinstance(e, Controlled)}


def test_a_paused_worker_computes_nothing_answers_aborts_and_goes_on_unchanged(
    status: StatusWriter,
) -> None:
    whole, paced = Loop(status), Paced()
    whole.run(*WORKS)
    loop = Loop(status, inbox=paced)
    pause = [Control(1, "pause"), Check(2), WORKS[2], work(4, 13), Abort([2]), Abort([4]), Check(3)]
    paced.paced = [WORKS[0], WORKS[1], None, None, *pause, Control(4, "resume")]
    loop.core.run()
    assert controlled(loop) == {1: True, 4: True}
    at = [loop.events.index(e) for e in loop.events if isinstance(e, Controlled)]
    between = loop.events[at[0] : at[1]]
    assert [d.id for e in between if isinstance(e, StepOutput) for d in e.deltas] == [2, 4]
    first, last = (e.stats for e in between if isinstance(e, Checked))
    assert (first.num_running, last.num_running) == (2, 1)
    assert (first.output_tokens, first.prompt_tokens) == (last.output_tokens, last.prompt_tokens)
    # Who waits is told though no step is made.
    waiting = [e.stats.num_waiting for e in between if isinstance(e, StepOutput)]
    assert max(waiting) == 2
    for id in (1, 3):
        assert loop.text_of(id) == whole.text_of(id)
    assert [loop.deltas(id)[-1].finish_reason for id in (2, 4)] == ["abort", "abort"]


def test_a_paused_worker_says_so_on_its_page_and_leaves_when_told() -> None:
    page = create_page()
    writer, reader = StatusWriter(page), StatusReader(page)
    os.close(page)
    seen: list[str] = []

    class Looking(Paced):
        def get(self, timeout_s: float | None = None) -> Command | None:
            seen.append(reader.read().operation)
            return super().get()

    paced = Looking()
    loop = Loop(writer, inbox=paced)
    paced.paced = [Control(1, "pause"), None, WORKS[0], None, Control(2, "resume"), None, None]
    loop.core.run()
    assert (seen[0], seen[1]) == ("", PAUSED)
    assert seen[-1] == ""
    assert len(loop.text_of(1)) == 12
    paced.paced = [Control(1, "pause"), None, WORKS[1]]
    loop.core.run()  # Exit ends it, paused as it is
    assert loop.text_of(2) == []
    writer.close()
    reader.close()


def test_a_reset_forgets_what_nobody_uses_and_says_whether_that_was_all(
    status: StatusWriter,
) -> None:
    paced = Paced()
    loop = Loop(status, inbox=paced)
    reset = Control(1, "reset_prefix_cache")
    paced.paced = [work(1, 11), *[None] * 20]
    loop.core.run()
    paced.paced = [work(2, 11), None, None, reset, *[None] * 20]
    loop.core.run()
    assert controlled(loop) == {1: False}  # two blocks of the prompt are read by sequence 2
    assert loop.deltas(2)[0].num_cached_tokens == 32
    paced.paced = [work(3, 11), None, None, *[None] * 20, Control(2, "reset_prefix_cache"), None]
    loop.core.run()
    assert loop.deltas(3)[0].num_cached_tokens == 32  # kept
    assert controlled(loop)[2]
    paced.paced = [work(4, 11), *[None] * 20, Control(3, "dance")]
    loop.core.run()
    assert loop.deltas(4)[0].num_cached_tokens == 0
    assert not controlled(loop)[3]
