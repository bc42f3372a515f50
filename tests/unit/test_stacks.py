"""The stacks of all threads, written while they run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from trioserve import stacks

PROGRAM = """
import json, signal, threading, time
from trioserve.stacks import write_stacks

signal.signal(signal.SIGALRM, write_stacks)

def deep(n):
    return json.loads('{"a": [1, 2, 3]}', object_pairs_hook=dict) if n == 0 else deep(n - 1)

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        deep(20)

thread = threading.Thread(target=work, args=(1.0,))
thread.start()
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
work(1.0)
signal.setitimer(signal.ITIMER_REAL, 0)
thread.join()
"""


def test_threads_that_run_python_are_not_harmed() -> None:
    """faulthandler's way ends such a process within seconds, with Python 3.11."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert " in deep" in done.stderr
    first, _, rest = done.stderr.partition("Current thread ")
    assert first.startswith("Thread 0x")
    assert "Thread 0x" in rest


def test_both_threads_are_shown_and_no_lock_is_taken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ready, done = threading.Event(), threading.Event()

    def other_thread() -> None:
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=other_thread)
    thread.start()
    assert ready.wait(10)
    stacks.write_stacks(0, sys._getframe())
    done.set()
    thread.join()
    text = capfd.readouterr().err
    other, _, own = text.partition("Current thread ")
    assert "in other_thread" in other
    assert "in other_thread" not in own
    assert "in test_both_threads_are_shown" in own


def test_deep_stacks_are_cut() -> None:
    def deeper(n: int) -> list[str]:
        return list(stacks._stack(sys._getframe())) if n == 0 else deeper(n - 1)

    lines = deeper(stacks.MAX_FRAMES + 5)
    assert len(lines) == stacks.MAX_FRAMES + 1
    assert lines[-1] == "  ..."


def test_a_stderr_that_is_closed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", write)
    stacks.write_stacks(0, sys._getframe())
