"""What this machine can do at most, as torch's own kernels measure it: memory and arithmetic.

Each figure is the best of several turns, with all threads that torch was given. Reading is the sum
of products of two arrays, copying counts what is read and what is written. The peaks of matrix
products are of square matrices, in float32 and, where the processor has instructions for them, in
bfloat16 and 8-bit integers. A product of this project's own that splits float32 into two bfloat16
does three of the latter's, so a third of that peak is its limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from attrs import fields_dict, frozen

COPIED_BYTES = 768 * 2**20  # beyond any cache of a server's processor
SIDE = 2048
TURNS = 5
PRODUCTS: dict[str, set[str]] = {  # flags of /proc/cpuinfo, one of which makes a kind quick
    "fp32": set(),
    "bf16": {"amx_bf16", "avx512_bf16"},
    "int8": {"amx_int8", "avx512_vnni", "avx_vnni"},
}


@frozen(kw_only=True)
class Machine:
    """Bytes and operations a second; a peak that the processor has not is None."""

    read_gb_per_s: float
    copy_gb_per_s: float
    fp32_gflops: float
    bf16_gflops: float | None
    int8_gops: float | None

    def or_better(self, other: Machine) -> Machine:
        """The better figure of each kind: what others do meanwhile can only make one worse."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in fields_dict(Machine)}
        return Machine(
            **{name: None if None in pair else max(pair) for name, pair in pairs.items()}
        )


def best_s(call: Callable[[], object], turns: int = TURNS) -> float:
    """Seconds of the quickest of ``turns`` calls, after one that does not count."""
    call()
    least = float("inf")
    for _ in range(turns):
        began = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - began)
    return least


def measure_machine(
    *, num_bytes: int = COPIED_BYTES, side: int = SIDE, used: Collection[str] | None = None
) -> Machine:
    """Take the figures, some seconds; arrays of ``num_bytes``, square matrices of ``side``.

    ``used`` are the flags of what torch may use, None for all that the processor has: without
    instructions for it a product of bfloat16 takes a minute.
    """
    read_s, copy_s = memory_s(num_bytes)
    flags = processor_flags() if used is None else set(used)
    gigaflops = {
        kind: round(2e-9 * side**3 / product_s(kind, side), 1)
        for kind, needed in PRODUCTS.items()
        if not needed or needed & flags
    }
    return Machine(
        read_gb_per_s=round(2e-9 * num_bytes / read_s, 1),
        copy_gb_per_s=round(2e-9 * num_bytes / copy_s, 1),
        fp32_gflops=gigaflops["fp32"],
        bf16_gflops=gigaflops.get("bf16"),
        int8_gops=gigaflops.get("int8"),
    )


def memory_s(num_bytes: int) -> tuple[float, float]:
    """Seconds to read two arrays of so many bytes, and to copy one to the other."""
    import torch

    first, second = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    copied = best_s(lambda: second.copy_(first))
    return best_s(lambda: torch.dot(first, second)), copied


def product_s(kind: str, side: int) -> float:
    """Seconds of the product of two square matrices."""
    import torch

    left, right = torch.randn(side, side), torch.randn(side, side)
    if kind == "bf16":
        left, right = left.bfloat16(), right.bfloat16()
    if kind == "int8":
        left, right = (left * 10).to(torch.int8), (right * 10).to(torch.int8)
    product = torch._int_mm if kind == "int8" else torch.mm
    return best_s(lambda: product(left, right))


def processor_flags() -> set[str]:
    """What /proc/cpuinfo says the first processor has; empty where it does not tell."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()
