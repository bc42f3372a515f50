"""From what a file, a variable or a flag holds to the value a key takes.

TOML values are taken exactly: "512" is no integer and 1 is not true; only an integer where a number
with a fraction is asked for is let through. Texts of variables and flags are read by the type of
their key: as a TOML value where that fits, else as they stand.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

import cattrs

from trioserve.config.keys import Key
from trioserve.errors import ConfigError

NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def value_of(key: Key, raw: object) -> Any:
    """``raw``, a TOML value or None, as the value of ``key``.

    Raises:
        ConfigError: one line without the key's name, where the type or the value is wrong.
    """
    if isinstance(raw, str) and not _encodable(raw):
        raise ConfigError("is not valid UTF-8")
    if isinstance(raw, str) and "\0" in raw:
        raise ConfigError("holds a NUL character")
    try:
        value = CONVERTER.structure(raw, key.type)
    except ConfigError:
        raise
    except Exception:
        raise ConfigError(_mismatch(key, raw)) from None
    validator = key.attribute.validator
    if validator is not None:
        try:
            validator(None, key.attribute, value)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error.args[0]).removeprefix(f"'{key.name}' ")) from None
    return value


def raw_of_text(key: Key, text: str) -> object:
    """The TOML value, or None, that a variable or a flag with ``text`` stands for.

    An empty text unsets a key that may be unset; a list may be written as a TOML array or with
    commas.
    """
    arms = _arms(key.type)
    if type(None) in arms and not text.strip():
        return None
    literal = _toml_value(text)
    if literal is not None and _fits(literal, key.type):
        return literal
    if any(get_origin(arm) is tuple for arm in arms) and not text.lstrip().startswith("["):
        return [part for piece in text.split(",") if (part := piece.strip())]
    return text


def expected(type_: Any) -> str:
    """What values a type takes, in words."""
    words = []
    for arm in _arms(type_):
        if get_origin(arm) is Literal:
            words += [f'"{choice}"' for choice in get_args(arm)]
        elif get_origin(arm) is tuple:
            words.append("an array of strings")
        elif arm is not type(None):
            words.append(NAMES[arm])
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def toml_text(value: Any) -> str:
    """``value`` as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's too; DEL is the one character TOML wants escaped beyond them.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_text(item) for item in value)}]"
    return repr(value)


def _arms(type_: Any) -> tuple[Any, ...]:
    return get_args(type_) if get_origin(type_) in (Union, types.UnionType) else (type_,)


def _toml_value(text: str) -> object | None:
    if "\n" in text:
        return None
    try:
        document = tomllib.loads(f"x = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    value: object = document["x"]
    return value


def _fits(raw: object, type_: Any) -> bool:
    try:
        CONVERTER.structure(raw, type_)
    except ConfigError:
        return True  # the right type with a wrong value, which value_of will say
    except Exception:
        return False
    return True


def _mismatch(key: Key, raw: object) -> str:
    message = f"expected {expected(key.type)}, got {_shown(key, raw)}"
    choices = [c for arm in _arms(key.type) if get_origin(arm) is Literal for c in get_args(arm)]
    if isinstance(raw, str):
        if tuple[str, ...] in _arms(key.type):
            return f"{message}; write it in brackets"
        literal = _toml_value(raw)
        if literal is not None and _fits(literal, key.type):
            return f"{message}; write it without quotes"
        if close := difflib.get_close_matches(raw.lower(), choices, n=1):
            return f'{message}; did you mean "{close[0]}"?'
    elif not isinstance(raw, dict | list) and str in _arms(key.type):
        return f"{message}; write it in quotes"
    return message


def _shown(key: Key, raw: object) -> str:
    if isinstance(raw, dict):
        return "a table"
    if isinstance(raw, list):
        return "an array"
    if key.secret:
        return "something else"
    text = toml_text(raw) if isinstance(raw, str | bool | int | float) else str(raw)
    return text if len(text) <= 60 else f"{text[:56]}..."


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _exactly(kind: type) -> Callable[[Any, Any], Any]:
    def structure(raw: Any, _: Any) -> Any:
        if type(raw) is not kind:
            raise TypeError
        if isinstance(raw, int) and not -(2**63) <= raw < 2**63:
            raise ConfigError("must fit in 64 bits")
        return raw

    return structure


def _number(raw: Any, _: Any) -> float:
    if type(raw) not in (int, float):
        raise TypeError
    try:
        number = float(raw)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError("must be a finite number")
    return number


def _union(raw: Any, type_: Any) -> Any:
    if raw is None and type(None) in _arms(type_):
        return None
    for arm in _arms(type_):
        try:
            return CONVERTER.structure(raw, arm)
        except ConfigError:
            raise
        except Exception:
            continue
    raise TypeError


def _strings(raw: Any, _: Any) -> tuple[str, ...]:
    if type(raw) not in (list, tuple):
        raise TypeError
    for item in raw:
        if type(item) is not str:
            raise TypeError
        if not _encodable(item):
            raise ConfigError("is not valid UTF-8")
    return tuple(raw)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    for kind in (int, bool, str):
        converter.register_structure_hook(kind, _exactly(kind))
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook_func(lambda t: t == tuple[str, ...], _strings)
    converter.register_structure_hook_func(lambda t: len(_arms(t)) > 1, _union)
    return converter


CONVERTER = _converter()
