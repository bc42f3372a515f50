"""Logging of the server process: text lines, JSON lines, or lines above a live view.

The library side only gets loggers and never configures them; this module is used by
``trioserve.main`` alone.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from rich.console import Console

    from trioserve.config.schema import LogConfig

PATIENCE_MS = 100.0  # for a reader that is only slow

_RESERVED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line; ``extra`` fields become keys of it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; what cannot be said in JSON is said as text."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _RESERVED}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        try:
            line = orjson.dumps(entry, default=str).decode()
        except TypeError:  # halves of surrogate pairs, as in the name of a file
            line = json.dumps(entry, default=str)
        if line.isprintable():
            return line
        # JSON lets some characters stand that a terminal or a reader of lines acts on.
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


class TextFormatter(logging.Formatter):
    """``12:34:56 INFO message``; control characters in a message cannot forge a second line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line; a line feed is left alone only in our own multi-line texts."""
        if record.name == "trioserve.worker":
            record.message = "worker: " + escape(record.message)
        return super().formatMessage(record)


def escape(text: str) -> str:
    """Control characters made visible."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class PatientHandler(logging.Handler):
    """Writes lines to a descriptor, and loses lines rather than wait for whoever reads it.

    A pipe that nobody empties, or a terminal that was stopped, would otherwise hold up the event
    loop: no request answered, no signal heard. The first line after a gap says how many are lost.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, unless there is no room for it."""
        text = self.format(record)
        if self._num_lost:
            lost = logging.makeLogRecord(
                {
                    "name": record.name,
                    "levelno": logging.WARNING,
                    "levelname": "WARNING",
                    "msg": "%d log lines are lost: stderr was not read",
                    "args": (self._num_lost,),
                }
            )
            text = f"{self.format(lost)}\n{text}"
        try:
            written = self._write(f"{text}\n".encode(errors="backslashreplace"))
        except OSError:  # nobody is left to be told
            written = True
        self._num_lost = 0 if written else self._num_lost + 1

    def _write(self, data: bytes) -> bool:
        # A pipe with room has room for PIPE_BUF at least, so none of these writes can block.
        wait_ms = 0 if self._num_lost else PATIENCE_MS
        for start in range(0, len(data), select.PIPE_BUF):
            piece = data[start : start + select.PIPE_BUF]
            while piece:
                if not self._poll.poll(wait_ms):
                    return False
                piece = piece[os.write(self._fd, piece) :]
        return True


class ConsoleHandler(logging.Handler):
    """Prints through a rich console, so that lines scroll above its live view."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        self._console.print(
            self.format(record), markup=False, highlight=False, soft_wrap=True, emoji=False
        )


def set_up_logging(config: LogConfig, console: Console | None) -> None:
    """Configure the root logger once, for a process that is ours."""
    handler: logging.Handler
    if console is not None:
        handler = ConsoleHandler(console)
    else:
        handler = PatientHandler(sys.stderr.fileno())
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    if config.requests:  # asked for by name, whatever the level
        logging.getLogger("trioserve.requests").setLevel(logging.INFO)
    for noisy in ("hypercorn", "httpx", "huggingface_hub", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
