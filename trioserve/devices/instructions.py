"""``[kernels] instructions``: the most of a processor's instructions that may be used.

Each library of the worker is told in its own words, before it is loaded.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from attrs import frozen

from trioserve.errors import ModelError


@frozen
class Level:
    """A set of instructions.

    Attributes:
        needs: names in /proc/cpuinfo.
        llvm: a processor that has no others and, of these, what it lacks; in LLVM's words.
        torch, onednn, mkl, fbgemm: the most that these are to use. The code of MKL and FBGEMM
            ends at AVX-512 in any case where float32 and float16 are multiplied.
    """

    needs: tuple[str, ...]
    llvm: tuple[str, str]
    torch: str
    onednn: str
    mkl: str
    fbgemm: str


_V3 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_BYTES = (*_V4, "avx512_vnni", "avx512vbmi")
_LLVM_V3 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt"
_LLVM_V4 = f"{_LLVM_V3},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
_LLVM_BYTES = f"{_LLVM_V4},+avx512vnni,+avx512vbmi"
LEVELS = {
    "avx2": Level(_V3, ("x86-64-v3", _LLVM_V3), "avx2", "AVX2", "AVX2", "AVX2"),
    "avx512": Level(
        _V4, ("x86-64-v4", _LLVM_V4), "avx512", "AVX512_CORE", "AVX512", "AVX512"
    ),
    "vnni": Level(
        _BYTES, ("x86-64-v4", _LLVM_BYTES), "avx512", "AVX512_CORE_VNNI", "AVX512", "AVX512_E1"
    ),
    "amx": Level(
        (*_BYTES, "amx_tile", "amx_bf16", "amx_int8"),
        ("x86-64-v4", f"{_LLVM_BYTES},+amx-tile,+amx-bf16,+amx-int8"),
        "avx512",
        "AVX512_CORE_AMX",
        "AVX512",
        "AVX512_E1",
    ),
}  # fmt: skip
"""From the least to the most."""


def limit(wanted: str, present: frozenset[str], environment: MutableMapping[str, str]) -> None:
    """Tell numba, torch, oneDNN, MKL and FBGEMM, in ``environment``, what they may use at most;
    nothing for "auto". What the user has set there for all programs is replaced: the
    configuration is for this one.

    Args:
        wanted: "auto" or a name of LEVELS.
        present: what the processor has, by the names in /proc/cpuinfo.

    Raises:
        ModelError: the processor has less than ``wanted``.
    """
    if wanted == "auto":
        return
    level = LEVELS[wanted]
    if missing := [name for name in level.needs if name not in present]:
        fits = [name for name, other in LEVELS.items() if present.issuperset(other.needs)]
        raise ModelError(
            f"[kernels] instructions = {wanted} cannot be used: this processor has no "
            f"{', '.join(missing)}; set it to {' or '.join([*fits[-1:], 'auto'])}"
        )
    name, features = level.llvm
    environment.update(
        NUMBA_CPU_NAME=name,
        NUMBA_CPU_FEATURES=features,
        ATEN_CPU_CAPABILITY=level.torch,
        ONEDNN_MAX_CPU_ISA=level.onednn,
        MKL_ENABLE_INSTRUCTIONS=level.mkl,
        FBGEMM_ENABLE_INSTRUCTIONS=level.fbgemm,
    )
