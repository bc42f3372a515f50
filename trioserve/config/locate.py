"""On which line of a TOML document each key stands, which ``tomllib`` does not tell.

A scanner for documents that ``tomllib`` has accepted: it knows where keys, strings, arrays and
tables begin and end and leaves their meaning to ``tomllib``. Where the document is broken it stops
at the break; what it has seen until then is right.
"""

from __future__ import annotations

import contextlib
import re
import tomllib

Path = tuple[str | int, ...]
"""Where a key lies: names of tables and keys, numbers of array elements."""

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
SPACE = re.compile(r"[ \t]*")
SPACE_AND_LINES = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
SCALAR = re.compile(r"[^,\]}#\n]*")
STRINGS = (
    # Longer quotes first. Up to two quotes may stand right before the three that close.
    re.compile(r'"""(?:[^"\\]|\\[\s\S]|""?(?!"))*"{3,5}'),
    re.compile(r"'''(?:[^']|''?(?!'))*'{3,5}"),
    re.compile(r'"(?:[^"\\\n]|\\[^\n])*"'),
    re.compile(r"'[^'\n]*'"),
)


class Broken(Exception):
    """The document is not what a scanner of valid TOML expects here."""


def locate_keys(text: str) -> list[tuple[Path, int]]:
    """Every key and table of ``text`` with its line, from 1, in the order they are written.

    A path that is written several times is listed several times, so that a doubled key can be
    shown with both its lines; tables made in passing (``a`` in ``a.b = 1``) are listed too.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    with contextlib.suppress(Broken, RecursionError):
        scanner.document()
    return scanner.found


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.counted_pos = 0
        self.counted_line = 1
        self.found: list[tuple[Path, int]] = []
        # Each `[[path]]` so far, with the number of its last element.
        self.table_arrays: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        self.skip(SPACE_AND_LINES)
        while self.pos < len(self.text):
            if self.text[self.pos] == "[":
                table = self.header()
            else:
                self.key_value(table)
            self.skip(SPACE_AND_LINES)

    def header(self) -> Path:
        double = self.text.startswith("[[", self.pos)
        line = self.line()
        self.pos += 2 if double else 1
        parts = self.key_parts()
        self.expect("]]" if double else "]")
        path: Path = ()
        for i, part in enumerate(parts):
            path += (part,)
            self.found.append((path, line))
            if i == len(parts) - 1 and double:
                self.table_arrays[path] = self.table_arrays.get(path, -1) + 1
                self.found.append(((*path, self.table_arrays[path]), line))
            if path in self.table_arrays:
                path += (self.table_arrays[path],)
        return path

    def key_value(self, table: Path) -> None:
        line = self.line()
        path = table
        for part in self.key_parts():
            path += (part,)
            self.found.append((path, line))
        self.expect("=")
        self.skip(SPACE)
        self.value(path)

    def key_parts(self) -> list[str]:
        """A dotted key, and the space around it."""
        parts = []
        while True:
            self.skip(SPACE)
            parts.append(self.key_part())
            self.skip(SPACE)
            if not self.text.startswith(".", self.pos):
                return parts
            self.pos += 1

    def key_part(self) -> str:
        if self.text[self.pos : self.pos + 1] in ('"', "'"):
            quoted = self.string()
            try:
                decoded: str = tomllib.loads(f"x = {quoted}")["x"]
            except tomllib.TOMLDecodeError:
                raise Broken from None
            return decoded
        bare = self.skip(BARE_KEY)
        if not bare:
            raise Broken
        return bare

    def value(self, path: Path) -> None:
        first = self.text[self.pos : self.pos + 1]
        if first in ('"', "'"):
            self.string()
        elif first == "[":
            self.array(path)
        elif first == "{":
            self.inline_table(path)
        else:
            self.skip(SCALAR)

    def array(self, path: Path) -> None:
        self.expect("[")
        index = 0
        self.skip(SPACE_AND_LINES)
        while not self.text.startswith("]", self.pos):
            self.value((*path, index))
            index += 1
            self.skip(SPACE_AND_LINES)
            if not self.text.startswith(",", self.pos):
                break
            self.pos += 1
            self.skip(SPACE_AND_LINES)
        self.expect("]")

    def inline_table(self, path: Path) -> None:
        self.expect("{")
        # Newlines and a comma before the brace came with TOML 1.1; older readers refuse them.
        self.skip(SPACE_AND_LINES)
        while not self.text.startswith("}", self.pos):
            self.key_value(path)
            self.skip(SPACE_AND_LINES)
            if not self.text.startswith(",", self.pos):
                break
            self.pos += 1
            self.skip(SPACE_AND_LINES)
        self.expect("}")

    def string(self) -> str:
        for pattern in STRINGS:
            if found := self.skip(pattern):
                return found
        raise Broken

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Goes past what ``pattern`` matches here, perhaps nothing, and returns it."""
        match = pattern.match(self.text, self.pos)
        if match is None:
            return ""
        self.pos = match.end()
        return match.group()

    def expect(self, text: str) -> None:
        if not self.text.startswith(text, self.pos):
            raise Broken
        self.pos += len(text)

    def line(self) -> int:
        """The line of the position, counted on from where it was last asked for."""
        self.counted_line += self.text.count("\n", self.counted_pos, self.pos)
        self.counted_pos = self.pos
        return self.counted_line
