"""Logging of the server process: text lines, JSON lines, or lines above a live view.

The library side only gets loggers and never configures them; this module is used by
``trioserve.main`` alone.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from rich.console import Console

    from trioserve.config.schema import LogConfig

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
        return orjson.dumps(entry, default=str).decode()


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
    handler = logging.StreamHandler(sys.stderr) if console is None else ConsoleHandler(console)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for noisy in ("hypercorn", "httpx", "huggingface_hub", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
