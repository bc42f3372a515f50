"""trioserve: a server for large language models in one trio nursery tree.

``async with trioserve.open_engine(config) as engine`` serves a model inside a trio program;
``trioserve run model.toml`` serves it over HTTP. Names are imported when first used, so that
``import trioserve`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.config.schema import Config
    from trioserve.engine.api import (
        EngineStatus,
        GenerationDefaults,
        Phase,
        TextDelta,
        Timings,
        TokenLogprob,
        Usage,
    )
    from trioserve.engine.engine import Engine
    from trioserve.engine.requests import RequestStream
    from trioserve.engine.supervisor import open_engine
    from trioserve.errors import TrioserveError
    from trioserve.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Config": "config.schema",
    "Engine": "engine.engine",
    "EngineStatus": "engine.api",
    "GenerationDefaults": "engine.api",
    "Phase": "engine.api",
    "RequestStream": "engine.requests",
    "SamplingParams": "sampling_params",
    "TextDelta": "engine.api",
    "Timings": "engine.api",
    "TokenLogprob": "engine.api",
    "TrioserveError": "errors",
    "Usage": "engine.api",
    "open_engine": "engine.supervisor",
}

__all__ = [
    "Config",
    "Engine",
    "EngineStatus",
    "GenerationDefaults",
    "Phase",
    "RequestStream",
    "SamplingParams",
    "TextDelta",
    "Timings",
    "TokenLogprob",
    "TrioserveError",
    "Usage",
    "__version__",
    "open_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trioserve' has no attribute {name!r}")
    return getattr(import_module(f"trioserve.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
