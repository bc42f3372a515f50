"""Shared by the process tests: where the test children are, and a look at what is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHILDREN = Path(__file__).parent / "children"


def open_fds() -> dict[str, str]:
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fds[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed them
            continue
    return fds


def has_children() -> bool:
    """Whether this process has a child, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a descriptor or a child behind."""
    before = open_fds()
    assert not has_children()
    yield
    assert open_fds() == before
    assert not has_children()


@pytest.fixture
def child_env() -> Callable[[str], dict[str, str]]:
    """The environment in which ``child`` and ``parent`` are found and play ``fault``."""

    def make(fault: str = "") -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return inherited | {"PYTHONPATH": str(CHILDREN), "FAULT": fault}

    return make
