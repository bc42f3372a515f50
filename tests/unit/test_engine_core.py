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
    Check,
    Checked,
    Command,
    Delta,
    Event,
    Exit,
    Ready,
    StepOutput,
    Work,
    WorkFailed,
)
from trioserve.ipc.status_page import StatusWriter, create_page
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


class Loop:
    """An EngineCore that is fed a list of commands and then told to leave."""

    def __init__(self, status: StatusWriter, *faults: str) -> None:
        self.events: list[Event] = []
        config = Config(device=DeviceConfig(kind="simulated"), cache=CacheConfig(memory="1MiB"))
        executor: Any = SimulatedExecutor(MODEL, config)
        if faults:
            executor = Faults([parse_fault(text) for text in faults], MARK).wrap(executor)
        self.inbox = Script()
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
