"""A terminal that nobody has to read: what cannot be written now is dropped, never waited for.

Ctrl-S, a suspended multiplexer or a dead connection stop a terminal. A write to it then waits for
as long as that lasts, and with it the event loop: no request answered, no signal heard.
"""

from __future__ import annotations

import os
import select

PATIENCE_MS = 100.0  # for a terminal that is only slow
SHOW_CURSOR = "\x1b[?25h"


class PatientTerminal:
    """A text file for ``rich.Console`` over a terminal, opened anew: not to wait is a property of
    an opened file, and the one we were given is shared with the shell.

    What was begun is written to its end before anything else, so no escape sequence is cut in two;
    what comes meanwhile is dropped and counted. The first write after a gap says how many.

    Raises:
        OSError: the terminal cannot be opened by its name.
    """

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        """``fd`` is a terminal and stays the caller's."""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self._fd = os.open(os.ttyname(fd), flags)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self._text: list[str] = []  # since the last flush
        self._rest = b""  # of what was begun
        self.num_lost = 0  # since the last that went out

    def write(self, text: str) -> int:
        """Keep ``text`` for ``flush``."""
        self._text.append(text)
        return len(text)

    def flush(self) -> None:
        """Write what was kept, or drop it. Waits for ``PATIENCE_MS`` at most, once in a gap."""
        text = "".join(self._text)
        self._text.clear()
        if self._rest and not self._write(self._rest):
            self._lose(text)
            return
        if self.num_lost:
            text = f"\n({self.num_lost} updates are lost: the terminal was stopped)\n{text}"
            self.num_lost = 0
        if text:
            self._write(text.encode(errors="backslashreplace"))

    def isatty(self) -> bool:
        """It is one."""
        return True

    def fileno(self) -> int:
        """The descriptor it writes to."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def _lose(self, text: str) -> None:
        if not text:
            return
        self.num_lost += 1
        if SHOW_CURSOR in text and SHOW_CURSOR.encode() not in self._rest:
            self._rest += SHOW_CURSOR.encode()  # whatever else is lost, the shell needs a cursor

    def _write(self, data: bytes) -> bool:
        """Whether all of it is out; ``_rest`` is what is not."""
        wait_ms = 0.0 if self.num_lost else PATIENCE_MS
        try:
            while data and self._poll.poll(wait_ms):
                data = data[os.write(self._fd, data) :]
        except BlockingIOError:  # stopped since the poll
            pass
        except OSError:  # hung up: nobody is left to be told
            data = b""
        self._rest = data
        return not data
