"""The parent's stages before a worker exists: resolve → fetch → inspect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import trio

from trioserve.config.schema import ModelConfig
from trioserve.core.stages import RunningStage, StageReporter
from trioserve.ipc.messages import Stage
from trioserve.models.cache import cache_root
from trioserve.models.inspect import inspect, with_tokenizer
from trioserve.models.source import fetch, parse_source
from trioserve.models.spec import ResolvedModel
from trioserve.text.convert import ensure_tokenizer

Report = Callable[[Stage], None]


async def resolve_model(config: ModelConfig, *, report: Report) -> ResolvedModel:
    """Find, fetch and inspect the configured model; a stage that fails has a start and no end.

    ``report`` is called in this task only. Cancellation ends the children (pip, the hub's download,
    the tokenizer's conversion); the cache then holds whole files or none.

    Raises:
        ModelError: the model cannot be had or used; the stage last started is the one that failed.
    """
    stages = StageReporter(report, trio.current_time)
    with stages.stage("resolve", config.source):
        source = parse_source(config.source)

    with stages.stage("fetch", source.name) as stage:

        def progress(fraction: float | None, detail: str, num_bytes: int | None) -> None:
            stage.progress(fraction, detail=detail, num_bytes=num_bytes)

        found = await fetch(
            source, cache_dir=config.cache_dir, hf_token=config.hf_token, progress=progress
        )
        stage.detail = str(found) if isinstance(found, Path) else source.name

    with stages.stage("inspect", stage.detail) as stage:
        # Abandoned where the file system does not answer: its thread holds nobody up.
        model = await trio.to_thread.run_sync(inspect, found, config, abandon_on_cancel=True)
        model = await _with_tokenizer_json(model, config, stage)
        stage.detail, stage.num_bytes = describe(model), model.weight_bytes
    return model


async def _with_tokenizer_json(
    model: ResolvedModel, config: ModelConfig, stage: RunningStage
) -> ResolvedModel:
    """The model with a tokenizer.json, made now where the checkpoint has none."""
    source = Path(model.tokenizer_path)
    from_gguf = model.format == "gguf" and config.tokenizer is None
    if not from_gguf and source.suffix != ".model":
        return model

    def making() -> None:
        stage.progress(detail=f"making tokenizer.json from {source.name}")

    made = await ensure_tokenizer(source, cache_root(config.cache_dir), making)
    if from_gguf:  # made from the very vocabulary that the spec counts
        return attrs.evolve(model, tokenizer_path=str(made))
    return await trio.to_thread.run_sync(with_tokenizer, model, made, abandon_on_cancel=True)


def describe(model: ResolvedModel) -> str:
    """The model in a few words, for people."""
    spec = model.spec
    return (
        f"{spec.architecture}, {spec.num_layers} layers, {spec.max_position} positions, "
        f"{model.format}"
    )
