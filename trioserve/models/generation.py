"""What a model's publisher recommends for sampling: ``generation_config.json``, or GGUF's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trioserve.errors import InvalidRequest
from trioserve.sampling_params import SamplingParams

CONFIG_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
"""Field here → name in ``generation_config.json``."""

GGUF_NAMES = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Field here → key of GGUF metadata."""


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Sampling defaults of a model; None leaves the field to the API's own default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """The fields that are set."""
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value is not None}

    def as_sampling(self) -> SamplingParams:
        """The parameters of a request that says nothing."""
        return SamplingParams(**self.given())

    def __str__(self) -> str:
        """For people: ``temperature 0.6, top_p 0.95``."""
        return ", ".join(f"{name} {value}" for name, value in self.given().items())


def read_defaults(
    values: Mapping[str, Any], names: Mapping[str, str], where: str, vocab_size: int
) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Defaults out of what a checkpoint says, and one line for each value that is unusable.

    An unusable value is passed over: a recommendation is no reason to refuse a model. ``do_sample``
    does not matter: it is about the defaults of the library that wrote the file.

    Args:
        values: the file's object, or metadata.
        names: CONFIG_NAMES or GGUF_NAMES.
        where: the file, for the lines.
        vocab_size: of the model.
    """
    found: dict[str, Any] = {}
    warnings = []
    for field, name in names.items():
        value = values.get(name)
        if value is None:
            continue
        try:
            value = _tidy(value, whole=field in ("top_k", "max_tokens"))
            SamplingParams(**{field: value}).validate(vocab_size)
        except InvalidRequest as error:
            what = "" if name == field else f" ({name})"
            warnings.append(f"{where}: {_short(error.message)}{what}; the default is ignored")
        else:
            found[field] = value
    return GenerationDefaults(**found), tuple(warnings)


def _tidy(value: Any, *, whole: bool) -> Any:
    """A number as its field wants it; anything else as it is, to be refused."""
    if type(value) is not float:
        return value
    if whole:
        return int(value) if value.is_integer() else value
    return float(f"{value:.7g}")  # GGUF keeps 32 bits: 0.9 for 0.8999999761581421


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
