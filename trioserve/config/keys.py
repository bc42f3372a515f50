"""The keys of the schema as a table, and what to say about a key that is not in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, get_type_hints

import attrs

from trioserve.config.schema import Config

# Sections whose keys come with what they are for.
RESERVED_SECTIONS = frozenset({"parallel", "compile", "lora", "speculative", "plugins"})


@attrs.frozen
class Key:
    """One key of the configuration."""

    section: str
    name: str
    type: Any
    attribute: attrs.Attribute[Any]

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def env_name(self) -> str:
        return f"TRIOSERVE_{self.section}__{self.name}".upper()

    @property
    def default(self) -> Any:
        return self.attribute.default

    @property
    def help(self) -> str:
        text: str = self.attribute.metadata["help"]
        return text

    @property
    def unit(self) -> str:
        text: str = self.attribute.metadata["unit"]
        return text

    @property
    def secret(self) -> bool:
        return bool(self.attribute.metadata["secret"])

    @property
    def path(self) -> bool:
        return bool(self.attribute.metadata["path"])


def _section_classes() -> dict[str, type[attrs.AttrsInstance]]:
    hints = get_type_hints(Config)
    return {attribute.name: hints[attribute.name] for attribute in attrs.fields(Config)}


def _keys_of(section: str, cls: type[attrs.AttrsInstance]) -> Mapping[str, Key]:
    hints = get_type_hints(cls)
    return MappingProxyType(
        {a.name: Key(section, a.name, hints[a.name], a) for a in attrs.fields(cls)}
    )


SECTIONS: Mapping[str, type[attrs.AttrsInstance]] = MappingProxyType(_section_classes())
KEYS: Mapping[str, Mapping[str, Key]] = MappingProxyType(
    {section: _keys_of(section, cls) for section, cls in SECTIONS.items()}
)


def all_keys() -> list[Key]:
    return [key for keys in KEYS.values() for key in keys.values()]


def find_key(dotted: str) -> Key | None:
    section, _, name = dotted.partition(".")
    return KEYS.get(section, {}).get(name)


def unknown_section(section: str) -> str:
    """What is wrong with a section that the schema does not have, in one line."""
    if section in RESERVED_SECTIONS:
        return f"section [{section}]: reserved; this version has no keys there"
    return f"section [{section}]: unknown{_did_you_mean(_close(section, KEYS), KEYS)}"


def unknown_key(dotted: str) -> str:
    """What is wrong with ``section.key``, or with a key outside any section, in one line.

    A key that another section has is said to belong there.
    """
    section, dot, name = dotted.partition(".")
    if not dot:
        section, name = "", dotted
    elif section not in KEYS:
        return unknown_section(section)
    problem = f"key '{dotted}': unknown" if section else f"key '{dotted}': outside any section"
    wanted = _normal(name)
    own = KEYS.get(section, {})
    if wanted in own:
        return f"{problem}; did you mean '{wanted}'?"
    if homes := [f"[{other}]" for other, keys in KEYS.items() if wanted in keys]:
        return f"{problem}; '{wanted}' belongs in section {' or '.join(homes)}"
    if close := _close(name, own):
        return f"{problem}; did you mean '{close}'?"
    names = {key.name: key.section for key in all_keys()}
    if close := _close(name, names, cutoff=0.8):
        return f"{problem}; did you mean '{close}' in section [{names[close]}]?"
    return f"{problem}; known are {', '.join(own)}" if own else problem


def unknown_variable(variable: str) -> str:
    """What is wrong with an environment variable in our name space, in one line."""
    names = {key.env_name: key for key in all_keys()}
    bare = variable.removeprefix("TRIOSERVE_")
    if variable.upper() in names:
        close: str | None = variable.upper()
    else:
        close = next(
            (name for name, key in names.items() if key.name.upper() == bare), None
        ) or _close(variable, names, cutoff=0.85)
    hint = f"; did you mean {close}?" if close else ""
    return f"{variable}: no such setting{hint or '; names are TRIOSERVE_SECTION__KEY'}"


def _normal(name: str) -> str:
    return name.replace("-", "_").lower()


def _close(name: str, known: Mapping[str, object], *, cutoff: float = 0.7) -> str | None:
    plain = name if name in known or name.isupper() else _normal(name)
    return next(iter(difflib.get_close_matches(plain, known, n=1, cutoff=cutoff)), None)


def _did_you_mean(close: str | None, known: Mapping[str, object]) -> str:
    return f"; did you mean [{close}]?" if close else f"; known are {', '.join(known)}"


def forget_keys(env: MutableMapping[str, str]) -> None:
    """Take secrets out of an environment, so that no child gets what it has no use for."""
    for key in all_keys():
        if key.secret:
            env.pop(key.env_name, None)


def without_keys(config: Config) -> Config:
    """The configuration as a worker needs it."""
    return attrs.evolve(config, http=attrs.evolve(config.http, api_keys=()))
