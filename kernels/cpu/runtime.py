"""How CPU kernels are compiled, cached and run in parallel.

A kernel is a C function ``void kernel(params*)`` that numba compiles; a *team* calls it once per
thread, all with the same parameters. Within it ``thread_index``, ``team_size``, ``team_barrier``
and ``next_unit`` divide the work.

The team is OpenMP's: ``GOMP_parallel`` of the library that torch has loaded, called directly. So
the kernels and torch's operators share one set of threads. numba's own threading layers would
bring a second set (``workqueue`` measured 28 us a region and slowed torch's operators
threefold, both sets spinning for the same cores), and ``parallel=True`` costs seconds to compile.
Without an OpenMP library in the process the kernels run on the calling thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels import cache
from trioserve.kernels.cpu import compiler

log = logging.getLogger("trioserve.kernels")

LINE = 64  # bytes of a cache line
FASTMATH = compiler.FASTMATH
_CALLED_BY_KERNELS = ("GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
cache_directory = cache.cache_directory


class Team:
    """The threads that run kernels, and the compiler that makes them.

    Args:
        threads: how many run each kernel; 1 runs it on the caller.
        cache: directory for compiled kernels, or None to compile in each process anew.
        exact: whether what a token gets must be the same to the bit whatever is computed beside it.
        tiles: use the processor's tile unit if there is one. ``exact`` does without: few rows go to
            the vector unit, whose digits are others.
        byte_products: use the processor's products of bytes if there are any; not with ``exact``.
        word_products: use its products of words of 16 bits if there are any; ``exact`` may, for
            what a row gets of them is the same in any company.
        rounded: where the tile unit does a product, round what is multiplied to bfloat16 instead of
            taking two parts of it: one product for three. What a row gets then depends on whether
            there are few or many.

    Attributes:
        tiles: the configuration of the tile unit, or None.
        tile_setup: the same for sums of whole numbers, which are exact on any unit.
        byte_products: whether few rows times codes are computed in whole numbers of 24 bits.
        word_products: whether all others are in whole numbers of 16 bits, but for those of tiles.
        parts: bfloat16 values that stand for one in products of the tile unit, 1 or 2.
    """

    def __init__(
        self,
        threads: int,
        cache: Path | None = None,
        *,
        exact: bool = False,
        tiles: bool = True,
        byte_products: bool = True,
        word_products: bool = True,
        rounded: bool = False,
    ) -> None:
        openmp = _openmp()
        address = openmp.get("GOMP_parallel")
        self.threads = threads if address else 1
        self.exact = exact
        self.tile_setup = _tile_unit() if tiles else None
        self.tiles = None if exact else self.tile_setup
        self.byte_products = byte_products and not exact and _has_byte_products()
        self.word_products = word_products and _has_word_products()
        self.parts = 1 if rounded and self.tiles is not None else 2
        self._cache = cache
        self.num_compiled = 0
        self.num_loaded = 0
        self._kernels: dict[Callable, Kernel] = {}
        prototype = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        )
        self._parallel = prototype(address) if address else None
        alone = ctypes.cast(_single_thread, ctypes.c_void_p).value
        for name in _CALLED_BY_KERNELS:  # without OpenMP too they have to be linked
            llvm.add_symbol(name, openmp.get(name, alone))

    def compile(self, function: Callable, params: type[ctypes.Structure]) -> Kernel:
        """Compile ``function(pointer to params)``, or load it as compiled before; once a team.

        Raises:
            Exception: whatever numba raises where it does not work on this machine.
        """
        if function not in self._kernels:
            self._kernels[function] = self._compile(function, params)
        return self._kernels[function]

    def _compile(self, function: Callable, params: type[ctypes.Structure]) -> Kernel:
        digest = None if self._cache is None else compiler.digest(function, params)
        if self._cache is None or digest is None:
            self.num_compiled += 1
            return self._kernel(compiler.compile_kernel(function, params))
        path = cache.file_of(self._cache, function.__name__, digest)
        code = cache.load(path)
        if code is None:
            with cache.turn(self._cache):
                if (code := cache.load(path)) is None:
                    self.num_compiled += 1
                    code = compiler.compile_kernel(function, params)
                    cache.store(path, code)
                    return self._kernel(code)
        self.num_loaded += 1
        return self._kernel(code)

    def _kernel(self, code: bytes) -> Kernel:
        return Kernel(self, compiler.load_code(code))

    def describe(self) -> str:
        """For the log: where the kernels came from and what runs them."""
        threads = "torch's OpenMP" if self._parallel is not None else "no OpenMP found"
        units = [", AVX-512"] if _has_avx512() else []
        units += (
            [f", tile unit ({self.parts * 2 - 1} products for one)"]
            if self.tiles is not None
            else []
        )
        units += [", byte products"] if self.byte_products else []
        units += [", word products"] if self.word_products else []
        return (
            f"{self.num_compiled} kernels compiled, {self.num_loaded} from the cache; "
            f"{self.threads} threads, {threads}{''.join(units)}"
        )

    def run(self, kernel: Kernel, params: ctypes.Structure, threads: int) -> None:
        """Call the kernel on ``threads`` threads and wait for all."""
        if threads > 1 and self._parallel is not None:
            self._parallel(kernel.address, ctypes.addressof(params), threads, 0)
        else:
            kernel.call(ctypes.addressof(params))


class Kernel:
    """A compiled kernel. ``call`` runs it on the calling thread, without the GIL."""

    def __init__(self, team: Team, code: compiler.Code) -> None:
        self.team = team
        self._code = code  # owns what is at the address
        self.address = code.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, params: ctypes.Structure, threads: int | None = None) -> None:
        self.team.run(self, params, self.team.threads if threads is None else threads)


@ctypes.CFUNCTYPE(ctypes.c_int)
def _single_thread() -> int:
    return 0


@intrinsic
def thread_index(typing_context):
    """Index of the calling thread in its team, from 0."""

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(ir.IntType(32), [])
        function = _declare(builder, "omp_get_thread_num", function_type)
        return builder.sext(builder.call(function, []), ir.IntType(64))

    return types.intp(), codegen


@intrinsic
def team_size(typing_context):
    """Threads that there are: OpenMP may give fewer than were asked for (OMP_THREAD_LIMIT)."""

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(ir.IntType(32), [])
        function = _declare(builder, "omp_get_num_threads", function_type)
        return builder.sext(builder.call(function, []), ir.IntType(64))

    return types.intp(), codegen


@intrinsic
def team_barrier(typing_context):
    """Wait until every thread of the team is here; what was written before is seen after."""

    def codegen(context, builder, signature, args):
        function = _declare(builder, "GOMP_barrier", ir.FunctionType(ir.VoidType(), []))
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_kernel(typing_context, kernel, params):
    """Call another kernel, from within one: its address and that of its parameters."""

    def codegen(context, builder, signature, args):
        pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer])
        function = builder.inttoptr(args[0], function_type.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def next_unit(typing_context, address):
    """Take the next unit of work: add 1 to the int64 at ``address``, return what it was."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.intp(types.intp), codegen


def aligned_bytes(count: int) -> np.ndarray:
    """Zeros, uint8 [count], that begin with a cache line."""
    whole = np.zeros(count + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + count]


def _tile_unit() -> np.ndarray | None:
    from trioserve.kernels.cpu import amx  # which imports this module

    return amx.configuration() if amx.allow() else None


def _has_avx512() -> bool:
    from trioserve.kernels.cpu import simd

    return simd.AVX512


def _has_byte_products() -> bool:
    from trioserve.kernels.cpu import digits  # which imports this module

    return digits.PRESENT


def _has_word_products() -> bool:
    from trioserve.kernels.cpu import words

    return words.PRESENT


def _openmp() -> dict[str, int]:
    """Addresses of the functions of the OpenMP library that the process has loaded, if it has.

    torch's wheels for x86-64 make it known to all; those for aarch64 leave it to torch alone, so it
    is asked for through torch's own library. LLVM's own look-up would see nothing before numba has
    compiled its first function.
    """
    for library in (None, "libtorch_cpu.so"):
        try:
            functions = ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
            return {
                name: ctypes.cast(getattr(functions, name), ctypes.c_void_p).value
                for name in ("GOMP_parallel", *_CALLED_BY_KERNELS)
            }
        except (OSError, AttributeError):  # not loaded; no such function
            continue
    return {}


def _declare(builder, name, function_type):
    module = builder.module
    return module.globals.get(name) or ir.Function(module, function_type, name=name)
