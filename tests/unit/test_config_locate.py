"""The line locator, held to tomllib: same keys, and the lines a writer put them on."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.config.locate import Path, locate_keys

# Bits of text that look like something else in TOML.
PIECES = st.sampled_from(
    ["a", "é", "=", "#", "[", "]]", "{", "}", ",", ".", " ", "[http]", "x = 1", "\\", "\t", "🦔"]
)
CONTENT = st.lists(PIECES | st.sampled_from(["'", '"']), max_size=6).map("".join)
SCALARS = st.sampled_from(
    ["1", "-2_000", "0x1F", "3.5e-7", "inf", "true", "1979-05-27T07:32:00Z", "1979-05-27 07:32:00"]
)


class Writer:
    """Writes a valid document and notes on which line it wrote each key."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.text = ""
        self.lines: dict[Path, int] = {}
        self.count = 0

    def put(self, *pieces: str) -> None:
        self.text += "".join(pieces)

    def chance(self) -> bool:
        return self.draw(st.booleans())

    def note(self, path: Path) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def space(self, *, lines: bool = False) -> None:
        self.put(self.draw(st.sampled_from(["", " ", "\t ", "  "])))
        if lines and self.chance():
            self.put(self.draw(st.sampled_from(["\n", '# ] } , \' """\n', "\n \n"])))

    def name(self) -> str:
        """A key nobody has had before, written in one of the three ways."""
        self.count += 1
        style = self.draw(st.integers(0, 2))
        if style == 0:
            self.put(name := f"key-{self.count}_A")
        elif style == 1:
            name = f"{self.draw(CONTENT)}{self.count}"
            self.put(json.dumps(name, ensure_ascii=False))
        else:
            name = f"{self.draw(CONTENT).replace(chr(39), '')}{self.count}"
            self.put(f"'{name}'")
        return name

    def key_value(self, table: Path) -> None:
        path = table
        for i in range(self.draw(st.integers(1, 3))):
            if i:
                self.space()
                self.put(".")
                self.space()
            path = (*path, self.name())
            self.note(path)
        self.space()
        self.put("=")
        self.space()
        self.value(path, depth=0)

    def value(self, path: Path, depth: int) -> None:
        kind = self.draw(st.integers(0, 5 if depth < 3 else 3))
        if kind == 0:
            self.put(self.draw(SCALARS))
        elif kind in (1, 2, 3):
            self.string(kind)
        elif kind == 4:
            self.array(path, depth)
        else:
            self.inline_table(path)

    def string(self, kind: int) -> None:
        content = self.draw(CONTENT)
        if kind == 1:
            self.put(json.dumps(content, ensure_ascii=False))
        elif kind == 2:
            plain = content.replace("'", "")
            quotes = "'" * self.draw(st.integers(0, 2))
            self.put("'''", plain, "\n" if self.chance() else "", plain, quotes, "'''")
        else:
            plain = content.replace("\\", "\\\\").replace('"', "")
            quotes = '"' * self.draw(st.integers(0, 2))
            middle = self.draw(st.sampled_from(["\n", "", '\\""x', '""a', "\\\n  "]))
            self.put('"""', plain, middle, plain, quotes, '"""')

    def array(self, path: Path, depth: int) -> None:
        self.put("[")
        for i in range(self.draw(st.integers(0, 3))):
            self.space(lines=True)
            self.value((*path, i), depth + 1)
            self.space(lines=True)
            self.put(",")
        self.space(lines=True)
        self.put("]")

    def inline_table(self, path: Path) -> None:
        self.put("{")
        for i in range(self.draw(st.integers(0, 2))):
            self.put(", " if i else " ")
            self.key_value(path)
        self.put(" }")

    def header(self, table_arrays: dict[Path, int]) -> Path:
        """A table, an array's next element, or a table inside the last element of an array."""
        self.space()
        double = self.chance()
        line_start = len(self.text)
        path: Path = ()
        self.put("[[" if double else "[")
        arrays = sorted(table_arrays, key=str)
        if arrays and self.chance():
            again = self.draw(st.sampled_from(arrays))
            if len(again) == 1:
                self.put(json.dumps(again[0], ensure_ascii=False))
                path = again
                if double and self.chance():
                    return self.element(path, table_arrays)
                self.put(".")
                path = (*path, table_arrays[path])
        path = (*path, self.name())
        self.note(path)
        if double:
            return self.element(path, table_arrays)
        self.put("]")
        assert "\n" not in self.text[line_start:]
        return path

    def element(self, path: Path, table_arrays: dict[Path, int]) -> Path:
        table_arrays[path] = table_arrays.get(path, -1) + 1
        self.put("]]")
        self.note((*path, table_arrays[path]))
        return (*path, table_arrays[path])


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[Path, int]]:
    writer = Writer(draw)
    table: Path = ()
    table_arrays: dict[Path, int] = {}
    for _ in range(draw(st.integers(0, 6))):
        writer.space(lines=True)
        if draw(st.integers(0, 2)) == 0:
            table = writer.header(table_arrays)
        else:
            writer.key_value(table)
        writer.space()
        writer.put(draw(st.sampled_from(["\n", " # comment = [\n"])))
    return writer.text, writer.lines


def named(value: Any, path: Path = ()) -> set[Path]:
    """The paths of all keys in a parsed document."""
    if isinstance(value, list):
        return {p for i, item in enumerate(value) for p in named(item, (*path, i))}
    if isinstance(value, dict):
        return {(*path, k) for k in value} | {
            p for k, item in value.items() for p in named(item, (*path, k))
        }
    return set()


def first_lines(text: str) -> dict[Path, int]:
    lines: dict[Path, int] = {}
    for path, line in locate_keys(text):
        lines.setdefault(path, line)
    return lines


@given(documents())
@settings(max_examples=120)
def test_finds_every_key_on_its_line(document: tuple[str, dict[Path, int]]) -> None:
    text, written = document
    found = first_lines(text)
    assert {p for p in found if isinstance(p[-1], str)} == named(tomllib.loads(text))
    assert found == written
    assert first_lines(text.replace("\n", "\r\n")) == written


@given(documents(), st.data())
@settings(max_examples=50)
def test_a_cut_document_keeps_the_lines_before_the_cut(
    document: tuple[str, dict[Path, int]], data: st.DataObject
) -> None:
    text, written = document
    cut = data.draw(st.integers(0, len(text)))
    for path, line in first_lines(text[:cut]).items():
        if path in written:
            assert line == written[path]


@given(st.text(alphabet="ab.=[]{}'\"#,\\\n 1", max_size=40))
@settings(max_examples=300)
def test_any_text_ends_and_agrees_with_tomllib_where_that_reads_it(text: str) -> None:
    found = first_lines(text)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert {p for p in found if isinstance(p[-1], str)} == named(document)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('a = """\nb = 1\n"""\nc = 2', {("a",): 1, ("c",): 4}),
        ("a = [\n  1, # ]\n]\nc = 2", {("a",): 1, ("c",): 4}),
        ("[http]\n\nport = 1", {("http",): 1, ("http", "port"): 3}),
        ('http . "port" = 1', {("http",): 1, ("http", "port"): 1}),
        ('a = """x"""""\nb = 1', {("a",): 1, ("b",): 2}),
        ("[[a]]\n[[a]]\nb = 1", {("a",): 1, ("a", 0): 1, ("a", 1): 2, ("a", 1, "b"): 3}),
    ],
)
def test_examples(text: str, lines: dict[Path, int]) -> None:
    assert first_lines(text) == lines


def test_a_key_written_twice_is_listed_twice() -> None:
    assert locate_keys("a = 1\n\na = 2\n") == [(("a",), 1), (("a",), 3)]
