"""Digests on a CPU in one pass over memory: loops that numba compiles when they are first needed.

`box_sums` takes boxes in columns, wherever in the process they lie, and leaves a pair of residues for each. A row is
read once, in vectors, and multiplied with the constants of both families:

- Words of 8 and 16 bits with constants in halves of 12 bits, 16 products at a time: eight sums of two stay within 32
  bits (x86's `pmaddwd`, which LLVM makes of this), then are added up in 64.
- Words of 32 bits with whole constants; products have 55 bits, so that 256 of them stay within 64.
- float32 that is to be digested as bfloat16 is rounded on the way, to nearest and even, every NaN to the same.

numba cannot say vectors, so they are built as LLVM has them, for any processor. What is left of a row that is no whole
vector, or not contiguous, is multiplied word by word. All of it gives what `weightcast.transfer.digest` defines, to the
last bit. It is one module because numba keeps compiled code until the file of a function changes, not until others do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from weightcast.transfer.digest_constants import BIAS, HALF_BITS
from weightcast.transfer.residues import PRIME

__all__ = ["box_sums"]

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and not compiled these loops do not run")

_NARROW_LANES = 16
"""Narrow words in a vector."""
_UNROLLED = 8
"""Vectors of narrow words whose sums of products stay within 32 bits: 8 * 2 * -2^15 * 2^12 is the least of them."""
_WIDE_LANES = 8
_WIDE_TILE = 2048
"""Words of 32 bits of a row after which sums are taken apart: each lane has then added 256 products of 55 bits."""
_SCALARS = 128
"""Words multiplied one by one before their sums are reduced."""
_AHEAD = 2048
"""Bytes between what is read and what is fetched into the cache meanwhile. Where rows are short and lie apart, the next
row is fetched, or the same of the next box."""
_LINE = 64
"""Bytes that are fetched at once."""
_CARRY = (1 << 32) % PRIME
"""What 2^32 is congruent to. A sum is *folded* when what is above 2^32 has been replaced by so many times as much."""

_BYTE, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_LANES_16, _LANES_32 = ir.VectorType(_I16, _NARROW_LANES), ir.VectorType(_I32, _NARROW_LANES)
_PAIRS, _FOUR = ir.VectorType(_I32, _NARROW_LANES // 2), ir.VectorType(_I64, 4)
_Value = Any


def _jit(function: Callable[..., Any]) -> Any:
    """Compiled for any thread at once, and kept on disk where numba finds a place to write to."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no such place
        return njit(nogil=True)(function)


# ---- vectors


def _all(of: ir.Type, number: int) -> ir.Constant:
    return ir.Constant(of, [number] * of.count if isinstance(of, ir.VectorType) else number)


def _vector(builder: ir.IRBuilder, pointer: _Value, index: _Value, of: ir.Type, alignment: int) -> _Value:
    """The vector that begins at an element."""
    place = builder.bitcast(builder.gep(pointer, [index]), of.as_pointer())
    found = builder.load(place)
    found.align = alignment
    return found


def _fetch(builder: ir.IRBuilder, pointer: _Value, index: _Value) -> None:
    """Has the element's line in the cache by the time that it is read; any address may be asked for."""
    place = builder.bitcast(builder.gep(pointer, [index]), _BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [place, _I32(0), _I32(3), _I32(1)])


def _rounded(builder: ir.IRBuilder, bits: _Value) -> _Value:
    """Bits of float32 -> words of bfloat16, as 32-bit numbers whose upper halves mean nothing."""
    of = bits.type
    odd = builder.and_(builder.lshr(bits, _all(of, 16)), _all(of, 1))
    upper = builder.lshr(builder.add(builder.add(bits, _all(of, 0x7FFF)), odd), _all(of, 16))
    magnitude = builder.and_(bits, _all(of, 0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, _all(of, 0x7F800000))
    return builder.select(is_nan, _all(of, 0x7FC0), upper)


def _pointers(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> list[_Value]:
    """Arrays as pointers to their first elements, all else as it is."""
    return [
        context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, args, strict=True)
    ]


def _joined(builder: ir.IRBuilder, lanes: _Value) -> _Value:
    """The sum of the lanes of a vector."""
    total = builder.extract_element(lanes, _I32(0))
    for lane in range(1, lanes.type.count):
        total = builder.add(total, builder.extract_element(lanes, _I32(lane)))
    return total


def _narrow_words(builder: ir.IRBuilder, pointer: _Value, index: _Value, kind: types.Integer) -> _Value:
    """16 words as 32-bit numbers that have come from 16 bits."""
    if kind == types.uint32:
        bits = _vector(builder, pointer, index, _LANES_32, 4)
        return builder.sext(builder.trunc(_rounded(builder, bits), _LANES_16), _LANES_32)
    of = ir.VectorType(ir.IntType(kind.bitwidth), _NARROW_LANES)
    return builder.sext(_vector(builder, pointer, index, of, kind.bitwidth // 8), _LANES_32)


def _sums_of_pairs(builder: ir.IRBuilder, product: _Value) -> _Value:
    """16 products of 16-bit numbers -> 8 sums of neighbours: with the products, one instruction."""
    unset = ir.Constant(_LANES_32, ir.Undefined)
    return builder.add(*(
        builder.shuffle_vector(product, unset, ir.Constant(_PAIRS, list(range(first, _NARROW_LANES, 2))))
        for first in (0, 1)
    ))  # fmt: skip


def _widened(builder: ir.IRBuilder, pairs: _Value) -> _Value:
    """8 numbers of 32 bits -> 4 sums of two, of 64 bits."""
    unset, quarter = ir.Constant(_PAIRS, ir.Undefined), ir.VectorType(_I32, 4)
    return builder.add(*(
        builder.sext(builder.shuffle_vector(pairs, unset, ir.Constant(quarter, list(range(first, first + 4)))), _FOUR)
        for first in (0, 4)
    ))  # fmt: skip


@intrinsic
def _narrow_dot(
    context: Any, words: Any, at: Any, ahead: Any, count: Any, constants: Any, place: Any, width: Any
) -> Any:
    """2 sums: of `count` words, a multiple of 16, times the two families of `constants` from column `place`, exact.

    Words are int8, int16, or uint32 as float32 to be rounded. `width` is the length of a row of constants.
    """

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> _Value:
        words, at, ahead, count, constants, place, width = _pointers(context, builder, signature, args)
        kind = signature.args[0].dtype
        words = builder.gep(words, [at])
        sums = [cgutils.alloca_once_value(builder, _all(_FOUR, 0)) for _ in range(4)]

        def add_block(first: _Value, vectors: int) -> None:
            added: list[_Value] = [None] * 4
            for number in range(vectors):
                index = builder.add(first, _I64(_NARROW_LANES * number))
                if _NARROW_LANES * number * kind.bitwidth // 8 % _LINE == 0:
                    _fetch(builder, words, builder.add(index, ahead))
                word = _narrow_words(builder, words, index, kind)
                for row in range(4):
                    column = builder.add(builder.add(builder.mul(width, _I64(row)), place), index)
                    constant = builder.sext(_vector(builder, constants, column, _LANES_16, 2), _LANES_32)
                    pairs = _sums_of_pairs(builder, builder.mul(word, constant))
                    added[row] = pairs if number == 0 else builder.add(added[row], pairs)
            for total, pairs in zip(sums, added, strict=True):
                builder.store(builder.add(builder.load(total), _widened(builder, pairs)), total)

        block = _NARROW_LANES * _UNROLLED
        blocks = builder.sdiv(count, _I64(block))
        with cgutils.for_range(builder, blocks, intp=_I64) as loop:
            add_block(builder.mul(loop.index, _I64(block)), _UNROLLED)
        done = builder.mul(blocks, _I64(block))
        with cgutils.for_range(builder, builder.sdiv(builder.sub(count, done), _I64(_NARROW_LANES)), intp=_I64) as loop:
            add_block(builder.add(done, builder.mul(loop.index, _I64(_NARROW_LANES))), 1)
        upper, lower = (list(map(builder.load, sums[first::2])) for first in (0, 1))
        totals = [builder.add(builder.shl(a, _all(_FOUR, HALF_BITS)), b) for a, b in zip(upper, lower, strict=True)]
        return context.make_tuple(builder, signature.return_type, [_joined(builder, total) for total in totals])

    return types.UniTuple(types.int64, 2)(words, at, ahead, count, constants, place, width), code


@intrinsic
def _wide_dot(context: Any, words: Any, at: Any, ahead: Any, count: Any, constants: Any, place: Any, width: Any) -> Any:
    """2 sums: of `count` int32 words, a multiple of 8 and at most _WIDE_TILE, times the two rows of int32 `constants`
    from column `place`; folded, see _CARRY.
    """

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> _Value:
        words, at, ahead, count, constants, place, width = _pointers(context, builder, signature, args)
        words, upper = builder.gep(words, [at]), _all(_FOUR, 32)
        sums = [cgutils.alloca_once_value(builder, _all(_FOUR, 0)) for _ in range(4)]

        def halves(pair: _Value) -> tuple[_Value, _Value]:
            """Two 32-bit numbers in each lane, as 64-bit numbers."""
            return builder.ashr(builder.shl(pair, upper), upper), builder.ashr(pair, upper)

        with cgutils.for_range(builder, builder.sdiv(count, _I64(_WIDE_LANES)), intp=_I64) as loop:
            index = builder.mul(loop.index, _I64(_WIDE_LANES))
            _fetch(builder, words, builder.add(index, ahead))
            word = halves(_vector(builder, words, index, _FOUR, 4))
            for row in range(2):
                column = builder.add(builder.add(builder.mul(width, _I64(row)), place), index)
                constant = halves(_vector(builder, constants, column, _FOUR, 4))
                for total, one, other in zip(sums[2 * row : 2 * row + 2], word, constant, strict=True):
                    builder.store(builder.add(builder.load(total), builder.mul(one, other)), total)
        folded = []
        for total in map(builder.load, sums):
            high, low = builder.ashr(total, upper), builder.and_(total, _all(_FOUR, 0xFFFFFFFF))
            folded.append(builder.add(builder.mul(high, _all(_FOUR, _CARRY)), low))
        totals = [_joined(builder, builder.add(*folded[first : first + 2])) for first in (0, 2)]
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(types.int64, 2)(words, at, ahead, count, constants, place, width), code


@intrinsic
def _word_at(context: Any, words: Any, at: Any) -> Any:
    """One word, as digested."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> _Value:
        words, at = _pointers(context, builder, signature, args)
        found = builder.load(builder.gep(words, [at]))
        if signature.args[0].dtype == types.uint32:
            found = builder.trunc(_rounded(builder, found), _I16)
        return builder.sext(found, _I64)

    return types.int64(words, at), code


# ---- rows and boxes


@_jit
def _folded(number: int) -> int:
    """A number below 2^34 that is congruent to an int64 modulo the prime: 2^32 is congruent to _CARRY."""
    return (number >> 32) * _CARRY + (number & 0xFFFFFFFF)


@_jit
def _one_by_one(words: Any, at: int, stride: int, count: int, whole: Any, place: int, step: int) -> Any:
    """Congruent sums over `count` words, `stride` elements apart, whose constants are `step` columns apart."""
    first = second = 0
    for begin in range(0, count, _SCALARS):
        a = b = 0
        for i in range(begin, min(begin + _SCALARS, count)):
            word = _word_at(words, at + i * stride)
            a += word * np.int64(whole[0, place + i * step])
            b += word * np.int64(whole[1, place + i * step])
        first, second = first + _folded(a), second + _folded(b)
    return first, second


def _in_vectors(words: Any, at: Any, ahead: Any, count: Any, whole: Any, halves: Any, place: Any) -> Any:
    """How many of `count` contiguous words are taken by vectors, and numbers congruent to the sums over these."""
    raise NotImplementedError  # numba has it, by the type of `words`


def _narrow_row(words: Any, at: Any, ahead: Any, count: Any, whole: Any, halves: Any, place: Any) -> Any:
    done = count - count % _NARROW_LANES
    first, second = _narrow_dot(words, at, ahead, done, halves, place, halves.shape[1])
    return done, first, second


def _wide_row(words: Any, at: Any, ahead: Any, count: Any, whole: Any, halves: Any, place: Any) -> Any:
    done, first, second = count - count % _WIDE_LANES, 0, 0
    for begin in range(0, done, _WIDE_TILE):
        a, b = _wide_dot(words, at + begin, ahead, min(_WIDE_TILE, done - begin), whole, place + begin, whole.shape[1])
        first, second = first + a, second + b
    return done, first, second


@overload(_in_vectors)
def _in_vectors_of(words: Any, at: Any, ahead: Any, count: Any, whole: Any, halves: Any, place: Any) -> Any:
    return _wide_row if words.dtype == types.int32 else _narrow_row


@_jit
def _times(one: int, other: int) -> np.int64:
    """The product of two residues; it needs all 64 bits."""
    return np.int64(np.uint64(one) * np.uint64(other) % np.uint64(PRIME))


@_jit
def _sums_of_constants(whole: Any, prefix: Any, place: int, count: int, step: int) -> Any:
    """Residues of the sums of both families over `count` columns, `step` apart."""
    if step == 1:
        a, b = prefix[0, place + count] - prefix[0, place], prefix[1, place + count] - prefix[1, place]
    else:
        a = b = 0
        for column in range(place, place + count * step, step):
            a, b = a + whole[0, column], b + whole[1, column]
    return a % PRIME, b % PRIME


@_jit
def _sums_of_rows(words: Any, at: int, ahead: int, n: Any, s: Any, p: Any, step: Any, whole: Any, halves: Any) -> Any:
    """Residues of the sums over the last two dimensions of a box from `at`."""
    inner, rows = len(n) - 1, len(n) - 2
    contiguous = s[inner] == 1 and step[inner] == 1
    a_high = a_low = b_high = b_low = 0
    for i in range(n[rows]):
        done, a, b = 0, 0, 0
        if contiguous:
            done, a, b = _in_vectors(words, at, ahead, n[inner], whole, halves, p[inner])
        if done < n[inner]:
            rest, column = at + done * s[inner], p[inner] + done * step[inner]
            e, f = _one_by_one(words, rest, s[inner], n[inner] - done, whole, column, step[inner])
            a, b = a + e, b + f
        column = p[rows] + i * step[rows]
        a, b = _folded(a) * whole[0, column], _folded(b) * whole[1, column]
        a_high, a_low = a_high + (a >> 32), a_low + (a & 0xFFFFFFFF)
        b_high, b_low = b_high + (b >> 32), b_low + (b & 0xFFFFFFFF)
        at += s[rows]
    return (a_high * _CARRY + a_low) % PRIME, (b_high * _CARRY + b_low) % PRIME


@_jit
def box_sums(
    words: Any,
    start: Any,
    size: Any,
    stride: Any,
    place: Any,
    thin: Any,
    turn: int,
    whole: Any,
    halves: Any,
    prefix: Any,
    begin: int,
    end: int,
    sums: Any,
) -> None:
    """Residues of boxes `begin` to `end` - 1 of k into `sums` (2, end - begin) int64, without the GIL.

    `words` are all that can be named: int8, int16 or int32 words, or uint32 as float32 to be digested as bfloat16.
    `start` (k,) is the index of a box's first element in it, `size` and `stride` (k, D), D >= 2, are in elements, the
    last dimension the one along which sums are taken in vectors. `place` (k, D) is the column where the constants of
    each dimension begin: in `whole` (2, m) int32, in `halves` (4, m) int16 (upper and lower half of the first family,
    then of the second), and in `prefix` (2, m + 1) int64, sums of all columns before one. With `turn` >= 0 only a
    sample counts: `thin` (k, 3) has the dimension it thins, the step, and the index of the box's first element there.
    """
    width = size.shape[1]
    inner, rows = width - 1, width - 2
    n, s = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
    p, step = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
    for k in range(begin, end):
        at = start[k]
        n[:], s[:], p[:], step[:] = size[k], stride[k], place[k], 1
        if turn >= 0:
            d, every = thin[k, 0], thin[k, 1]
            first = (turn - thin[k, 2]) % every
            n[d] = max(0, (n[d] - first + every - 1) // every)
            at, p[d], s[d], step[d] = at + first * s[d], p[d] + first, s[d] * every, every
        outer, total, other_total = 1, BIAS, BIAS
        for d in range(width):
            a, b = _sums_of_constants(whole, prefix, p[d], n[d], step[d])
            total, other_total = _times(total, a), _times(other_total, b)
            outer *= n[d] if d < rows else min(n[d], 1)
        ahead = _AHEAD // words.itemsize
        if n[inner] < ahead and s[rows] != n[inner]:
            next_box = k + 1 < end and n[rows] * n[inner] < ahead
            ahead = start[k + 1] - start[k] if next_box else s[rows]
        for number in range(outer):
            row, left, weight, other_weight = at, number, 1, 1
            for d in range(rows - 1, -1, -1):
                i = left % n[d]
                left //= n[d]
                row += i * s[d]
                weight = _times(weight, whole[0, p[d] + i * step[d]])
                other_weight = _times(other_weight, whole[1, p[d] + i * step[d]])
            a, b = _sums_of_rows(words, row, ahead, n, s, p, step, whole, halves)
            total, other_total = (total + _times(a, weight)) % PRIME, (other_total + _times(b, other_weight)) % PRIME
        sums[0, k - begin], sums[1, k - begin] = total, other_total
