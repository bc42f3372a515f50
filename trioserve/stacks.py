"""The stacks of all threads as text on stderr, written by a signal's handler in Python.

The handler runs between two instructions of the main thread, where every thread's frames are whole.
faulthandler's, in C, walks them while another thread may be making one, and with Python 3.11 that
has ended processes by a segmentation fault (docs/decisions/0003-loop-watch.md). The price: where
native code holds the interpreter, nothing is written before it returns.

Of the standard library alone: the worker's first lines import it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

MAX_FRAMES = 100


def write_stacks(signum: int, frame: FrameType | None) -> None:
    """The handler. It takes no lock, as what it interrupts may hold any, and sys.stderr's too."""
    text = "\n".join(_lines(frame)) + "\n"
    data = text.encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        return  # nobody reads; a dump that nobody sees is no reason to end


def _lines(frame: FrameType | None) -> Iterator[str]:
    """As faulthandler has it. ``frame`` is what the signal interrupted."""
    own = threading.get_ident()
    for ident, top in sys._current_frames().items():
        if ident != own:
            yield f"Thread 0x{ident:016x} (most recent call first):"
            yield from _stack(top)
    yield f"Current thread 0x{own:016x} (most recent call first):"
    yield from _stack(frame)


def _stack(frame: FrameType | None) -> Iterator[str]:
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
        frame = frame.f_back
    yield "  ..."
