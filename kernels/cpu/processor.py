"""What of the processor the kernels may use.

All kernels ask here, and only for what LLVM may use in the code that it makes: numba passes it a
processor's name and features, the machine's own or those in NUMBA_CPU_NAME and NUMBA_CPU_FEATURES,
which a user sets, or ``[kernels] instructions``. Compiled kernels are kept by these two; what a
kernel chooses by follows from them, so kernels of different choices are never mixed up.
"""

from __future__ import annotations

import ctypes
import platform

import numba
from numba.core.codegen import get_host_cpu_features

MACHINE = platform.machine()
_AT_HWCAP = 16  # of getauxval: what Linux says of an aarch64 processor, a bit each
_ASIMDDP = 1 << 20  # dot products of bytes


def _listed() -> str:
    """What is there and may be used, in LLVM's words."""
    listed = numba.config.CPU_FEATURES
    if listed is None:
        listed = get_host_cpu_features()
        if MACHINE == "aarch64" and _hardware_capabilities() & _ASIMDDP:
            # LLVM asks Linux for some features only; it has this one of processors it knows.
            listed = numba.config.CPU_FEATURES = f"{listed},+dotprod".lstrip(",")
    return listed


def _hardware_capabilities() -> int:
    ask = ctypes.CDLL(None).getauxval
    ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return ask(_AT_HWCAP)


LISTED = _listed()
FEATURES = frozenset(name[1:] for name in LISTED.split(",") if name.startswith("+"))


def has(*names: str) -> bool:
    """Whether all these features, by LLVM's names, may be used."""
    return FEATURES.issuperset(names)
