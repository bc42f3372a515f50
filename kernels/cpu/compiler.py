"""From a kernel's Python to machine code, once, and from kept machine code to an address.

numba finds the types and writes the code for LLVM, LLVM makes it fast. Left to itself numba has
LLVM do that for each function and again for each that calls it, so what lies at the bottom is made
fast once a level, which took most of the time. Here numba leaves LLVM's code as it is
(``NUMBA_OPT=0``), and all of a kernel is made fast together, once, for the processor that numba
would have chosen.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import llvmlite.binding as llvm
import numba
import numpy as np
from attrs import frozen
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

from trioserve.kernels import cache
from trioserve.kernels.cpu import processor

log = logging.getLogger("trioserve.kernels")

# Not "nnan" nor "ninf": a row that overflows must show it, or the sampler cannot fail it alone.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
OPTIONS = {"fastmath": FASTMATH, "error_model": "numpy"}
# Ways to call a function from Python or C; ours are called from each other.
WITHOUT_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
PACKAGE = "trioserve.kernels.cpu"
ENTRY = "trioserve_kernel"
KERNELS = {
    "plan": "trioserve.kernels.cpu.paged_attention",
    "attend": "trioserve.kernels.cpu.paged_attention",
    "panel_product": "trioserve.kernels.cpu.panel_product",
    "whole_product": "trioserve.kernels.cpu.whole_product",
    "decoder": "trioserve.kernels.cpu.decoder",
    "best": "trioserve.kernels.cpu.best",
}
"""Where each kernel's function is, and its ``Params``."""

# The entry drops what numba returns beside the result: which exception, and kernels raise none.
# Their arrays are views of memory that is not numba's, so there are no references to count; a
# definition here goes before numba's own, which LLVM may not look into.
_FRAME = """
define void @NRT_incref(ptr %object) alwaysinline {{ ret void }}
define void @NRT_decref(ptr %object) alwaysinline {{ ret void }}
declare i32 @{native}(ptr, ptr, ptr)
define void @{entry}(ptr %params) {{
  %result = alloca ptr
  %error = alloca ptr
  %status = call i32 @{native}(ptr %result, ptr %error, ptr %params)
  ret void
}}
"""


@frozen(kw_only=True)
class Target:
    """What code is made for, as numba has it: the machine, or NUMBA_CPU_NAME and _FEATURES."""

    triple: str
    processor: str
    features: str

    @staticmethod
    def current() -> Target:
        name = numba.config.CPU_NAME
        return Target(
            triple=llvm.get_process_triple(),
            processor=llvm.get_host_cpu_name() if name is None else name,
            features=processor.LISTED,
        )

    def machine(self) -> llvm.TargetMachine:
        """LLVM's compiler for it, with the settings that numba's has."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.processor,
            features=self.features,
            opt=3,
            reloc="static" if self.triple.startswith("x86") else "default",
            codemodel="jitdefault",
            jit=True,
        )


@frozen(eq=False)
class Code:
    """Machine code in this process; it goes with this object."""

    address: int
    _engine: object


def kernel(name: str) -> tuple[Callable, type[ctypes.Structure]]:
    """The function and parameters of one of KERNELS."""
    module = importlib.import_module(KERNELS[name])
    return getattr(module, name), module.Params


def digest(function: Callable, params: type[ctypes.Structure]) -> str | None:
    """What the code follows from, in 32 hexadecimal digits; None where the source is not known."""
    source = inspect.getsourcefile(function)
    if source is None or not Path(source).is_file():
        return None
    target = Target.current()
    made = hashlib.sha256()
    for part in (
        *(function.__qualname__, str(params._fields_), repr(sorted(FASTMATH))),
        *(target.triple, target.processor, target.features),
        *(str(sys.version_info[:2]), numba.__version__, np.__version__),
        str(llvm.llvm_version_info),
        *(path.name for path in _sources()),
    ):
        made.update(f"{part}\n".encode())
    for path in (*_sources(), Path(source)):
        made.update(hashlib.sha256(path.read_bytes()).digest())
    return made.hexdigest()[:32]


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.py"))


def compile_kernel(
    function: Callable, params: type[ctypes.Structure], *, alone: bool = False
) -> bytes:
    """Machine code for this processor, as an object file with one entry, ENTRY.

    Raises:
        Exception: whatever numba raises where it does not work on this machine.
        RuntimeError: the kernel needs something that only numba has.
    """
    signature = types.void(types.CPointer(numba.from_dtype(np.dtype(params))))
    with _not_optimized(), _no_machine_code() if alone else contextlib.nullcontext():
        compiled = numba.cfunc(signature, **OPTIONS)(function)
    native = compiled.native_name.removeprefix("cfunc.")
    module = llvm.parse_assembly(_FRAME.format(native=native, entry=ENTRY))
    module.link_in(llvm.parse_assembly(compiled.inspect_llvm()))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != ENTRY:
            value.linkage = llvm.Linkage.internal
    machine = Target.current().machine()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.loop_unrolling = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    needed = [value.name for value in module.functions if value.is_declaration]
    if foreign := [name for name in needed if name.startswith(("NRT_", "numba_", "Py"))]:
        raise RuntimeError(f"kernel {function.__name__} calls {', '.join(foreign)}")
    return machine.emit_object(module)


@contextlib.contextmanager
def _not_optimized() -> Iterator[None]:
    level = numba.config.OPT
    numba.config.OPT = type(level)(0)
    try:
        yield
    finally:
        numba.config.OPT = level


class _Listing(JITCodeLibrary):
    """Code for LLVM that numba itself makes no machine code of. Its callers contain it."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


@contextlib.contextmanager
def _no_machine_code() -> Iterator[None]:
    """numba makes no machine code of functions that kernels call: they are compiled as parts of
    them. It did, slowly, of each and again in each that calls it, to be called from Python."""
    context = cpu_target.target_context
    codegen = context.codegen()
    kind = codegen._library_class
    codegen._library_class = _Listing
    # numba wants a built-in function for each, to be called from Python and to know it by. Nobody
    # calls it, and this refuses arguments.
    context.get_executable = lambda library, fndesc, env: [library].copy
    for module in [sys.modules[name] for name in sys.modules if name.startswith(PACKAGE)]:
        for value in vars(module).values():
            if isinstance(value, Dispatcher):
                value.targetoptions.update(WITHOUT_WRAPPERS)
    try:
        yield
    finally:
        del context.get_executable
        codegen._library_class = kind


def load_code(code: bytes) -> Code:
    """Put an object file into this process. Functions it calls are the process's own, or those
    made known by ``llvm.add_symbol``.

    Raises:
        RuntimeError: it is none, or for another machine.
    """
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), Target.current().machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Code(engine.get_function_address(ENTRY), engine)


def missing(directory: Path, names: Iterable[str]) -> list[str]:
    """Those of KERNELS that ``directory`` does not hold."""
    return [name for name in names if not _file_of(directory, name).exists()]


def compile_into(directory: Path, names: Iterable[str]) -> None:
    """Compile some of KERNELS for other processes, or later; in this one no function of this
    package is called from Python any more. Raises as ``compile_kernel``."""
    for name in names:
        cache.store(_file_of(directory, name), compile_kernel(*kernel(name), alone=True))


def _file_of(directory: Path, name: str) -> Path:
    made = digest(*kernel(name))
    assert made is not None, "the sources are this package's own"
    return cache.file_of(directory, name, made)


if __name__ == "__main__":
    compile_into(Path(sys.argv[1]), sys.argv[2:])
