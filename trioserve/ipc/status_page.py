"""A page of shared memory in which the worker says what it is at, and the watchdog's eyes.

Written by the worker's main thread alone, read by the parent without a word to the worker, so it
answers also when the GIL is held for ever. It is a memfd, inherited by descriptor: no file to
lose. Imports neither trio nor anything heavy.

There are two slots, written in turn, each with a sequence number and a checksum. A reader takes
the newest slot whose checksum is right: a slot that is being written, or that a killed writer
left half-done, is passed over, whatever the order in which the machine makes stores visible.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

PAGE_BYTES = 4096
IDLE = ""
PAUSED = "paused"  # waits for commands, as idle does, whatever there is to compute
MAX_OPERATION_BYTES = 64

_RECORD = struct.Struct(f"<Qddq{MAX_OPERATION_BYTES}s")  # sequence, since, budget, step, operation
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 128
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Status(NamedTuple):
    """What the worker was at when it last wrote."""

    operation: str = IDLE  # IDLE where it waits for work
    since_s: float = 0.0  # time.monotonic(), one clock for all processes of the machine
    budget_s: float = 0.0  # longest that ``operation`` may take
    step: int = 0


def create_page() -> int:
    """A new page; the caller owns the descriptor, which is not inheritable."""
    fd = os.memfd_create("trioserve-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        # A worker that shrank the page would end its reader with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


class StatusWriter:
    """The worker's side. The main thread alone calls it."""

    def __init__(self, fd: int) -> None:
        """Map the page; ``fd`` stays the caller's and may be closed."""
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._sequence = 0
        self._status = Status(since_s=time.monotonic())
        self._operation = b""
        self._write()

    def begin(self, operation: str, budget_s: float, step: int | None = None) -> None:
        """Say that ``operation`` begins now and takes at most ``budget_s``; replaces another."""
        # Cut after the last whole character: the reader shows it to people.
        raw = operation.encode()[:MAX_OPERATION_BYTES].decode(errors="ignore").encode()
        self._operation = raw
        self._status = Status(
            operation, time.monotonic(), budget_s, self._status.step if step is None else step
        )
        self._write()

    def step(self, step: int) -> None:
        """Say which step it is; the time that counts against the budget begins anew."""
        self._status = self._status._replace(since_s=time.monotonic(), step=step)
        self._write()

    def end(self) -> None:
        """Say that nothing runs."""
        self._operation = b""
        self._status = Status(since_s=time.monotonic(), step=self._status.step)
        self._write()

    @contextlib.contextmanager
    def operation(self, operation: str, budget_s: float) -> Iterator[None]:
        """``begin`` and ``end`` around a block."""
        self.begin(operation, budget_s)
        try:
            yield
        finally:
            self.end()

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()

    def _write(self) -> None:
        self._sequence += 1
        status = self._status
        record = _RECORD.pack(
            self._sequence, status.since_s, status.budget_s, status.step, self._operation
        )
        start = (self._sequence & 1) * _SLOT_BYTES
        slot = record + _CHECKSUM.pack(zlib.crc32(record))
        self._map[start : start + len(slot)] = slot


class StatusReader:
    """The parent's side."""

    def __init__(self, fd: int) -> None:
        """Map the page; ``fd`` stays the caller's and may be closed."""
        self._map = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
        self._sequence = 0
        self._last = Status()

    def read(self) -> Status:
        """The newest whole record; before the first one, an idle Status with ``since_s`` 0.

        Never waits for the writer: where both slots are being written, the record read last is
        returned once more. After ``close``, likewise.
        """
        if not self._map.closed:
            for slot in (0, 1):
                self._take(slot * _SLOT_BYTES)
        return self._last

    def _take(self, start: int) -> None:
        record = self._map[start : start + _RECORD.size]
        end = start + _RECORD.size
        (checksum,) = _CHECKSUM.unpack(self._map[end : end + _CHECKSUM.size])
        if zlib.crc32(record) != checksum:
            return
        sequence, since_s, budget_s, step, operation = _RECORD.unpack(record)
        if sequence > self._sequence:
            self._sequence = sequence
            name = operation.rstrip(b"\0").decode(errors="replace")
            self._last = Status(name, since_s, budget_s, step)

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()


# --------------------------------------------------------------------------------- from /proc


def process_cpu_seconds(pid: int) -> float | None:
    """Processor time all threads of the process have used, in seconds; None where it is gone."""
    fields = _stat(pid)
    return None if fields is None else (int(fields[11]) + int(fields[12])) * _TICK_S


def process_state(pid: int) -> str | None:
    """The kernel's one-letter state, "R", "S", "D", "T", "Z", …; None where it is gone."""
    fields = _stat(pid)
    return None if fields is None else fields[0]


def rss_bytes(pid: int) -> int | None:
    """Resident memory of the process in bytes; None where it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return None


def group_members(pgid: int) -> list[int]:
    """Live processes (zombies are not) of a process group."""
    members = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = _stat(int(name))
        if fields is not None and int(fields[2]) == pgid and fields[0] not in "ZX":
            members.append(int(name))
    return members


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/pid/stat from the third, the state, on: the second may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().decode(errors="replace").rpartition(")")[2].split() or None
    except OSError:
        return None


# ------------------------------------------------------------------------------- the judgement

Verdict = Literal["idle", "busy", "over budget"]
BUSY_CPU_S = 0.05


def judge(status: Status, cpu_seconds_now: float, cpu_before: float, now: float) -> Verdict:
    """What to make of a worker that says nothing. ``now`` is time.monotonic().

    An operation is "busy" within its budget, whether it holds the GIL or not, and "over budget"
    past it, whether it spins or sleeps (``explain`` tells which). Between operations the worker is
    "idle", unless it has used processor time since the last look.
    """
    if status.operation == IDLE:
        return "busy" if cpu_seconds_now - cpu_before > BUSY_CPU_S else "idle"
    return "over budget" if now - status.since_s > status.budget_s else "busy"


def explain(
    status: Status, cpu_seconds_now: float, cpu_before: float, interval_s: float, now: float
) -> str:
    """One line for people on a worker over budget; ``interval_s`` lies between the two looks."""
    used = max(0.0, cpu_seconds_now - cpu_before)
    if used > BUSY_CPU_S:
        how = f"computing, {used / max(interval_s, _TICK_S):.0%} of a processor"
    else:
        how = "using no processor time: it waits for something"
    return (
        f"{status.operation} (step {status.step}) has taken {now - status.since_s:.1f} s of its "
        f"{status.budget_s:g} s; it is {how}"
    )
