"""``load``: layers to one frozen ``Config``, or every fault in them at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
from attrs import frozen

from trioserve.config.checks import absolute, check_together
from trioserve.config.convert import toml_text, value_of
from trioserve.config.keys import SECTIONS, all_keys, find_key
from trioserve.config.layers import Layered, Origin, read_env, read_file, read_overrides
from trioserve.config.schema import Config
from trioserve.errors import ConfigError


@frozen
class LoadedConfig:
    """The configuration, and for each ``section.key`` where its value came from."""

    config: Config
    origins: Mapping[str, Origin]

    def value(self, dotted: str) -> Any:
        section, _, name = dotted.partition(".")
        return getattr(getattr(self.config, section), name)

    def non_defaults(self) -> dict[str, Any]:
        """The values that some layer gave, by ``section.key``; secrets as "***"."""
        return {
            dotted: "***" if (key := find_key(dotted)) and key.secret else self.value(dotted)
            for dotted, origin in self.origins.items()
            if origin.layer != "default"
        }

    def describe_non_defaults(self) -> str:
        """One line for the log: each value that some layer gave, and where it came from."""
        return ", ".join(
            f"{dotted}={'unset' if value is None else toml_text(value)} ({self.origins[dotted]})"
            for dotted, value in self.non_defaults().items()
        )


def load(
    path: Path | None,
    *,
    env: Mapping[str, str],
    overrides: Mapping[str, object],
    overrides_from: str = "--set",
) -> LoadedConfig:
    """The configuration of file, environment and overrides; an override beats a variable of
    ``env`` named ``TRIOSERVE_SECTION__KEY``, which beats the TOML file at ``path``, which beats the
    default.

    ``overrides`` maps ``section.key`` to a value, or to a text that is read by the key's type: a
    ``str``, or a ``Text`` that also names its flag; others are said to be ``overrides_from`` and
    their key. Relative paths in the file are relative to the
    file's directory, all others to the working directory; they come out absolute.

    Raises:
        ConfigError: with a line for every fault of every layer.
    """
    layers = [
        read_file(path) if path is not None else Layered(),
        read_env(env),
        read_overrides(overrides, overrides_from),
    ]
    problems = [problem for layer in layers for problem in layer.problems]
    values = {key.dotted: key.default for key in all_keys()}
    origins = {key.dotted: Origin("default") for key in all_keys()}
    for given in (given for layer in layers for given in layer.given):
        dotted = given.key.dotted
        try:
            value = absolute(given.key, value_of(given.key, given.raw), given.base)
        except ConfigError as error:
            problems.append(f"{given.origin}: key '{dotted}': {error}")
            values.pop(dotted, None)
        else:
            values[dotted] = value
            origins[dotted] = given.origin
    problems += check_together(values, origins)
    if problems:
        raise ConfigError(*problems)
    return LoadedConfig(_config(values), MappingProxyType(origins))


def _config(values: Mapping[str, Any]) -> Config:
    sections = {
        section: cls(**{a.name: values[f"{section}.{a.name}"] for a in attrs.fields(cls)})
        for section, cls in SECTIONS.items()
    }
    return Config(**sections)  # type: ignore[arg-type]  # each is of the class its field names
