"""Memory that has been freed, given back to the system."""

from __future__ import annotations

import ctypes


def give_memory_back() -> None:
    """Have glibc return what it keeps of freed memory; with other C libraries nothing is done.

    What loading and warming up take and free is as much as the model itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
