"""The layers a configuration comes from: what each of them gives, and what is wrong with it."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from trioserve.config.convert import raw_of_text
from trioserve.config.keys import (
    KEYS,
    Key,
    all_keys,
    find_key,
    unknown_key,
    unknown_section,
    unknown_variable,
)
from trioserve.config.locate import locate_keys
from trioserve.errors import ConfigError

Layer = Literal["default", "file", "env", "flag"]
LAYERS: tuple[Layer, ...] = ("default", "file", "env", "flag")
MAX_FILE_BYTES = 1024 * 1024
# Variables that belong to scripts/ or to `trioserve top`, not to a section.
FOREIGN_VARIABLES = frozenset({"TRIOSERVE_API_KEY", "TRIOSERVE_PYTHON", "TRIOSERVE_VENV"})
# What Kubernetes puts into every container of a name space with a service named "trioserve".
SERVICE_LINK = re.compile(
    r"TRIOSERVE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)\w*)"
)
TOML_PLACE = re.compile(r"(?P<what>.*) \(at line (?P<line>\d+), column (?P<column>\d+)\)")


@frozen
class Origin:
    """Where a value came from: its layer, and ``file:line``, variable or flag."""

    layer: Layer
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.layer

    def __lt__(self, other: Origin) -> bool:
        return LAYERS.index(self.layer) < LAYERS.index(other.layer)


@frozen
class Text:
    """An override that came as text, read by the type of its key; ``where`` names the flag."""

    text: str
    where: str


@frozen
class Given:
    """One value of one layer."""

    key: Key
    raw: object  # a TOML value, or None for "unset"
    origin: Origin
    base: Path  # what a relative path is relative to


@frozen
class Layered:
    """What the layers gave, weakest first, and one line for each fault in them."""

    given: list[Given] = field(factory=list)
    problems: list[str] = field(factory=list)


def read_file(path: Path) -> Layered:
    """The values of the TOML file at ``path``; never raises for what is wrong with it."""
    try:
        text = _read_text(path)
        document = _parse(path, text)
    except ConfigError as error:
        return Layered([], list(error.problems))
    lines: dict[tuple[str | int, ...], int] = {}
    for place, line in locate_keys(text):
        lines.setdefault(place, line)
    base = path.absolute().parent if path.is_file() else Path.cwd()

    layered = Layered()
    for section, table in document.items():
        where = f"{path}:{lines.get((section,), 1)}"
        if section not in KEYS:
            is_table = isinstance(table, dict)
            fault = unknown_section(section) if is_table else unknown_key(section)
            layered.problems.append(f"{where}: {fault}")
        elif not isinstance(table, dict):
            layered.problems.append(f"{where}: section [{section}]: must be one table of keys")
        else:
            for name, raw in table.items():
                origin = Origin("file", f"{path}:{lines.get((section, name), 1)}")
                if key := KEYS[section].get(name):
                    layered.given.append(Given(key, raw, origin, base))
                else:
                    fault = unknown_key(f"{section}.{name}")
                    layered.problems.append(f"{origin}: {fault}")
    return layered


def read_env(env: Mapping[str, str]) -> Layered:
    """The values of the ``TRIOSERVE_SECTION__KEY`` variables of ``env``."""
    keys = {key.env_name: key for key in all_keys()}
    layered = Layered()
    for variable, text in sorted(env.items()):
        if not variable.upper().startswith("TRIOSERVE_") or _is_foreign(variable, text):
            continue
        section, _, name = variable.removeprefix("TRIOSERVE_").partition("__")
        if key := keys.get(variable):
            raw = raw_of_text(key, text)
            layered.given.append(Given(key, raw, Origin("env", variable), Path.cwd()))
        elif variable.isupper() and section.lower() in KEYS and name:
            fault = unknown_key(f"{section}.{name}".lower())
            layered.problems.append(f"{variable}: {fault}")
        else:
            layered.problems.append(unknown_variable(variable))
    return layered


def read_overrides(overrides: Mapping[str, object], whence: str = "--set") -> Layered:
    """The values given by flags, or by a program as ``section.key`` → text or value."""
    layered = Layered()
    for dotted, value in overrides.items():
        origin = Origin("flag", value.where if isinstance(value, Text) else f"{whence} {dotted}")
        key = find_key(dotted)
        if key is None:
            layered.problems.append(f"{origin}: {unknown_key(dotted)}")
            continue
        text = value.text if isinstance(value, Text) else value
        raw = raw_of_text(key, text) if isinstance(text, str) else value
        layered.given.append(Given(key, raw, origin, Path.cwd()))
    return layered


def _is_foreign(variable: str, text: str) -> bool:
    if variable == "TRIOSERVE_PORT":
        return "://" in text
    return variable in FOREIGN_VARIABLES or SERVICE_LINK.fullmatch(variable) is not None


def _read_text(path: Path) -> str:
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise ConfigError(
                f"{path}: is a directory, not a configuration file; to serve a model from it use "
                f"--model {path}"
            )
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_source_hint(path)}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: over 1 MiB, so no configuration file{_source_hint(path)}")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text{_source_hint(path)}") from None


def _source_hint(path: Path) -> str:
    looks_like_source = path.suffix in (".gguf", ".safetensors") or re.match(
        r"(hf|wheel|random):", str(path)
    )
    return f"; to serve it as a model use --model {path}" if looks_like_source else ""


def _parse(path: Path, text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        if place := TOML_PLACE.fullmatch(str(error)):
            what, line, column = place["what"], int(place["line"]), int(place["column"])
        else:
            what = str(error).removesuffix(" (at end of document)")
            last = text.rstrip("\n").rpartition("\n")[2]
            line, column = text.rstrip("\n").count("\n") + 1, len(last) + 1
        if repeated := _repeated(text, line, what):
            raise ConfigError(f"{path}:{repeated}") from None
        raise ConfigError(f"{path}:{line}:{column}: not valid TOML: {what}") from None


def _repeated(text: str, line: int, what: str) -> str | None:
    """Line and description where the fault that ``tomllib`` names is a key written twice.

    ``tomllib`` points behind the value of the second one, which may span lines.
    """
    if not what.startswith(("Cannot overwrite", "Cannot declare")):
        return None
    seen: dict[tuple[str | int, ...], int] = {}
    last: tuple[str, int, int] | None = None
    for place, at in locate_keys(text):
        if at > line:
            break
        if place in seen and all(isinstance(part, str) for part in place):
            last = (".".join(map(str, place)), seen[place], at)
        seen.setdefault(place, at)
    if last is None:
        return None
    dotted, first, second = last
    return f"{second}: key '{dotted}': written twice, first on line {first}; keep one"
