"""The configuration: schema, layers, suggestions. ``load`` makes it, nothing edits it later.

The names below are imported when they are asked for: the worker needs the schema alone, and none
of what reads files and suggests keys.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.config.layers import Origin, Text
    from trioserve.config.loading import LoadedConfig, load
    from trioserve.config.render import to_toml
    from trioserve.config.schema import Config
    from trioserve.config.sizes import parse_size

__all__ = ["Config", "LoadedConfig", "Origin", "Text", "load", "parse_size", "to_toml"]

MODULE_OF = {
    "Config": "schema",
    "LoadedConfig": "loading",
    "Origin": "layers",
    "Text": "layers",
    "load": "loading",
    "parse_size": "sizes",
    "to_toml": "render",
}


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULE_OF[name]}"), name)
