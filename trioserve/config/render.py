"""The effective configuration as TOML."""

from __future__ import annotations

from trioserve.config.convert import toml_text
from trioserve.config.keys import KEYS, Key
from trioserve.config.loading import LoadedConfig


def to_toml(loaded: LoadedConfig) -> str:
    """The whole configuration as TOML, each value with where it came from.

    Loads back to the same configuration, but for secrets: those are shown as a comment with
    "***". Keys that are unset, which TOML cannot say, are comments too.
    """
    sections = []
    for section, keys in KEYS.items():
        lines = [_line(loaded, key) for key in keys.values()]
        sections.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _line(loaded: LoadedConfig, key: Key) -> str:
    value = loaded.value(key.dotted)
    origin = "".join(c if c.isprintable() else "?" for c in str(loaded.origins[key.dotted]))
    if value is None:
        return f"# {key.name} is not set  # {origin}"
    if key.secret:
        return f'# {key.name} = "***"  # {origin}'
    return f"{key.name} = {toml_text(value)}  # {origin}"
