"""Lines out of bytes: any split, any length, any rubbish."""

from __future__ import annotations

import itertools
import os

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from trioserve.ipc.stderr import MAX_LINE_BYTES, LineSplitter, StderrPump

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\n\n  \nb", ["a", "b"]),
        (b" 10%\r 20%\r100%\ndone", ["100%", "done"]),
        (b"50%\r", ["50%"]),
        (b"\xff\xc3\xa9\n", ["\ufffdé"]),
        (b"x" * MAX_LINE_BYTES + b"\n", ["x" * MAX_LINE_BYTES]),
        (b"x" * (MAX_LINE_BYTES + 3), ["x" * MAX_LINE_BYTES + " … (3 more bytes)"]),
    ],
)
def test_lines(data: bytes, lines: list[str]) -> None:
    splitter = LineSplitter()
    assert splitter.feed(data) + splitter.finish() == lines
    assert splitter.finish() == []


@given(st.text("aé\n\r", max_size=60), st.lists(st.integers(0, 120), max_size=10))
def test_lines_do_not_depend_on_the_split(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    whole, parts = LineSplitter(), LineSplitter()
    expected = whole.feed(data) + whole.finish()
    got = [line for a, b in itertools.pairwise(edges) for line in parts.feed(data[a:b])]
    assert got + parts.finish() == expected


def test_a_line_without_end_takes_no_memory() -> None:
    splitter = LineSplitter()
    for _ in range(1000):
        assert splitter.feed(b"x" * 65536) == []
    assert len(splitter._line) == MAX_LINE_BYTES


async def test_rest_is_read_while_somebody_else_holds_the_pipe() -> None:
    read, write = os.pipe()
    lines: list[str] = []
    pump = StderrPump(trio.lowlevel.FdStream(read), lines.append)
    os.write(write, b"one\ntwo")
    pump.read_rest()
    assert lines == list(pump.last) == ["one", "two"]
    pump.read_rest()
    pump.close()
    pump.read_rest()
    assert lines == ["one", "two"]
    os.close(write)


async def test_rest_of_one_who_never_stops_is_bounded() -> None:
    zeros = os.open("/dev/zero", os.O_RDONLY)
    pump = StderrPump(trio.lowlevel.FdStream(zeros), lambda line: None)
    pump.read_rest()
    assert len(pump.last) == 1
    pump.close()


async def test_an_error_of_the_listener_comes_once_and_the_lines_are_kept() -> None:
    read, write = os.pipe()

    def fail(line: str) -> None:
        raise KeyError(line)

    pump = StderrPump(trio.lowlevel.FdStream(read), fail)
    os.write(write, b"one\n")
    with pytest.raises(KeyError):
        await pump.run()
    os.write(write, b"two\n")
    pump.read_rest()
    assert list(pump.last) == ["one", "two"]
    os.close(write)
    pump.close()
