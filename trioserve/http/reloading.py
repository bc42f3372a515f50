"""Something made from files, and made anew when they change."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import trio

from trioserve.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

T = TypeVar("T")
Fingerprint = tuple[tuple[int, ...] | None, ...]


class Reloaded(Generic[T]):
    """A value made from files. Used by one loop; only ``get`` writes here.

    Args:
        what: names the value in log lines, in the plural.
        paths: the files.
        make: makes the value; raises ConfigError in one line where a file cannot be used.
    """

    def __init__(self, what: str, paths: Sequence[str], make: Callable[[], T]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._make = make
        self._made_of = _fingerprint(self._paths)
        self._value = make()
        self._fault = ""
        self._next_look_s = -math.inf

    def get(self) -> T:
        """The value. The files are looked at once a second at most; where the new ones cannot be
        used, the old value stays, and the log says so once."""
        if not self._paths:
            return self._value
        now = trio.current_time()
        if now >= self._next_look_s:
            self._next_look_s = now + LOOK_EVERY_S
            self._look()
        return self._value

    def _look(self) -> None:
        # Taken before the files are read: a change in between shows at the next look.
        found = _fingerprint(self._paths)
        if found == self._made_of:
            self._fault = ""  # put back as it was
            return
        try:
            self._value = self._make()
        except ConfigError as error:
            # Tried again each time, for the clock of a file system may hide a second change.
            if str(error) != self._fault:
                self._fault = str(error)
                log.error("%s; the old %s stay in use", error, self._what)
            return
        self._made_of, self._fault = found, ""
        log.info("%s have changed and are in use: %s", self._what, ", ".join(self._paths))


def _fingerprint(paths: tuple[str, ...]) -> Fingerprint:
    return tuple(map(_fingerprint_of, paths))


def _fingerprint_of(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
