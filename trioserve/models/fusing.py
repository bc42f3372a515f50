"""Which kernels a model needs: compiled ahead where they are not kept yet, and whether its layers
can run as one. Imports numba only when it is asked."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.models.attention import AttentionBackend, NumbaAttention

if TYPE_CHECKING:
    from trioserve.models.panels import PanelKernels

log = logging.getLogger("trioserve.kernels")

ATTENTION = ("plan", "attend")
LAYERS = ("panel_product", "decoder", "best")
WHOLE = ("whole_product",)  # beside LAYERS, for weights in whole numbers
COSTS = {
    "panel_product": 8.0,
    "attend": 5.0,
    "whole_product": 3.0,
    "decoder": 1.0,
    "best": 0.5,
    "plan": 0.5,
}
"""What each kernel takes to compile, as seconds or anything else: to share them out evenly."""
COST_OF_PROCESS = 1.5  # it imports torch and numba first
_CHILD = ("trioserve.models.lifeline", "trioserve.kernels.cpu.compiler")


def compile_ahead(
    names: Iterable[str], processes: int, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Compile the kernels of these names that are not kept yet, on some processors at once.

    Nothing is done where they cannot be kept. What fails is found and said where the kernel is
    made for the model, and what is missing is compiled there.

    Args:
        names: of ``kernels.cpu.compiler.KERNELS``.
        processes: at most so many, this one among them.
        tell: is given a line on what goes on, now and then.
    """
    try:
        from trioserve.kernels import cache
        from trioserve.kernels.cpu import compiler

        directory = cache.cache_directory()
        if directory is None or not compiler.missing(directory, names):
            return
        with cache.turn(directory, lambda: tell("another process compiles the kernels; waiting")):
            if left := compiler.missing(directory, names):
                tell(f"compiling {len(left)} kernels, once for this processor")
                ours, *others = shares(left, processes)
                with _children(directory, others):
                    compiler.compile_into(directory, ours)
    except Exception as error:  # a compiler has many ways to fail
        log.info("kernels are not compiled ahead: %s: %s", type(error).__name__, error)


def shares(names: Iterable[str], processes: int) -> list[list[str]]:
    """The kernels for each process, so that all take about as long; the first is this one's."""
    parts: list[list[str]] = [[] for _ in range(max(1, processes))]
    costs = [0.0] + [COST_OF_PROCESS] * (len(parts) - 1)
    for name in sorted(names, key=lambda name: -COSTS[name]):
        least = costs.index(min(costs))
        parts[least].append(name)
        costs[least] += COSTS[name]
    return [parts[0], *(part for part in parts[1:] if part)]


@contextlib.contextmanager
def _children(directory: Path, parts: list[list[str]]) -> Iterator[None]:
    """Processes that compile these, and are waited for; killed if this one cannot go on."""
    with contextlib.ExitStack() as stack:
        children = []
        for part in parts:
            command = [sys.executable, "-P", "-m", *_CHILD, str(directory), *part]
            # The lifeline's end closes with us, however we end; nothing is ever written to it.
            child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            stack.callback(child.kill)
            children.append(child)
        yield
        for child, part in zip(children, parts, strict=True):
            if child.wait() != 0:
                log.warning("the process that compiled %s ended with %s", part, child.returncode)


def compile_kernels(attention: AttentionBackend) -> PanelKernels | None:
    """The kernels of ``trioserve.models.panels``; None, and a line in the log, where they do not
    work or attention is not numba's."""
    if not isinstance(attention, NumbaAttention):
        return None
    try:
        from trioserve.models.panels import PanelKernels

        return PanelKernels.compile(attention.team)
    except Exception as error:  # a compiler has many ways to fail
        log.warning("layers run one by one: their kernel does not work here (%s)", error)
        return None
