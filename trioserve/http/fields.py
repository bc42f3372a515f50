"""JSON bodies: decoded strictly, then read field by field with every fault collected.

A field that is null counts as absent. Integers must be written as integers (``1``, not ``1.0``) and
true is not 1; numbers may be integers.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import orjson

from trioserve.http.errors import InvalidBody

MAX_SHOWN = 60  # characters of a value or key in a message
MAX_FIELDS = 1000
MAX_FAULTS = 20  # listed; more are counted
MAX_DEPTH = 100
# Decoders hold the interpreter's lock from a body's first byte to its last, in a thread too, and
# every object or array costs the garbage collector as well: 8 MiB of `[],` stop the server for
# seconds. Prompts are texts and lists of ids, far below all limits.
MAX_NESTED = 50_000  # arrays and objects
MAX_KEYS = 100_000
MAX_ITEMS = 1_000_000
MAX_QUOTES = 200_000  # up to here it is worth to look whether those are inside texts
SMALL_BODY_BYTES = 4096  # read twice without a thought

_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_PLAIN_TEXT = re.compile(rb'"([^"]*)"(\s*:)?')  # in what has no backslash: each, and if a key
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_SHOWN


def decode_object(raw: bytes) -> dict[str, Any]:
    """Decode a body that must be one JSON object.

    Refuses what decoders commonly let pass: NaN and Infinity, numbers beyond a double, halves of
    surrogate pairs, keys given twice, deeper nesting or more parts than a request can need.

    Raises:
        InvalidBody: saying what is wrong and, for syntax, where.
    """
    if not raw.strip():
        raise InvalidBody([("", "the body is empty; send a JSON object")])
    num_nested = _refuse_costly(raw)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidBody([("", f"the body is not valid JSON: {error}")]) from None
    if not isinstance(body, dict):
        raise InvalidBody([("", f"the body must be a JSON object, not {kind_of(body)}")])
    if len(body) > MAX_FIELDS:
        raise InvalidBody([("", f"the body has {len(body)} fields; {MAX_FIELDS} are the most")])
    is_flat = num_nested <= MAX_DEPTH
    if is_flat and len(raw) <= SMALL_BODY_BYTES:
        if not _has_each_key_once(raw):
            _refuse_twice_given_keys(raw)
    else:
        num_keys = len(body) if is_flat and raw.count(b"{") == 1 else _num_keys(body)
        # Whatever follows a key's last quote is here; what is inside texts is counted as well.
        if num_keys != sum(map(raw.count, (b'":', b'" ', b'"\n', b'"\t', b'"\r'))):
            _refuse_twice_given_keys(raw)
    return body


def takes_long(raw: bytes) -> bool:
    """Whether to decode a body in a thread: by its size, or by the number of its parts."""
    if len(raw) < 2 * SMALL_BODY_BYTES:
        return False
    return len(raw) >= 256 * 1024 or raw.count(b"[") + raw.count(b"{") + raw.count(b",") > 4000


def _refuse_costly(raw: bytes) -> int:
    """The number of arrays and objects, or some more."""
    # Counted before anything is decoded; texts are left out only if that may change the verdict.
    num_nested, counted = 0, raw
    for most, marks, what in (
        (MAX_KEYS, (b":",), "keys"),
        (MAX_ITEMS, (b",",), "items"),
        (MAX_NESTED, (b"[", b"{"), "arrays and objects"),
    ):
        num_nested = sum(map(counted.count, marks))
        if num_nested > most and counted is raw and raw.count(b'"') <= MAX_QUOTES:
            counted = _TEXT.sub(b"", raw)
            num_nested = sum(map(counted.count, marks))
        if num_nested > most:
            raise InvalidBody([("", f"the body has some {num_nested} {what}; {most} are the most")])
    return num_nested


def _num_keys(body: dict[str, Any]) -> int:
    """The number of keys at all depths. Refuses nesting that others would stumble over."""
    num_keys = depth = 0
    level: list[Any] = [body]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidBody([("", f"the body is nested deeper than {MAX_DEPTH} levels")])
        inner: list[Any] = []
        for part in level:
            if type(part) is dict:
                num_keys += len(part)
                items: Iterable[Any] = part.values()
            else:
                items = part
            inner += [item for item in items if type(item) is dict or type(item) is list]
        level = inner
    return num_keys


def _has_each_key_once(raw: bytes) -> bool:
    """Whether that can be seen at a glance in what is valid JSON; else the keys must be read."""
    if b"\\" in raw:
        return False
    keys = [name for name, colon in _PLAIN_TEXT.findall(raw) if colon]
    return len(keys) == len(set(keys))


def _refuse_twice_given_keys(raw: bytes) -> None:
    # orjson keeps the last of equal keys. Its verdict on the syntax stands, so what the standard
    # parser still refuses can only be the size of a number.
    try:
        json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidBody([("", f"the body is not usable JSON: {error}")]) from None


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} is given twice")
            seen.add(key)


def kind_of(value: Any) -> str:
    """What a JSON value is, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return f"the number {shown(value)}"
        case str():
            return f"the string {shown(value)}"
        case list():
            return "an array"
        case _:
            return "an object"


def shown(value: Any) -> str:
    """A value cut to a length that a message can bear."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = _repr.repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


class Fields:
    """Reads the fields of one object and remembers which were read and what was wrong.

    Args:
        body: the decoded object.
        path: where it stands in the whole body; empty for the whole body.
        faults: where to put faults; an object inside another shares its parent's.
    """

    def __init__(
        self, body: dict[str, Any], path: str = "", faults: list[tuple[str, str]] | None = None
    ) -> None:
        self.body = body
        self.faults: list[tuple[str, str]] = [] if faults is None else faults
        self._path = path
        self._read: set[str] = set()
        self._inner: list[Fields] = []

    def fault(self, name: str, text: str) -> None:
        """Note that the field ``name`` is wrong."""
        fault = (self.path(name), text)
        if fault not in self.faults:  # a field that two readers use
            self.faults.append(fault)

    def path(self, name: str) -> str:
        """The field's path from the top of the body."""
        return f"{self._path}.{name}" if self._path else name

    def raise_faults(self) -> None:
        """Raise InvalidBody if anything was wrong so far."""
        if self.faults:
            self._raise(self.faults)

    def _raise(self, faults: list[tuple[str, str]]) -> NoReturn:
        more = len(faults) - MAX_FAULTS
        if more > 0:
            faults = [*faults[:MAX_FAULTS], ("", f"and {more} more faults")]
        raise InvalidBody(faults)

    def value(self, name: str) -> Any:
        """The field as it is, or None."""
        self._read.add(name)
        return self.body.get(name)

    def unread(self) -> list[str]:
        """Names of fields nobody asked for."""
        return [name for name in self.body if name not in self._read]

    def unknown(self) -> tuple[str, ...]:
        """Paths of fields nobody asked for, here and inside the objects that were read; null is no
        field."""
        names = [self.path(name) for name in self.unread() if self.body[name] is not None]
        for inner in self._inner:
            names += inner.unknown()
        return tuple(names)

    def integer(
        self, name: str, default: Any = None, *, low: int | None = None, high: int | None = None
    ) -> Any:
        """An integer in ``[low, high]``, or ``default`` if absent or faulty."""
        if name not in self.body or (value := self.value(name)) is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            self.fault(name, f"must be an integer, not {kind_of(value)}")
            return default
        return self._bounded(name, value, default, low, high)

    def number(
        self, name: str, default: float, *, low: float | None = None, high: float | None = None
    ) -> float:
        """A finite number in ``[low, high]``, or ``default`` if absent or faulty."""
        if name not in self.body or (value := self.value(name)) is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fault(name, f"must be a number, not {kind_of(value)}")
            return default
        if not math.isfinite(value):
            self.fault(name, "must be a finite number")
            return default
        bounded = self._bounded(name, value, default, low, high)
        return float(bounded)

    def _bounded(self, name: str, value: Any, default: Any, low: Any, high: Any) -> Any:
        if (low is None or value >= low) and (high is None or value <= high):
            return value
        if high is None:
            wanted = f"be at least {low}"
        elif low is None:
            wanted = f"be at most {high}"
        else:
            wanted = f"lie between {low} and {high}"
        self.fault(name, f"must {wanted}, not {shown(value)}")
        return default

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false, or ``default`` if absent or faulty."""
        if name not in self.body or (value := self.value(name)) is None:
            return default
        if not isinstance(value, bool):
            self.fault(name, f"must be true or false, not {kind_of(value)}")
            return default
        return value

    def string(self, name: str, default: str = "", *, max_chars: int | None = None) -> str:
        """A string, or ``default`` if absent or faulty."""
        if name not in self.body or (value := self.value(name)) is None:
            return default
        if not isinstance(value, str):
            self.fault(name, f"must be a string, not {kind_of(value)}")
            return default
        if max_chars is not None and len(value) > max_chars:
            self.fault(name, f"must have at most {max_chars} characters, not {len(value)}")
            return default
        return value

    def strings(self, name: str, *, max_items: int) -> tuple[str, ...]:
        """A string or an array of strings, none of them empty."""
        if name not in self.body or (value := self.value(name)) is None:
            return ()
        values = [value] if isinstance(value, str) else value
        items = self._items(name, values, "a string or an array of strings", max_items)
        for index, item in enumerate(items):
            if not isinstance(item, str):
                self.fault(f"{name}[{index}]", f"must be a string, not {kind_of(item)}")
                return ()
            if not item:
                self.fault(f"{name}[{index}]" if values is value else name, "must not be empty")
                return ()
        return tuple(items)

    def integers(self, name: str, *, max_items: int, low: int = 0) -> tuple[int, ...]:
        """An array of integers that are at least ``low``."""
        if name not in self.body or (value := self.value(name)) is None:
            return ()
        items = self._items(name, value, "an array of integers", max_items)
        for index, item in enumerate(items):
            if not isinstance(item, int) or isinstance(item, bool):
                self.fault(f"{name}[{index}]", f"must be an integer, not {kind_of(item)}")
                return ()
            if item < low:
                self.fault(f"{name}[{index}]", f"must be at least {low}, not {shown(item)}")
                return ()
        return tuple(items)

    def _items(self, name: str, value: Any, wanted: str, max_items: int) -> list[Any]:
        if not isinstance(value, list):
            self.fault(name, f"must be {wanted}, not {kind_of(value)}")
            return []
        if len(value) > max_items:
            self.fault(name, f"must have at most {max_items} items, not {len(value)}")
            return []
        return value

    def object(self, name: str) -> Fields | None:
        """An object's fields, or None if absent or faulty."""
        if name not in self.body or (value := self.value(name)) is None:
            return None
        if not isinstance(value, dict):
            self.fault(name, f"must be an object, not {kind_of(value)}")
            return None
        inner = Fields(value, self.path(name), self.faults)
        self._inner.append(inner)
        return inner

    def choice(self, name: str, values: tuple[str, ...]) -> str | None:
        """One of ``values``, or None if absent or faulty."""
        if name not in self.body or (value := self.value(name)) is None:
            return None
        if not isinstance(value, str) or value not in values:
            self.fault(name, f"must be one of {', '.join(values)}, not {kind_of(value)}")
            return None
        return value

    def neutral(self, name: str, is_neutral: Callable[[Any], bool]) -> None:
        """A known field that is not supported: fine while it asks for nothing."""
        value = self.value(name)
        if value is not None and not is_neutral(value):
            self.fault(name, f"{shown(value)} is not supported; leave the field out")
