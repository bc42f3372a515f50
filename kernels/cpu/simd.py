"""Vector building blocks for the kernels, as LLVM code.

numba has no vector types and keeps small arrays in memory; a tile of a matrix product needs its
sums in registers. Addresses are plain integers: the callers do their own arithmetic on them.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import processor

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)

AVX512 = processor.has("avx512f")


def _tile(rows: int, width: int, unroll: int, *, half: bool = False):
    """An intrinsic: C[rows, width] (+)= A[rows, k] · B[k, width], sums held in registers.

    Arguments: address of A and its row stride in elements, the same for B and C, k, and whether
    to add to C (1) or to replace it (0). ``unroll`` steps of k go to sums of their own: a fused
    multiply-add takes four cycles and two can begin in each, so eight must be under way. With
    ``half`` B is float16; its stride is in its own elements.
    """
    vector = ir.VectorType(F32, width)

    @intrinsic
    def tile(typing_context, a, lda, b, ldb, c, ldc, k, accumulate):
        def codegen(context, builder, signature, args):
            _emit_tile(builder, vector, rows, unroll, half, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), codegen

    return tile


def _emit_tile(builder, vector, rows, unroll, half, a, lda, b, ldb, c, ldc, k, accumulate):
    lda, ldc = (builder.mul(stride, _index(4)) for stride in (lda, ldc))  # in bytes
    ldb = builder.mul(ldb, _index(2 if half else 4))
    targets = [_row(builder, c, ldc, row, vector) for row in range(rows)]
    zeros = ir.Constant(vector, [0.0] * vector.count)

    def steps(at, sums):
        """Multiply and add one step of k for each set of sums."""
        results = []
        for step in range(unroll if len(sums) > rows else 1):
            column = builder.add(at, _index(step))
            line = builder.add(b, builder.mul(column, ldb))
            if half and rows == 1:
                prefetch(builder, builder.add(line, _index(AHEAD)))
            line = _load_line(builder, line, vector, half)
            for row in range(rows):
                factor = builder.add(a, builder.mul(lda, _index(row)))
                factor = builder.add(factor, builder.mul(column, _index(4)))
                factor = builder.load(builder.inttoptr(factor, F32.as_pointer()), align=4)
                factor = _splat(builder, factor, vector)
                results.append(multiply_add(builder, factor, line, sums[step * rows + row]))
        return results

    sums = [zeros] * (rows * unroll)
    whole = builder.and_(k, _index(-unroll))
    sums = _emit_loop(builder, _index(0), whole, unroll, sums, steps)
    while len(sums) > rows:
        middle = len(sums) // 2
        sums = [builder.fadd(x, y) for x, y in zip(sums[:middle], sums[middle:], strict=True)]
    sums = _emit_loop(builder, whole, k, 1, sums, steps)
    _emit_store(builder, targets, sums, accumulate)


def _emit_store(builder, targets, values, accumulate):
    """Store the vectors or, unless ``accumulate`` is 0, add them to what is there."""
    adding = builder.icmp_signed("!=", accumulate, _index(0))
    with builder.if_else(adding) as (then, otherwise):
        with then:
            for pointer, value in zip(targets, values, strict=True):
                value = builder.fadd(builder.load(pointer, align=4), value)
                builder.store(value, pointer, align=4)
        with otherwise:
            for pointer, value in zip(targets, values, strict=True):
                builder.store(value, pointer, align=4)


def _load_line(builder, address, vector, half):
    """A vector of float32, widened where memory holds float16."""
    if not half:
        return builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)
    narrow = ir.VectorType(ir.HalfType(), vector.count)
    line = builder.load(builder.inttoptr(address, narrow.as_pointer()), align=2)
    return builder.fpext(line, vector)


def _emit_loop(builder, first, end, step, values, body):
    """``for i in range(first, end, step): values = body(i, values)``; gives the last values."""
    entry = builder.basic_block
    loop = builder.append_basic_block("loop")
    done = builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", first, end), loop, done)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(first, entry)
    phis = [builder.phi(value.type) for value in values]
    results = body(index, phis)
    following = builder.add(index, _index(step))
    index.add_incoming(following, builder.basic_block)
    for phi, value, result in zip(phis, values, results, strict=True):
        phi.add_incoming(value, entry)
        phi.add_incoming(result, builder.basic_block)
    last = builder.basic_block
    builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
    builder.position_at_end(done)
    outcome = []
    for value, result in zip(values, results, strict=True):
        phi = builder.phi(value.type)
        phi.add_incoming(value, entry)
        phi.add_incoming(result, last)
        outcome.append(phi)
    return outcome


AHEAD = 5120
"""How many bytes before they are used weights are asked for. The processor's own look-ahead begins
anew at each page and each panel; a step of one row takes a quarter less with this."""


def prefetch(builder, address):
    """Ask for the cache line at an address; one that is not mapped does no harm."""
    flags = [ir.Constant(I32, flag) for flag in (0, 3, 1)]  # to read, into all caches, data
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *flags)


def multiply_add(builder, value, factor, addend):
    """value * factor + addend in one instruction where the processor has one; float32, or vectors.

    For aarch64, where all have it, LLVM joins the two only if it is told to; for x86-64 being told
    to would be a call of the C library where there is none.
    """
    if processor.MACHINE == "aarch64":
        kind = value.type
        suffix = "f32" if kind == F32 else f"v{kind.count}f32"
        return call(builder, f"llvm.fma.{suffix}", kind, value, factor, addend)
    product = builder.fmul(value, factor, ("contract",))
    return builder.fadd(product, addend, ("contract",))


def fused(builder, factor, value, addend):
    """factor * value + addend of float32 vectors in one rounding: nothing is left to the compiler
    to join or not, so that the bits do not depend on what stands around it."""
    kind = factor.type
    return call(builder, f"llvm.fma.v{kind.count}f32", kind, factor, value, addend)


def call(builder, name, result, *args, flags=()):
    """Call a function of LLVM's by its full name."""
    function = builder.module.globals.get(name)
    if function is None:
        kinds = [arg.type for arg in args]
        function = ir.Function(builder.module, ir.FunctionType(result, kinds), name=name)
    return builder.call(function, args, fastmath=flags)


def _index(value):
    return ir.Constant(I64, value)


def at(builder, address, offset):
    """The address so many bytes on."""
    return builder.add(address, _index(offset))


def filled(vector, value):
    """A constant of the same value in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def load(builder, address, kind, align=4):
    """What is at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder, value, address, align=4):
    """Put a value there."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def broadcast(builder, address, vector):
    """The one value at an address, in all lanes."""
    return _splat(builder, load(builder, address, vector.element), vector)


def _row(builder, base, stride, row, vector):
    address = builder.add(base, builder.mul(stride, _index(row)))
    return builder.inttoptr(address, vector.as_pointer())


def _splat(builder, value, vector):
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        first, empty, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    )


WIDTH = 16  # columns of a tile; the narrow ones serve blocks of 8 tokens
# A tile's 16 columns are one register of AVX-512 (of 32), two of AVX2 (of 16).
tile1 = _tile(1, WIDTH, 4)
tile2 = _tile(2, WIDTH, 4 if AVX512 else 2)
tile3 = _tile(3, WIDTH, 4 if AVX512 else 2)
tile4 = _tile(4, WIDTH, 2 if AVX512 else 1)
tile6 = _tile(6, WIDTH, 2 if AVX512 else 1)
narrow1, narrow4 = _tile(1, 8, 4), _tile(4, 8, 2)
# Each sum in the order of k, whatever the number of rows: what a row gets is the same to the bit.
exact1, exact4, exact6 = _tile(1, WIDTH, 1), _tile(4, WIDTH, 1), _tile(6, WIDTH, 1)
exact_narrow1, exact_narrow4 = _tile(1, 8, 1), _tile(4, 8, 1)

# Weights: panels of 32 columns where two registers of AVX-512 hold a line, else of 16.
PANEL = 32 if AVX512 else 16
half1 = _tile(1, PANEL, 4, half=True)
half2 = _tile(2, PANEL, 2, half=True)
half3 = _tile(3, PANEL, 2, half=True)
half4 = _tile(4, PANEL, 1, half=True)
half6 = _tile(6, PANEL, 1, half=True)
panel1 = _tile(1, PANEL, 4)
panel2 = _tile(2, PANEL, 2)
panel4 = _tile(4, PANEL, 1)
panel6 = _tile(6, PANEL, 1)
exact_panel1 = _tile(1, PANEL, 1)


@intrinsic
def widen(typing_context, source, target):
    """Copy one line of a panel from float16 to float32."""

    def codegen(context, builder, signature, args):
        vector = ir.VectorType(F32, PANEL)
        line = _load_line(builder, args[0], vector, True)
        builder.store(line, builder.inttoptr(args[1], vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


# exp(f) on [-ln(2)/2, ln(2)/2] by Taylor's series to degree 7: error below 6e-9, under half a ulp.
_EXP_TERMS = [1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0]


@intrinsic
def exp_f32(typing_context, x):
    """exp(x) for float32 to about 1 ulp; 0 below -87, infinite above 88, NaN stays NaN.

    Written so that LLVM turns a loop over it into vectors; the library call stays scalar.
    """

    def codegen(context, builder, signature, args):
        (x,) = args
        low, high = _const(-87.0), _const(88.0)
        clamped = builder.select(builder.fcmp_ordered(">", x, low), x, low)  # NaN becomes low
        clamped = builder.select(builder.fcmp_ordered("<", clamped, high), clamped, high)
        floor = builder.module.declare_intrinsic("llvm.floor", [F32])
        scaled = multiply_add(builder, clamped, _const(1.4426950408889634), _const(0.5))
        whole = builder.call(floor, [scaled])
        rest = multiply_add(builder, whole, _const(-0.693145751953125), x)
        rest = multiply_add(builder, whole, _const(-1.428606765330187e-06), rest)
        value = _const(_EXP_TERMS[0])
        for term in _EXP_TERMS[1:]:
            value = multiply_add(builder, value, rest, _const(term))
        power = builder.add(builder.fptosi(whole, I32), ir.Constant(I32, 127))
        scale = builder.bitcast(builder.shl(power, ir.Constant(I32, 23)), F32)
        value = builder.fmul(value, scale)
        value = builder.select(builder.fcmp_ordered("<", x, low), _const(0.0), value)
        return builder.select(builder.fcmp_ordered(">", x, high), _const(float("inf")), value)

    return types.float32(types.float32), codegen


def _const(value):
    return ir.Constant(F32, value)


@intrinsic
def load_f32(typing_context, address, index):
    """The float32 at ``address`` + 4 * ``index``."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], F32.as_pointer())
        return builder.load(builder.gep(pointer, [args[1]]), align=4)

    return types.float32(types.intp, types.intp), codegen


@intrinsic
def floats(typing_context, address):
    """``address`` as a pointer to float32, for ``numba.carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], F32.as_pointer())

    return types.CPointer(types.float32)(types.intp), codegen


@intrinsic
def int32s(typing_context, address):
    """``address`` as a pointer to int32, for ``numba.carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], I32.as_pointer())

    return types.CPointer(types.int32)(types.intp), codegen


@intrinsic
def int64s(typing_context, address):
    """``address`` as a pointer to int64, for ``numba.carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], I64.as_pointer())

    return types.CPointer(types.int64)(types.intp), codegen
