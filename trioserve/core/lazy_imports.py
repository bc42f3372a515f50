"""Modules that torch and numba import for uses that a worker has not: loaded only when touched.

``import torch`` runs, beside what computes, the Python descriptions of every operator for tensors
without data (``_meta_registrations``), which are for compiling and tracing, and kernels in other
languages for GPUs. That is a third of its time. Here such a module is put in place unrun, by the
standard library's ``LazyLoader``: its first attribute that is asked for runs it, so whoever does
need one gets it, and a torch that has none of these names is imported as ever.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

LAZY = frozenset(
    {
        "torch._meta_registrations",
        "torch.distributed._meta_registrations",
        "torch._native",
        "yaml",  # numba's, for a file of settings in the working directory
    }
)


class LazyFinder:
    """A finder, to be the first of ``sys.meta_path``, for the modules named ``names``."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with a loader that waits; None for all others."""
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = importlib.util.LazyLoader(spec.loader)
                return spec
        return None


@contextmanager
def lazily(names: frozenset[str] = LAZY) -> Iterator[None]:
    """While the block runs, importing one of ``names`` runs nothing of it yet."""
    finder = LazyFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
