"""A terminal that is stopped, or that nobody reads, holds nobody up."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console

from trioserve.engine.api import EngineStatus, Phase, StageStatus
from trioserve.progress import LiveView
from trioserve.terminal import SHOW_CURSOR, PatientTerminal


class Screen:
    """A pseudo-terminal and the program's end of it; a wait for ever is interrupted."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        tty.setraw(self.slave)  # what is written comes out as it is
        os.set_blocking(self.master, False)
        self.terminal = PatientTerminal(self.slave)

    def show(self, text: str) -> None:
        self.terminal.write(text)
        self.terminal.flush()

    def stop(self) -> None:
        termios.tcflow(self.slave, termios.TCOOFF)  # as Ctrl-S does

    def go_on(self) -> None:
        termios.tcflow(self.slave, termios.TCOON)

    def read(self) -> str:
        found = b""
        while select.select([self.master], [], [], 0.2)[0]:
            found += os.read(self.master, 65536)
        return found.decode()

    def close(self) -> None:
        self.terminal.close()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def screen() -> Iterator[Screen]:
    def too_long(number: int, frame: object) -> None:
        raise AssertionError("a write waits for the terminal")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    screen = Screen()
    try:
        yield screen
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        screen.close()


def test_a_terminal_that_is_read_gets_everything_in_order(screen: Screen) -> None:
    screen.show("one\n")
    screen.show("two\n")
    assert screen.read() == "one\ntwo\n"
    assert screen.terminal.num_lost == 0


def test_st_a_stopped_terminal_drops_and_says_so_afterwards(screen: Screen) -> None:
    screen.stop()
    for number in range(50):
        screen.show(f"update {number}\n")
    assert screen.terminal.num_lost >= 48
    lost = screen.terminal.num_lost
    assert screen.read() == ""
    screen.go_on()
    screen.show("back\n")
    shown = screen.read()
    assert shown.startswith("update 0\n")
    assert shown.endswith(f"({lost} updates are lost: the terminal was stopped)\nback\n")


def test_st_a_terminal_that_nobody_reads_takes_whole_updates_only(screen: Screen) -> None:
    for number in range(200):
        screen.show(f"<{number}:{'x' * 5000}>\n")
    assert screen.terminal.num_lost > 100
    shown = screen.read()
    screen.show("<end>\n")
    shown += screen.read()
    for update in re.sub(r"\(\d+ updates are lost.*?\)", "", shown).split():
        assert re.fullmatch(r"<\d+:x{5000}>|<end>", update)
    assert shown.endswith("<end>\n")


def test_a_cursor_that_was_hidden_is_shown_again_whatever_is_lost(screen: Screen) -> None:
    screen.stop()
    for text in ("first\n", "second\n", f"third{SHOW_CURSOR}\n", f"fourth{SHOW_CURSOR}\n"):
        screen.show(text)
    screen.go_on()
    screen.terminal.flush()
    assert screen.read().count(SHOW_CURSOR) == 1


def test_the_stage_tree_on_a_stopped_terminal(screen: Screen) -> None:
    """Frames are dropped while it is stopped, and the tree is drawn again once it goes on."""
    console = Console(file=cast(IO[str], screen.terminal), force_terminal=True, width=80, height=24)
    view = LiveView(console)
    screen.stop()
    for number in range(100):
        view.show(status(f"loading part {number}"))
    console.print("a line of the log")
    screen.go_on()
    view.show(status("loading the last part"))
    view.close()
    shown = screen.read()
    assert "loading the last part" in shown
    assert "loading part 50" not in shown
    assert SHOW_CURSOR in shown


def test_what_is_no_terminal_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError):  # noqa: PT011
        PatientTerminal(file.fileno())


def status(detail: str) -> EngineStatus:
    stage = StageStatus("weights", "running", 0.5, detail)
    fields = dict.fromkeys(EngineStatus.__annotations__)
    return EngineStatus(**{**fields, "phase": Phase.LOADING, "stages": [stage]})  # type: ignore[arg-type]
