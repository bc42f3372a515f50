"""Sampling defaults that a model comes with."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest

from trioserve.config.schema import ModelConfig
from trioserve.engine.api import GenerationDefaults
from trioserve.models.inspect import inspect
from trioserve.models.spec import ResolvedModel
from trioserve.sampling_params import SamplingParams

from .test_gguf import write_gguf


def look(path: Path, **settings: Any) -> ResolvedModel:
    return inspect(path, ModelConfig(source=str(path), **settings))


def write(checkpoint: Path, **values: Any) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(values))


USUAL = {
    "do_sample": True,
    "eos_token_id": [2, 7],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "transformers_version": "4.51.0",
}
DEFAULTS = GenerationDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05, max_tokens=2048
)


def test_the_files_defaults_are_taken_and_said_in_one_line(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(checkpoint, **USUAL)
    with caplog.at_level(logging.INFO):
        model = look(checkpoint)
    assert model.generation == DEFAULTS
    assert model.spec.eos_token_ids == (2, 7)
    (line,) = [record.message for record in caplog.records]
    assert "temperature 0.6, top_k 20, top_p 0.95" in line
    assert "max_tokens 2048" in line
    # It goes to the worker with the rest.
    assert msgspec.convert(msgspec.to_builtins(model), ResolvedModel) == model


def test_they_can_be_turned_off_but_end_tokens_stay(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(checkpoint, **USUAL)
    with caplog.at_level(logging.INFO):
        model = look(checkpoint, generation_config="none")
    assert model.generation == GenerationDefaults()
    assert model.spec.eos_token_ids == (2, 7)
    (line,) = [record.message for record in caplog.records]
    assert 'model.generation_config = "none"' in line


def test_without_a_file_nothing_is_said(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert look(checkpoint).generation == GenerationDefaults()
        write(checkpoint, eos_token_id=2, temperature=None)
        assert look(checkpoint).generation == GenerationDefaults()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", True),
        ("temperature", 10**400),
        ("temperature", ["x" * 1000]),
        ("top_k", 20.5),
        ("top_k", -7),
        ("top_p", 1.5),
        ("max_new_tokens", 0),
        ("max_new_tokens", {}),
    ],
)
def test_an_unusable_value_is_ignored_with_a_line(checkpoint: Path, name: str, value: Any) -> None:
    write(checkpoint, **{"top_p": 0.9, "min_p": 0.1, name: value})
    model = look(checkpoint)
    expected = {"top_p": 0.9, "min_p": 0.1}
    expected.pop(name, None)
    assert model.generation == GenerationDefaults(**expected)
    (line,) = model.warnings
    assert "generation_config.json: " in line
    assert name in line
    assert line.endswith("the default is ignored")
    assert len(line) < 300 + len(str(checkpoint))


def test_whole_numbers_may_be_written_as_floats(checkpoint: Path) -> None:
    write(checkpoint, top_k=20.0, max_new_tokens=100.0, temperature=1)
    generation = look(checkpoint).generation
    assert generation == GenerationDefaults(top_k=20, max_tokens=100, temperature=1.0)
    assert generation.as_sampling() == SamplingParams(top_k=20, max_tokens=100, temperature=1.0)
    assert type(generation.top_k) is int


def test_gguf_metadata_carries_them_as_well(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 40)
        writer.add_float32("general.sampling.top_p", 7.0)
        writer.add_float32("general.sampling.penalty_repeat", 1.1)

    model = look(write_gguf(tmp_path / "tiny.gguf", more=more))
    expected = GenerationDefaults(temperature=0.7, top_k=40, repetition_penalty=1.1)
    assert model.generation == expected
    assert any("top_p" in line and "tiny.gguf" in line for line in model.warnings)
