"""What attention on the tile unit is made of, as LLVM code: words of two bfloat16 values, weights
out of scores, products. ``trioserve.kernels.cpu.tile_attention`` says what they are for.

Addresses are plain integers. A *line* is 16 float32 values or words.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import amx, simd
from trioserve.kernels.cpu.amx import TILE_BYTES
from trioserve.kernels.cpu.runtime import LINE

SIDE = 16  # rows, columns and inputs of a tile
SEGMENT = 256  # context tokens whose scores are held at once
UNROLL = 8  # vectors of a row that are gone through without a loop
PITCH = (SEGMENT + SIDE) * 4  # bytes from one row of scores to the next: not a power of 2, whose
# lines would fall into few places of the cache
AT_ONCE = 4  # tiles of sums that are under way at once for few queries

_LINE, _WORDS = ir.VectorType(simd.F32, SIDE), ir.VectorType(simd.I32, SIDE)
_HALVES = ir.VectorType(ir.IntType(16), 2 * SIDE)


def _like(kind, value):
    """A constant, in every lane where there are lanes."""
    lanes = isinstance(kind, ir.VectorType)
    return ir.Constant(kind, [value] * kind.count if lanes else value)


def _pair(builder, value, words):
    """Float32 values as the words that stand for them in the cache. A NaN stays one."""
    half, upper = _like(words, 0x8000), _like(words, -0x10000)
    high = builder.and_(builder.add(builder.bitcast(value, words), half), upper)
    low = builder.fsub(value, builder.bitcast(high, value.type))
    low = builder.add(builder.bitcast(low, words), half)
    word = builder.or_(high, builder.lshr(low, _like(words, 16)))
    number = builder.fcmp_ordered("ord", value, value)
    return builder.select(number, word, _like(words, 0x7FC07FC0))


@intrinsic
def pair(typing_context, value):
    """The word for a float32, int32."""

    def codegen(context, builder, signature, args):
        return _pair(builder, args[0], simd.I32)

    return types.int32(types.float32), codegen


@intrinsic
def store_across(typing_context, source, pitch, count, first, target, target_pitch):
    """16 dimensions of ``count`` tokens, ``pitch`` bytes apart, to 16 lines of the keys: tokens are
    the lanes from ``first`` on. The other lanes are left alone, another thread may write them."""

    def codegen(context, builder, signature, args):
        source, pitch, count, first, target, target_pitch = args
        lines = []
        final = builder.sub(count, simd._index(1))
        for lane in range(SIDE):
            token = builder.sub(simd._index(lane), first)
            token = builder.select(builder.icmp_signed("<", token, final), token, final)
            below = builder.icmp_signed("<", token, simd._index(0))
            token = builder.select(below, simd._index(0), token)
            line = _read(builder, _at(builder, source, (token, pitch)))
            lines.append(_pair(builder, line, _WORDS))
        mask = builder.and_(
            _inside(builder, simd._index(0), builder.add(first, count)),
            builder.not_(_inside(builder, simd._index(0), first)),
        )
        for row, line in enumerate(_transpose(builder, lines)):
            place = _at(builder, target, (target_pitch, row))
            place = builder.inttoptr(place, _WORDS.as_pointer())
            alignment = ir.Constant(simd.I32, 4)
            name = "llvm.masked.store.v16i32.p0"
            simd.call(builder, name, ir.VoidType(), line, place, alignment, mask)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), codegen


def _transpose(builder, lines):
    """16 vectors of 16, rows for columns: at each step pairs of rows change halves, quarters, …"""
    step = SIDE // 2
    while step:
        kept = [i + (0 if i & step == 0 else SIDE - step) for i in range(SIDE)]
        moved = [i + (step if i & step == 0 else SIDE) for i in range(SIDE)]
        masks = [ir.Constant(ir.VectorType(simd.I32, SIDE), order) for order in (kept, moved)]
        lines = [
            builder.shuffle_vector(lines[row & ~step], lines[row | step], masks[row & step != 0])
            for row in range(SIDE)
        ]
        step //= 2
    return lines


def _read(builder, address):
    return builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=4)


def _write(builder, vector, address):
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()), align=4)


def _at(builder, base, *steps):
    """base + the sum of steps, each a number of bytes or a value, or a pair to multiply."""
    for step in steps:
        if isinstance(step, tuple):
            first, second = (simd._index(x) if isinstance(x, int) else x for x in step)
            step = builder.mul(first, second)
        elif isinstance(step, int):
            step = simd._index(step)
        base = builder.add(base, step)
    return base


def _splat(builder, value):
    return simd._splat(builder, value, _LINE)


def _numbers(value):
    return ir.Constant(_LINE, [value] * SIDE)


def _twice(builder, value):
    """High and low parts of float32 vectors, each twice in a word."""
    half, upper = (ir.Constant(_WORDS, [number] * SIDE) for number in (0x8000, -0x10000))
    high = builder.add(builder.bitcast(value, _WORDS), half)
    rest = builder.fsub(value, builder.bitcast(builder.and_(high, upper), _LINE))
    low = builder.add(builder.bitcast(rest, _WORDS), half)
    odd = ir.Constant(ir.VectorType(simd.I32, 2 * SIDE), [i | 1 for i in range(2 * SIDE)])
    parts = (builder.bitcast(part, _HALVES) for part in (high, low))
    return [builder.shuffle_vector(part, part, odd) for part in parts]


@intrinsic
def split_query(typing_context, source, scale, high, low):
    """16 values of a query, scaled, to a row of two tiles."""

    def codegen(context, builder, signature, args):
        source, scale, *targets = args
        value = builder.fmul(_read(builder, source), _splat(builder, scale))
        for part, target in zip(_twice(builder, value), targets, strict=True):
            _write(builder, part, target)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp, types.intp), codegen


def _inside(builder, at, valid):
    """Which lanes of vector number ``at`` lie before ``valid``."""
    lanes = ir.Constant(_WORDS, list(range(SIDE)))
    left = builder.sub(valid, builder.mul(at, simd._index(SIDE)))
    left = simd._splat(builder, builder.trunc(left, simd.I32), _WORDS)
    return builder.icmp_signed("<", lanes, left)


def _each_vector(builder, vectors, unroll, values, one):
    """``values = one(number, values)`` for vectors from 0 on, ``unroll`` of them a turn."""

    def some(at, values):
        for step in range(unroll):
            values = one(builder.add(at, simd._index(step)), values)
        return values

    return simd._emit_loop(builder, simd._index(0), vectors, unroll, values, some)


def _largest_of(whole: bool):
    """An intrinsic: the largest of ``vectors`` times 16 scores and of ``before``; unless ``whole``,
    those from ``valid`` on do not count. A NaN may be passed over: the weights still are NaN."""

    @intrinsic
    def largest(typing_context, scores, vectors, valid, before):
        def codegen(context, builder, signature, args):
            scores, vectors, valid, before = args

            def one(at, values):
                line = _read(builder, _at(builder, scores, (at, LINE)))
                if not whole:
                    nothing = _numbers(float("-inf"))
                    line = builder.select(_inside(builder, at, valid), line, nothing)
                greater = builder.fcmp_ordered(">", line, values[0])
                return [*values[1:], builder.select(greater, line, values[0])]

            first = [_splat(builder, before)] * 2
            found = _each_vector(builder, vectors, UNROLL if whole else 1, first, one)
            greater = builder.fcmp_ordered(">", *found)
            found = builder.select(greater, *found)
            name = "llvm.vector.reduce.fmax.v16f32"
            return simd.call(builder, name, simd.F32, found, flags=("nnan",))

        return types.float32(types.intp, types.intp, types.intp, types.float32), codegen

    return largest


# 2^f on [-1/2, 1/2], a minimax polynomial: error below 1e-7, a hundredth of a weight's own.
_POWER_TERMS = [
    0.001327647151906967,
    0.009675541330689708,
    0.05550713274962138,
    0.24022119723933932,
    0.693146967063865,
    1.000000071654657,
]


def _power_of_two(builder, x):
    """2^x for x up to 0, not below 2^-126; NaN stays NaN."""
    low = _numbers(-126.0)
    x = builder.select(builder.fcmp_ordered(">", low, x), low, x)
    # The sum's last bits are the exponent. To subtract in floats would be left out by numba's
    # compiler, which takes all sums for associative.
    rounded = builder.bitcast(builder.fadd(x, _numbers(1.5 * 2**23 + 127)), _WORDS)
    whole = builder.sub(rounded, ir.Constant(_WORDS, [0x4B40007F] * SIDE))
    rest = builder.fsub(x, builder.sitofp(whole, _LINE))
    value = _numbers(_POWER_TERMS[0])
    for term in _POWER_TERMS[1:]:
        value = builder.fmul(value, rest, ("contract",))
        value = builder.fadd(value, _numbers(term), ("contract",))
    shift = ir.Constant(_WORDS, [23] * SIDE)
    power = builder.shl(rounded, shift)
    return builder.fmul(value, builder.bitcast(power, _LINE))


def _weights_of(whole: bool):
    """An intrinsic: ``vectors`` times 16 scores become weights, 2^(score - largest), or 0 from
    ``valid`` on unless ``whole``: their high parts twice in a word in place of the scores, their
    low parts at ``low``. The vector at ``total`` grows by them."""

    @intrinsic
    def weights(typing_context, scores, low, vectors, valid, total, largest):
        def codegen(context, builder, signature, args):
            scores, low, vectors, valid, total, largest = args
            largest = _splat(builder, largest)

            def one(at, values):
                place = _at(builder, scores, (at, LINE))
                weight = builder.fsub(_read(builder, place), largest)
                weight = _power_of_two(builder, weight)
                if not whole:
                    inside = _inside(builder, at, valid)
                    weight = builder.select(inside, weight, _numbers(0.0))
                targets = (place, _at(builder, low, (at, LINE)))
                for part, target in zip(_twice(builder, weight), targets, strict=True):
                    _write(builder, part, target)
                return [*values[1:], builder.fadd(values[0], weight)]

            totals = [_read(builder, total), _numbers(0.0)]
            totals = _each_vector(builder, vectors, UNROLL if whole else 1, totals, one)
            _write(builder, builder.fadd(*totals), total)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5, types.float32), codegen

    return weights


largest, largest_whole = _largest_of(False), _largest_of(True)
weights, weights_whole = _weights_of(False), _weights_of(True)


@intrinsic
def times(typing_context, address, vectors, factor):
    """Multiply vectors in place."""

    def codegen(context, builder, signature, args):
        address, vectors, factor = args
        factor = _splat(builder, factor)

        def one(at, nothing):
            place = _at(builder, address, (at, LINE))
            _write(builder, builder.fmul(_read(builder, place), factor), place)
            return []

        simd._emit_loop(builder, simd._index(0), vectors, 1, [], one)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), codegen


@intrinsic
def sum_of(typing_context, address):
    """The sum of a vector."""

    def codegen(context, builder, signature, args):
        name = "llvm.vector.reduce.fadd.v16f32"
        start, line = ir.Constant(simd.F32, -0.0), _read(builder, args[0])
        return simd.call(builder, name, simd.F32, start, line, flags=("reassoc",))

    return types.float32(types.intp), codegen


def _multiply(builder, row_tiles, columns, load_a):
    """Sums in tiles 0 to 3, row by row, += both parts of the rows · tiles 4 and 5."""
    for part in range(2):
        for row in range(row_tiles):
            load_a(part, row)
            for column in range(columns):
                tiles = (columns * row + column, 6 + row, 4 + column)
                amx._call(builder, "llvm.x86.tdpbf16ps", *map(amx._tile, tiles))


def _sums(builder, row_tiles, columns, out, pitch):
    """Numbers and addresses of the tiles of sums."""
    for row in range(row_tiles):
        for column in range(columns):
            place = _at(builder, out, (pitch, SIDE * row), LINE * column)
            yield columns * row + column, place


def _store_sums(builder, sums, pitch):
    for tile, address in sums:
        pointer = builder.inttoptr(address, amx._BYTES)
        amx._call(builder, "llvm.x86.tilestored64", amx._tile(tile), pointer, pitch)


def _scores_of(row_tiles: int, columns: int):
    """An intrinsic: scores of 16 queries a row tile against 16 keys a column.

    Arguments: address of the queries' tiles, groups of 16 dimensions, address of the keys'
    addresses, bytes from one dimension of the keys to the next, address of the scores.
    """

    @intrinsic
    def scores(typing_context, queries, groups, listed, key_pitch, out):
        def codegen(context, builder, signature, args):
            queries, groups, listed, key_pitch, out = args
            keys = [_listed(builder, listed, simd._index(column)) for column in range(2 * columns)]
            pitch = simd._index(PITCH)
            for tile in range(row_tiles * columns):
                amx._call(builder, "llvm.x86.tilezero", amx._tile(tile))

            def group(at, nothing):
                for column, key in enumerate(keys[:columns]):
                    ahead = _at(builder, keys[columns + column], (at, TILE_BYTES))
                    _ask(builder, ahead, simd._index(LINE))
                    place = _at(builder, key, (builder.mul(at, key_pitch), SIDE))
                    amx._load(builder, 4 + column, place, key_pitch)

                def load(part, row):
                    place = _at(builder, queries, (at, 2 * TILE_BYTES), part * TILE_BYTES)
                    place = _at(builder, place, (groups, row * 2 * TILE_BYTES))
                    amx._load(builder, 6 + row, place, simd._index(LINE))

                _multiply(builder, row_tiles, columns, load)
                return []

            simd._emit_loop(builder, simd._index(0), groups, 1, [], group)
            _store_sums(builder, _sums(builder, row_tiles, columns, out, pitch), pitch)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), codegen

    return scores


def _listed(builder, listed, number):
    pointer = builder.inttoptr(_at(builder, listed, (number, 8)), simd.I64.as_pointer())
    return builder.load(pointer)


def _mix_of(row_tiles: int, columns: int):
    """An intrinsic: sums of 16 rows a row tile and 16 lanes a column, (+)= weights · values.

    Arguments: addresses of the weights' high and low parts and of the values' addresses, groups of
    16 tokens, bytes to the first lane, bytes from one token's values to the next's and from one row
    of sums to the next (the same), address of the sums, and whether to add to them.
    """

    @intrinsic
    def mix(typing_context, high, low, listed, groups, lane, pitch, out, accumulate):
        def codegen(context, builder, signature, args):
            high, low, listed, groups, lane, pitch, out, accumulate = args
            sums = list(_sums(builder, row_tiles, columns, out, pitch))
            adding = builder.icmp_signed("!=", accumulate, simd._index(0))
            with builder.if_else(adding) as (then, otherwise):
                with then:
                    for tile, address in sums:
                        amx._load(builder, tile, address, pitch)
                with otherwise:
                    for tile, _ in sums:
                        amx._call(builder, "llvm.x86.tilezero", amx._tile(tile))

            def group(at, nothing):
                value = builder.add(_listed(builder, listed, at), lane)
                ahead = builder.add(_listed(builder, listed, builder.add(at, simd._index(1))), lane)
                for column in range(columns):
                    _ask(builder, _at(builder, ahead, LINE * column), pitch)
                    amx._load(builder, 4 + column, _at(builder, value, LINE * column), pitch)

                def load(part, row):
                    place = _at(builder, (high, low)[part], (at, LINE), SIDE * PITCH * row)
                    amx._load(builder, 6 + row, place, simd._index(PITCH))

                _multiply(builder, row_tiles, columns, load)
                return []

            simd._emit_loop(builder, simd._index(0), groups, 1, [], group)
            _store_sums(builder, sums, pitch)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), codegen

    return mix


scores11, scores12, scores21, scores22 = (_scores_of(r, c) for r in (1, 2) for c in (1, 2))
mix11, mix12, mix21, mix22 = (_mix_of(r, c) for r in (1, 2) for c in (1, 2))


@intrinsic
def few_scores(typing_context, queries, groups, listed, key_pitch, out, ahead_pitch):
    """Scores of one tile of queries against AT_ONCE times 16 keys; asks for what the following
    addresses of the list point to, lines ``ahead_pitch`` apart."""

    def codegen(context, builder, signature, args):
        queries, groups, listed, key_pitch, out, ahead_pitch = args
        keys = [_listed(builder, listed, simd._index(number)) for number in range(2 * AT_ONCE)]
        for tile in range(AT_ONCE):
            amx._call(builder, "llvm.x86.tilezero", amx._tile(tile))

        def group(at, nothing):
            first = builder.mul(at, simd._index(SIDE))
            amx._load(builder, 6, _at(builder, queries, (at, TILE_BYTES)), simd._index(LINE))
            for column in range(AT_ONCE):
                ahead = _at(builder, keys[AT_ONCE + column], (first, ahead_pitch))
                _ask(builder, ahead, ahead_pitch)
                place = _at(builder, keys[column], (first, key_pitch))
                amx._load(builder, 4 + column % 2, place, key_pitch)
                tiles = (column, 6, 4 + column % 2)
                amx._call(builder, "llvm.x86.tdpbf16ps", *map(amx._tile, tiles))
            return []

        simd._emit_loop(builder, simd._index(0), groups, 1, [], group)
        pitch = simd._index(PITCH)
        _store_sums(builder, _sums(builder, 1, AT_ONCE, out, pitch), pitch)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), codegen


def _ask(builder, address, pitch):
    for line in range(SIDE):
        simd.prefetch(builder, _at(builder, address, (pitch, line)))


def _few_mix_of(columns: int):
    """An intrinsic: sums of one tile of weights times 16 lanes a column of the values.

    Arguments: address of the weights and of the values' addresses, groups of 16 tokens, number of
    the first column, bytes from one token's values to the next's and from one row of sums to the
    next (the same), address of the sums.
    """

    @intrinsic
    def mix(typing_context, weights, listed, groups, first, pitch, out):
        def codegen(context, builder, signature, args):
            weights, listed, groups, first, pitch, out = args
            lane = builder.mul(first, simd._index(LINE))
            for tile in range(columns):
                amx._call(builder, "llvm.x86.tilezero", amx._tile(tile))

            def group(at, nothing):
                value = builder.add(_listed(builder, listed, at), lane)
                ahead = _listed(builder, listed, builder.add(at, simd._index(AT_ONCE)))
                ahead = _at(builder, ahead, (first, TILE_BYTES))
                amx._load(builder, 6, _at(builder, weights, (at, LINE)), simd._index(PITCH))
                for column in range(columns):
                    _ask(builder, _at(builder, ahead, column * TILE_BYTES), simd._index(LINE))
                    place = _at(builder, value, LINE * column)
                    amx._load(builder, 4 + column % 2, place, pitch)
                    tiles = (column, 6, 4 + column % 2)
                    amx._call(builder, "llvm.x86.tdpbf16ps", *map(amx._tile, tiles))
                return []

            simd._emit_loop(builder, simd._index(0), groups, 1, [], group)
            place = builder.add(out, lane)
            _store_sums(builder, _sums(builder, 1, columns, place, pitch), pitch)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return mix


few_mix1, few_mix2, few_mix4 = _few_mix_of(1), _few_mix_of(2), _few_mix_of(4)
