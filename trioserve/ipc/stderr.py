"""What the worker writes to its stderr: lines to the log, the last ones kept for errors."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import trio

MAX_LINE_BYTES = 8 * 1024
KEPT_LINES = 50
READ_BYTES = 64 * 1024
_LEFT_BYTES = 1024 * 1024  # read at most after the process is gone


class LineSplitter:
    """Bytes in, lines out. A line is cut at ``MAX_LINE_BYTES``, its rest is counted, not kept."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._num_cut = 0

    def feed(self, data: bytes) -> list[str]:
        """Take bytes in any split; return the lines that are complete now."""
        *whole, rest = data.split(b"\n")
        lines = []
        for part in whole:
            self._add(part)
            lines += self.finish()
        self._add(rest)
        return lines

    def finish(self) -> list[str]:
        """What stands on the current line, which ends here; nothing where it is blank."""
        # A progress bar draws over its line: what stands there is what follows the last return.
        shown = self._line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if self._num_cut:
            shown += f" … ({self._num_cut} more bytes)"
        self._line.clear()
        self._num_cut = 0
        return [shown] if shown.strip() else []

    def _add(self, part: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._line)
        self._line += part[:room]
        self._num_cut += max(0, len(part) - room)


class StderrPump:
    """Reads the worker's stderr for as long as it lives. One task runs ``run``."""

    def __init__(
        self, stream: trio.lowlevel.FdStream | None, on_line: Callable[[str], object]
    ) -> None:
        """``on_line`` gets each line, without its end, in order; where it raises, the error goes
        on through ``run`` or ``read_rest`` and no more lines come. Stream None: no stderr."""
        self._stream = stream
        self._on_line: Callable[[str], object] | None = on_line
        self._splitter = LineSplitter()
        self.last: deque[str] = deque(maxlen=KEPT_LINES)

    async def run(self) -> None:
        """Pump until the pipe ends, or until cancelled, which loses nothing."""
        if self._stream is None:
            return
        while data := await self._stream.receive_some(READ_BYTES):
            self._take(self._splitter.feed(data))

    def read_rest(self) -> None:
        """Take what is in the pipe now, for when the process is gone: ``run`` may not have come to
        it yet, and waiting for the end will not do, since a process that the worker left behind
        may hold the pipe open for ever."""
        if self._stream is None:
            return
        num_left = _LEFT_BYTES
        while num_left > 0:
            try:
                data = os.read(self._stream.fileno(), READ_BYTES)
            except OSError:  # nothing there now, or closed
                break
            if not data:
                break
            num_left -= len(data)
            self._take(self._splitter.feed(data))
        self._take(self._splitter.finish())

    def close(self) -> None:
        """Close the pipe."""
        if self._stream is not None:
            self._stream.close()

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            self.last.append(line)
            if self._on_line is not None:
                try:
                    self._on_line(line)
                except BaseException:
                    self._on_line = None
                    raise
