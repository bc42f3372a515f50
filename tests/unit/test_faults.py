"""Faults on purpose: what can be written, and that nothing happens without being asked for."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import attrs
import pytest
import trio

from trioserve.config.schema import FAULTS_VARIABLE, Config, TestConfig
from trioserve.core import faults
from trioserve.core.batch import NewSequence, SampledRow, ScheduledBatch, ScheduledRow
from trioserve.engine.supervisor import as_config, open_engine, worker_environment
from trioserve.errors import ConfigError
from trioserve.ipc.messages import STAGES, Stage
from trioserve.sampling_params import SamplingParams


def config_with(*texts: str, **settings: Any) -> Config:
    return Config(test=TestConfig(allow_faults=True, faults=texts, **settings))


def test_what_is_written_is_what_is_meant() -> None:
    fault = faults.parse_fault("decode@3#2:exit:7")
    assert attrs.asdict(fault) == {
        "text": "decode@3#2:exit:7",
        "place": "decode",
        "kind": "exit",
        "argument": 7,
        "nth": 3,
        "incarnation": 2,
    }


def test_every_stage_is_a_place() -> None:
    for stage in STAGES:
        assert faults.parse_fault(f"{stage}:raise").place == stage


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("weights", "PLACE"),
        ("weights:", "PLACE"),
        ("nowhere:kill", "nowhere"),
        ("weights:explode", "explode"),
        ("weights:exit", "needs a number"),
        ("weights:exit:256", "255"),
        ("weights:kill:3", "takes no number"),
        ("weights@2:kill", "@N"),
        ("decode@0:kill", "PLACE"),
        ("weights:protocol", "weights"),
        ("hello:device-memory:3", "hello"),
        ("prefill:nan", "prefill"),
        ("fetch:exit:3", "raise, kill, signal"),
        ("fetch#2:raise", "#INCARNATION"),
    ],
)
def test_what_is_no_fault_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        faults.parse_fault(text)
    with pytest.raises(ConfigError, match=r"test\.faults"):
        as_config({"test": {"allow_faults": True, "faults": [text]}})


def test_refused_without_allow_faults() -> None:
    with pytest.raises(ConfigError, match="allow_faults"):
        as_config({"test": {"faults": ["weights:kill"]}})


async def test_refused_without_allow_faults_also_in_a_config_made_by_hand() -> None:
    with pytest.raises(ConfigError, match="allow_faults"):
        async with open_engine(Config(test=TestConfig(faults=("weights:kill",)))):
            raise AssertionError("opened")
    await trio.lowlevel.checkpoint()


def test_a_worker_gets_its_faults_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with("fetch:raise", "weights:kill", "decode#2:raise", mark_token_id=5)
    environment = worker_environment(faults.of_incarnation(config, 1))
    assert environment is not None
    assert json.loads(environment[FAULTS_VARIABLE]) == {
        "faults": ["weights:kill"],
        "mark_token_id": 5,
    }
    environment = worker_environment(faults.of_incarnation(config, 2))
    assert environment is not None
    assert json.loads(environment[FAULTS_VARIABLE])["faults"] == ["weights:kill", "decode#2:raise"]
    assert worker_environment(Config()) is None
    monkeypatch.setenv(FAULTS_VARIABLE, "whatever a caller's environment holds")
    environment = worker_environment(Config())
    assert environment == {k: v for k, v in os.environ.items() if k != FAULTS_VARIABLE}


def test_without_faults_the_worker_does_not_even_import_them() -> None:
    import subprocess

    code = "import sys, trioserve.core.__main__; print('trioserve.core.faults' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_stage_fires_as_it_starts_and_after_it_was_told() -> None:
    told: list[Stage] = []
    send = faults.Faults([faults.parse_fault("weights:raise")]).watch_stages(told.append)
    send(Stage("device", "start"))
    with pytest.raises(RuntimeError, match="weights:raise"):
        send(Stage("weights", "start"))
    send(Stage("weights", "progress", 0.5))
    assert [stage.name for stage in told] == ["device", "weights", "weights"]


def test_memory_is_refused_at_our_own_limit_and_the_limit_goes_away() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError):
        faults.allocate_until_refused()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


# -------------------------------------------------------------------------------- executor


class Inner:
    """Records what reaches it, and samples token 1 for each row."""

    weight_bytes = 17

    def __init__(self) -> None:
        self.executed: list[ScheduledBatch] = []

    def execute(self, batch: ScheduledBatch) -> list[int]:
        self.executed.append(batch)
        return [row.id for row in batch.rows if row.sample]

    def sample(self, handle: list[int], masks: Any = None) -> list[SampledRow]:
        return [SampledRow(id, 1) for id in handle]


def batch(*rows: tuple[int, int, int], new: dict[int, list[int]] | None = None) -> ScheduledBatch:
    """Rows as (id, start, tokens)."""
    entering = [
        NewSequence(id, prompt, len(prompt), 0, [0], SamplingParams(), 0)
        for id, prompt in (new or {}).items()
    ]
    return ScheduledBatch(
        1, [], entering, [ScheduledRow(id, start, num, [], True) for id, start, num in rows]
    )


def wrapped(*texts: str, mark_token_id: int | None = 9) -> tuple[Any, Inner]:
    inner: Any = Inner()
    found = [faults.parse_fault(text) for text in texts]
    return faults.Faults(found, mark_token_id).wrap(inner), inner


def test_a_fault_hits_the_marked_sequence_at_its_own_step_again_and_again() -> None:
    executor, inner = wrapped("decode@2:raise")
    assert executor.weight_bytes == 17
    executor.sample(executor.execute(batch((1, 0, 2), (2, 0, 2), new={1: [9, 4], 2: [8, 4]})))
    executor.sample(executor.execute(batch((1, 2, 1), (2, 2, 1))))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="decode@2"):
            executor.execute(batch((1, 3, 1), (2, 3, 1)))
    executor.execute(batch((2, 3, 1)))
    executor.execute(batch((1, 4, 1)))
    assert len(inner.executed) == 4


@pytest.mark.parametrize(("place", "reached"), [("prefill", 0), ("sample", 1)])
def test_prefill_fires_before_the_pass_and_sample_after_it(place: str, reached: int) -> None:
    executor, inner = wrapped(f"{place}:raise")
    with pytest.raises(RuntimeError):
        executor.sample(executor.execute(batch((1, 0, 2), new={1: [9, 4]})))
    assert len(inner.executed) == reached


def test_the_self_test_is_never_marked() -> None:
    executor, _ = wrapped("prefill:raise", mark_token_id=None)
    executor.execute(batch((-1, 0, 2), new={-1: [9, 4]}))
    with pytest.raises(RuntimeError):
        executor.execute(batch((1, 0, 2), new={1: [3, 4]}))


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_bad_logits_fail_the_marked_row_of_a_device_without_logits(kind: str) -> None:
    executor, _ = wrapped(f"sample:{kind}")
    rows = executor.sample(
        executor.execute(batch((1, 0, 2), (2, 0, 2), new={1: [9, 4], 2: [8, 4]}))
    )
    assert [row.error is None for row in rows] == [False, True]
    assert kind in rows[0].error
