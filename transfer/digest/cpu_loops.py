"""Digests on a CPU in one pass over memory: loops that numba compiles when they are first needed.

`box_sums` takes boxes in columns, wherever in the process they lie, and leaves a pair of residues for each. A row is
read in vectors, a block of them at a time, and multiplied with the constants of both families:

- Words of 8 and 16 bits with constants in halves of 12 bits, 16 products at a time. Eight sums of two stay within 32
  bits (LLVM makes x86's `pmaddwd` of this).
- Words of 32 bits with whole constants; products have 55 bits, so that 256 of them stay within 64.
- float32 that is to be digested as bfloat16 is rounded on the way, to nearest and even. Every NaN becomes the same.

A block's sums are multiplied with its row's constant, still in vectors, so that blocks may come in any order. They come
from several rows in turn, because reading one place after the other does not keep memory busy. Besides, to wait for the
sum of each row in the innermost loop would take as long as a short row itself.

The same words give the peak of a box: the largest of their bits without the sign. It tells if any of them is infinite
or no number. All words of a tile are joined by OR, which costs half an instruction a vector. A tile's peak is searched
only if all bits of the largest exponents are set there, as they are not among weights below 2.

numba has no vectors, so they are built in LLVM's own terms, for any processor. Words that are not contiguous are
multiplied one by one. All of it gives what `weightcast.transfer.digest.definition` defines, to the last bit. It is one
module because numba keeps compiled code until the file of a function changes, not until others do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from weightcast.transfer.digest.constants import BIAS, CONSTANT_BITS, HALF_BITS, LINE_BYTES
from weightcast.transfer.digest.residues import PRIME

__all__ = ["box_sums"]

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and not compiled these loops do not run")

_STREAMS = 4
"""Rows that are read side by side. Memory gives one reader more at several places than at one, and a constant that has
been loaded serves all rows.
"""
_TILE_BLOCKS = 64
"""Blocks of rows whose weighted sums are added up before these are split in halves. A block's is at most 2^56."""
_JOINED = 32
"""Index of the words joined by OR, behind the sums of lanes."""
_SCALARS = 128
"""Words multiplied one by one before their sums are reduced."""
_AHEAD = 512
"""Bytes between what is read and what is fetched into the cache meanwhile."""
_SMALL = 16 << 10
"""A box of fewer bytes is read while the next one is fetched."""
_CARRY = (1 << 32) % PRIME
"""The residue of 2^32. A *folded* sum is its lower 32 bits plus so many times what is above them."""

_EXPONENT = {"uint8": 0x7C, "int16": 0x7C00, "int32": 0x7F800000, "uint32": 0x7F000000}
"""Bits set in every word that is infinite or no number, or that becomes infinite when float32 is rounded. Words of 8
bits have the type int8 where none can be.
"""

_BYTE, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_LANES_16, _LANES_32 = ir.VectorType(_I16, 16), ir.VectorType(_I32, 16)
_EIGHT, _FOUR = ir.VectorType(_I32, 8), ir.VectorType(_I64, 4)
_Value = Any


def _jit(function: Callable[..., Any]) -> Any:
    """Compiles a function for any thread at once, and keeps it on disk where numba finds a place to write to."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no such place
        return njit(nogil=True)(function)


# ---- vectors


def _all(of: ir.Type, number: int) -> ir.Constant:
    return ir.Constant(of, [number] * of.count if isinstance(of, ir.VectorType) else number)


def _vector(builder: ir.IRBuilder, pointer: _Value, index: _Value, of: ir.Type, alignment: int) -> _Value:
    """The vector that begins at an element, loaded."""
    address = builder.bitcast(builder.gep(pointer, [index]), of.as_pointer())
    vector = builder.load(address)
    vector.align = alignment
    return vector


def _magnitude(builder: ir.IRBuilder, stored: _Value) -> _Value:
    """The bits of a word, or of each lane, without the sign."""
    width = getattr(stored.type, "element", stored.type).width
    return builder.and_(stored, _all(stored.type, (1 << width - 1) - 1))


def _reduced(builder: ir.IRBuilder, how: str, vector: _Value) -> _Value:
    """All lanes as one number of 64 bits that is not negative; `how` is "or" or "umax"."""
    of = vector.type
    kind, name = ir.FunctionType(of.element, [of]), f"llvm.vector.reduce.{how}.v{of.count}i{of.element.width}"
    return builder.zext(builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector]), _I64)


def _fetch(builder: ir.IRBuilder, pointer: _Value, index: _Value) -> None:
    """Fetches the line of an element into the cache ahead of its use; any address may be asked for."""
    address = builder.bitcast(builder.gep(pointer, [index]), _BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [address, _I32(0), _I32(3), _I32(1)])


def _rounded(builder: ir.IRBuilder, bits: _Value) -> _Value:
    """Words of bfloat16 from bits of float32, as 32-bit numbers whose upper halves mean nothing."""
    of = bits.type
    odd_bit = builder.and_(builder.lshr(bits, _all(of, 16)), _all(of, 1))
    upper = builder.lshr(builder.add(builder.add(bits, _all(of, 0x7FFF)), odd_bit), _all(of, 16))
    magnitude = builder.and_(bits, _all(of, 0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, _all(of, 0x7F800000))
    return builder.select(is_nan, _all(of, 0x7FC0), upper)


def _pointers(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> list[_Value]:
    """Arrays as pointers to their first elements, all else as it is."""
    return [
        context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, args, strict=True)
    ]


def _sums_of_pairs(builder: ir.IRBuilder, product: _Value) -> _Value:
    """Sums (8) of neighbours among 16 products of 16-bit numbers: with the products, one instruction."""
    unset = ir.Constant(_LANES_32, ir.Undefined)
    return builder.add(*(
        builder.shuffle_vector(product, unset, ir.Constant(_EIGHT, list(range(first, _LANES_32.count, 2))))
        for first in (0, 1)
    ))  # fmt: skip


def _spread(builder: ir.IRBuilder, number: _Value, of: ir.Type) -> _Value:
    """A vector with a number in each lane."""
    unset = ir.Constant(of, ir.Undefined)
    first = builder.insert_element(unset, number, _I32(0))
    return builder.shuffle_vector(first, unset, _all(ir.VectorType(_I32, of.count), 0))


def _opaque(builder: ir.IRBuilder, number: _Value) -> _Value:
    """The same number, in a form that LLVM takes for another one."""
    return builder.asm(ir.FunctionType(number.type, [number.type]), "", "=r,0", [number], True)


def _from_lane(builder: ir.IRBuilder, vector: _Value, first: _Value) -> _Value:
    """The vector with zeros in the lanes before lane `first`."""
    of = vector.type
    number = ir.Constant(ir.VectorType(_I32, of.count), list(range(of.count)))
    skip_mask = builder.icmp_signed("<", number, _spread(builder, builder.trunc(first, _I32), number.type))
    return builder.select(skip_mask, _all(of, 0), vector)


def _lower(builder: ir.IRBuilder, pairs: _Value) -> _Value:
    """The lower 32 bits in each of 4 lanes, with their sign."""
    return builder.ashr(builder.shl(pairs, _all(_FOUR, 32)), _all(_FOUR, 32))


def _upper(builder: ir.IRBuilder, pairs: _Value) -> _Value:
    """The upper 32 bits in each of 4 lanes, with their sign."""
    return builder.ashr(pairs, _all(_FOUR, 32))


def _unsigned(builder: ir.IRBuilder, pairs: _Value) -> _Value:
    """The lower 32 bits as a number that is not negative."""
    return builder.and_(pairs, _all(_FOUR, 0xFFFFFFFF))


def _as_factor(builder: ir.IRBuilder, weight: _Value) -> _Value:
    """A constant in each lane, masked so that LLVM knows how few bits it has."""
    short = builder.and_(builder.sext(weight, _I64), _I64((2 << CONSTANT_BITS) - 1))
    return _spread(builder, short, _FOUR)


# ---- blocks of a row


class _Narrow:
    """Words of int8, uint8, int16, or uint32 as float32 to be rounded: 16 a vector, times constants in halves.

    Sums of a block are four vectors of 8 numbers of 32 bits. Of 16-bit words 8 vectors fit: the least
    sum is 8 * 2 * -2^15 * 2^12. Weighted sums count 2^HALF_BITS and 1, of the first family and of the second.
    """

    lanes, unit, none = 16, 1 << HALF_BITS, _all(_EIGHT, 0)

    def __init__(self, kind: types.Integer) -> None:
        self._kind, self.vectors = kind, 16 if kind.bitwidth == 8 else 8
        self.counts = _EXPONENT.get(str(kind), 0)
        self.stored = ir.VectorType(ir.IntType(kind.bitwidth), self.lanes)

    def rows_of_constants(self, tile: _Tile) -> list[_Value]:
        return [_row(tile.builder, tile.halves, tile.halves_width, number) for number in range(4)]

    def products(
        self, builder: ir.IRBuilder, stored: _Value, constants: list[_Value], index: _Value, skip: _Value | None
    ) -> list[_Value]:
        """Terms that a vector of words adds to the sums, without its first `skip` lanes if that is given."""
        word = self._words(builder, stored)
        if skip is not None:
            word = _from_lane(builder, word, skip)
        halves = (builder.sext(_vector(builder, row, index, _LANES_16, 2), _LANES_32) for row in constants)
        return [_sums_of_pairs(builder, builder.mul(word, half)) for half in halves]

    def _words(self, builder: ir.IRBuilder, stored: _Value) -> _Value:
        """16 words as 32-bit numbers, extended from 16 bits at most."""
        if self._kind == types.uint32:
            stored = builder.trunc(_rounded(builder, stored), _LANES_16)
        return builder.sext(stored, _LANES_32)

    def weighted(self, builder: ir.IRBuilder, sums: list[_Value], weights: list[_Value]) -> list[_Value]:
        """The sums times a row's constants of both families, in 4 lanes: at most 2^56 from 2 * -2^31 * 2^24."""
        terms = []
        for number, pairs in enumerate(sums):
            pairs, weight = builder.bitcast(pairs, _FOUR), weights[number // 2]
            # With one and the same weight LLVM would add first, and multiply by what is too wide for one instruction.
            lower = builder.mul(_lower(builder, pairs), _as_factor(builder, weight))
            upper = builder.mul(_upper(builder, pairs), _as_factor(builder, _opaque(builder, weight)))
            terms.append(builder.add(lower, upper))
        return terms


class _Wide:
    """Words of int32, 8 a vector, times whole constants.

    Sums of a block are four vectors of 4 numbers of 64 bits, two for each family. Weighted sums count 2^32 and 1, of
    the first family and of the second.
    """

    lanes, vectors, unit, none, stored = 8, 8, _CARRY, _all(_FOUR, 0), _EIGHT
    counts = _EXPONENT["int32"]

    def rows_of_constants(self, tile: _Tile) -> list[_Value]:
        return [_row(tile.builder, tile.whole, tile.whole_width, number) for number in range(2)]

    def products(
        self, builder: ir.IRBuilder, stored: _Value, constants: list[_Value], index: _Value, skip: _Value | None
    ) -> list[_Value]:
        """Terms that a vector of words adds to the sums, without its first `skip` lanes if that is given."""
        word = stored if skip is None else _from_lane(builder, stored, skip)
        pairs = builder.bitcast(word, _FOUR)
        rows = [_vector(builder, row, index, _FOUR, 4) for row in constants]
        return [builder.mul(half(builder, pairs), half(builder, row)) for row in rows for half in (_lower, _upper)]

    def weighted(self, builder: ir.IRBuilder, sums: list[_Value], weights: list[_Value]) -> list[_Value]:
        """The sums times a row's constants of both families, in halves: less than 2^56."""
        terms = []
        for number, weight in enumerate(weights):
            total, factor = builder.add(*sums[2 * number : 2 * number + 2]), _as_factor(builder, weight)
            terms += [builder.mul(half(builder, total), factor) for half in (_upper, _unsigned)]
        return terms


def _way_of(words: types.Array) -> _Narrow | _Wide:
    return _Wide() if words.dtype == types.int32 else _Narrow(words.dtype)


@intrinsic
def _way(context: Any, words: Any) -> Any:
    """Words of a vector, words of a block, the unit of sums 0 and 2 of `_add_tile`, and bits of the largest exponents.

    The bits are 0 where no peak is wanted.
    """
    way = _way_of(words)
    numbers = [_I64(way.lanes), _I64(way.lanes * way.vectors), _I64(way.unit), _I64(way.counts)]
    kind = types.UniTuple(types.int64, len(numbers))
    return kind(words), lambda context, builder, signature, args: context.make_tuple(builder, kind, numbers)


# ---- tiles: parts of several rows


@dataclass(frozen=True, slots=True)
class _Tile:
    """Builds the code of `_add_tile`; has its arguments, arrays as pointers, and the lengths of their rows."""

    builder: ir.IRBuilder
    way: _Narrow | _Wide
    itemsize: int
    totals: list[_Value]
    joined: _Value
    whole_width: _Value
    halves_width: _Value
    words: _Value
    at: _Value
    ahead: _Value
    streams: _Value
    rounds: _Value
    stride: _Value
    apart: _Value
    count: _Value
    whole: _Value
    halves: _Value
    place: _Value
    column: _Value
    step: _Value
    sums: _Value

    def build(self) -> None:
        builder, block = self.builder, self.way.lanes * self.way.vectors
        blocks = builder.sdiv(self.count, _I64(block))
        tail_start = builder.mul(blocks, _I64(block))
        tail = builder.sub(self.count, tail_start)
        with cgutils.for_range(builder, self.rounds, intp=_I64) as one_round:
            with cgutils.for_range(builder, blocks, intp=_I64) as loop:
                self._add_block(one_round.index, builder.mul(loop.index, _I64(block)), self._whole_block)
            with builder.if_then(builder.icmp_signed(">", tail, _I64(0))):
                self._add_block(one_round.index, tail_start, partial(self._part_of_block, tail))
        for number, total in enumerate(map(builder.load, self.totals)):
            for half, part in enumerate((_upper(builder, total), _unsigned(builder, total))):
                slot = builder.gep(self.sums, [_I64(4 * (2 * number + half))])
                lane_sums = builder.add(_vector(builder, slot, _I64(0), _FOUR, 8), part)
                builder.store(lane_sums, builder.bitcast(slot, _FOUR.as_pointer()), align=8)
        if self.way.counts:
            builder.store(_reduced(builder, "or", builder.load(self.joined)), builder.gep(self.sums, [_I64(_JOINED)]))

    def _add_block(self, row: _Value, first: _Value, sums_of: Callable[[_Value, list[_Value]], list[_Value]]) -> None:
        """Adds the block from word `first` on of a row of each stream. `sums_of` makes the sums of one block."""
        builder = self.builder
        with cgutils.for_range(builder, self.streams, intp=_I64) as loop:
            # LLVM would else load the constants of all streams and store them again, as registers hold fewer.
            constant_column = _opaque(builder, builder.add(self.place, first))
            constants = [builder.gep(table, [constant_column]) for table in self.way.rows_of_constants(self)]
            number = builder.add(row, builder.mul(loop.index, self.apart))
            word_index = builder.add(builder.add(self.at, first), builder.mul(number, self.stride))
            sums = sums_of(builder.gep(self.words, [word_index]), constants)
            column = builder.add(self.column, builder.mul(number, self.step))
            families = (_row(builder, self.whole, self.whole_width, family) for family in (0, 1))
            weights = [builder.load(builder.gep(family, [column])) for family in families]
            for total, term in zip(self.totals, self.way.weighted(builder, sums, weights), strict=True):
                builder.store(builder.add(builder.load(total), term), total)

    def _whole_block(self, words: _Value, constants: list[_Value]) -> list[_Value]:
        builder, way, sums = self.builder, self.way, [self.way.none] * 4
        joined_words = builder.load(self.joined)
        for number in range(way.vectors):
            index = _I64(number * way.lanes)
            if number * way.lanes * self.itemsize % LINE_BYTES == 0:
                _fetch(builder, words, builder.add(index, self.ahead))
            stored = _vector(builder, words, index, way.stored, self.itemsize)
            joined_words = builder.or_(joined_words, stored)
            products = way.products(builder, stored, constants, index, None)
            sums = [builder.add(total, term) for total, term in zip(sums, products, strict=True)]
        builder.store(joined_words, self.joined)
        return sums

    def _part_of_block(self, count: _Value, words: _Value, constants: list[_Value]) -> list[_Value]:
        """Sums of the last `count` words of a row. What fills no vector is read with words before, uncounted."""
        builder, way = self.builder, self.way
        sums = [cgutils.alloca_once(builder, way.none.type) for _ in range(4)]
        for total in sums:
            builder.store(way.none, total)

        def add(index: _Value, skip: _Value | None) -> None:
            stored = _vector(builder, words, index, way.stored, self.itemsize)
            builder.store(builder.or_(builder.load(self.joined), stored), self.joined)
            for total, term in zip(sums, way.products(builder, stored, constants, index, skip), strict=True):
                builder.store(builder.add(builder.load(total), term), total)

        with cgutils.for_range(builder, builder.sdiv(count, _I64(way.lanes)), intp=_I64) as loop:
            index = builder.mul(loop.index, _I64(way.lanes))
            _fetch(builder, words, builder.add(index, self.ahead))
            add(index, None)
        tail = builder.srem(count, _I64(way.lanes))
        with builder.if_then(builder.icmp_signed(">", tail, _I64(0))):
            add(builder.sub(count, _I64(way.lanes)), builder.sub(_I64(way.lanes), tail))
        return list(map(builder.load, sums))


def _row(builder: ir.IRBuilder, table: _Value, width: _Value, number: int) -> _Value:
    """Pointer to the first element of a row of a (n, width) array."""
    return builder.gep(table, [builder.mul(width, _I64(number))])


@intrinsic
def _add_tile(
    context: Any, words: Any, at: Any, ahead: Any, streams: Any, rounds: Any, stride: Any, apart: Any, count: Any,
    whole: Any, halves: Any, place: Any, column: Any, step: Any, sums: Any,
) -> Any:  # fmt: skip
    """Adds words times their constants times their row's constant, of `rounds` rows of each of `streams`.

    Row i of stream j begins `i + j * apart` times `stride` elements after `at`. It has `count` contiguous words, whose
    constants begin at column `place`. Its own constant is in `whole`, as many times `step` columns after `column`. At
    most _TILE_BLOCKS blocks are added. The element `ahead` elements after a word is fetched into the cache.

    `sums` int64 gains four sums (see `_way`), as upper and lower halves of 4 lanes: 32 numbers. The number at _JOINED
    becomes the words joined by OR.
    """

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> _Value:
        way, itemsize = _way_of(words), words.dtype.bitwidth // 8
        totals = [cgutils.alloca_once_value(builder, _all(_FOUR, 0)) for _ in range(4)]
        joined = cgutils.alloca_once_value(builder, _all(way.stored, 0))
        tables = (context.make_array(kind)(context, builder, args[i]) for i, kind in ((8, whole), (9, halves)))
        widths = [builder.extract_value(table.shape, 1) for table in tables]
        _Tile(builder, way, itemsize, totals, joined, *widths, *_pointers(context, builder, signature, args)).build()
        return context.get_dummy_value()

    kinds = words, at, ahead, streams, rounds, stride, apart, count, whole, halves, place, column, step, sums
    return types.void(*kinds), code


@intrinsic
def _word_at(context: Any, words: Any, at: Any) -> Any:
    """One word as it is digested, and its bits as stored without the sign, both in int64."""
    kind = types.UniTuple(types.int64, 2)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> _Value:
        words, at = _pointers(context, builder, signature, args)
        stored = word = builder.load(builder.gep(words, [at]))
        if signature.args[0].dtype == types.uint32:
            word = builder.trunc(_rounded(builder, word), _I16)
        numbers = [builder.sext(word, _I64), builder.zext(_magnitude(builder, stored), _I64)]
        return context.make_tuple(builder, kind, numbers)

    return kind(words, at), code


@intrinsic
def _peak_of_row(context: Any, words: Any, at: Any, count: Any) -> Any:
    """The peak of `count` contiguous words from `at`; the last are read together with words before them."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> _Value:
        words, at, count = _pointers(context, builder, signature, args)
        way, itemsize = _way_of(signature.args[0]), signature.args[0].dtype.bitwidth // 8
        peak = cgutils.alloca_once_value(builder, _all(way.stored, 0))

        def look(index: _Value) -> None:
            magnitude = _magnitude(builder, _vector(builder, words, builder.add(at, index), way.stored, itemsize))
            maximum = builder.load(peak)
            builder.store(builder.select(builder.icmp_unsigned(">", magnitude, maximum), magnitude, maximum), peak)

        with cgutils.for_range(builder, builder.sdiv(count, _I64(way.lanes)), intp=_I64) as loop:
            look(builder.mul(loop.index, _I64(way.lanes)))
        with builder.if_then(builder.icmp_signed(">", builder.srem(count, _I64(way.lanes)), _I64(0))):
            look(builder.sub(count, _I64(way.lanes)))
        return _reduced(builder, "umax", builder.load(peak))

    return types.int64(words, at, count), code


# ---- rows and boxes


@_jit
def _folded(number: int) -> int:
    """A number below 2^34 that is congruent to an int64 modulo the prime: 2^32 is congruent to _CARRY."""
    return (number >> 32) * _CARRY + (number & 0xFFFFFFFF)


@_jit
def _one_by_one(words: Any, at: int, stride: int, count: int, whole: Any, place: int, step: int) -> Any:
    """Sums over `count` words, `stride` elements apart, with constants `step` columns apart, and the words' peak.

    The sums are congruent to the exact ones modulo the prime.
    """
    first = second = peak = 0
    for block in range(0, count, _SCALARS):
        a = b = 0
        for i in range(block, min(block + _SCALARS, count)):
            word, magnitude = _word_at(words, at + i * stride)
            peak = max(peak, magnitude)
            a += word * np.int64(whole[0, place + i * step])
            b += word * np.int64(whole[1, place + i * step])
        first, second = first + _folded(a), second + _folded(b)
    return first, second, peak


@_jit
def _times(one: int, other: int) -> np.int64:
    """The product of two residues; it needs all 64 bits."""
    return np.int64(np.uint64(one) * np.uint64(other) % np.uint64(PRIME))


@_jit
def _sums_of_few(whole: Any, place: int, count: int, step: int) -> Any:
    """Sums of both families over `count` columns, `step` apart."""
    a = b = 0
    for column in range(place, place + count * step, step):
        a, b = a + whole[0, column], b + whole[1, column]
    return a, b


@_jit
def _in_vectors(
    words: Any, at: int, ahead: int, rows: int, inner: int, stride: int, whole: Any, halves: Any, place: int,
    column: int, step: int, sums: Any,
) -> Any:  # fmt: skip
    """Residues of the sums over `rows` rows from `at`, each of `inner` contiguous words, and the words' peak.

    A row has at least as many words as a vector; rows are `stride` elements apart. The constants of words begin at
    column `place`. Those of rows begin at `column` and are `step` apart. `sums` are _JOINED + 1 numbers to work with.
    """
    sums[:] = 0
    peak, (_, block, unit, exponent) = 0, _way(words)
    blocks, columns = (inner + block - 1) // block, _TILE_BLOCKS // _STREAMS * block
    while rows > 0:
        streams, rounds, group = rows, 1, 1
        if rows >= _STREAMS and rows * blocks > _TILE_BLOCKS:  # else the rows that are left make one tile or a few
            streams, rounds = _STREAMS, rows // _STREAMS
            group = max(1, _TILE_BLOCKS // _STREAMS // blocks)
        for first in range(0, rounds, group):
            for part in range(0, inner, columns):
                _add_tile(
                    words, at + first * stride + part, ahead, streams, min(group, rounds - first), stride, rounds,
                    min(inner - part, columns), whole, halves, place + part, column + first * step, step, sums,
                )  # fmt: skip
                if exponent and sums[_JOINED] & exponent == exponent:
                    for stream in range(streams):
                        for row in range(first, first + min(group, rounds - first)):
                            place_of_row = at + (stream * rounds + row) * stride + part
                            peak = max(peak, _peak_of_row(words, place_of_row, min(inner - part, columns)))
        rows_done = rounds * streams
        at, column, rows = at + rows_done * stride, column + rows_done * step, rows - rows_done
    a, b = _sum_of_lanes(sums, 0) * unit, _sum_of_lanes(sums, 16) * unit
    return (a + _sum_of_lanes(sums, 8)) % PRIME, (b + _sum_of_lanes(sums, 24)) % PRIME, peak


@_jit
def _sum_of_lanes(sums: Any, first: int) -> Any:
    """The folded sum of four upper halves and four lower ones."""
    high = sums[first] + sums[first + 1] + sums[first + 2] + sums[first + 3]
    low = sums[first + 4] + sums[first + 5] + sums[first + 6] + sums[first + 7]
    return _folded(high * _CARRY + low)


@_jit
def _word_by_word(words: Any, at: int, n: Any, s: Any, p: Any, step: Any, whole: Any) -> Any:
    """Residues of the sums over the last two dimensions of any box from `at`, and the words' peak."""
    inner, rows = len(n) - 1, len(n) - 2
    a_high = a_low = b_high = b_low = peak = 0
    for i in range(n[rows]):
        a, b, largest = _one_by_one(words, at, s[inner], n[inner], whole, p[inner], step[inner])
        peak = max(peak, largest)
        column = p[rows] + i * step[rows]
        a, b = _folded(a) * whole[0, column], _folded(b) * whole[1, column]
        a_high, a_low = a_high + (a >> 32), a_low + (a & 0xFFFFFFFF)
        b_high, b_low = b_high + (b >> 32), b_low + (b & 0xFFFFFFFF)
        at += s[rows]
    return (a_high * _CARRY + a_low) % PRIME, (b_high * _CARRY + b_low) % PRIME, peak


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
    peaks: Any,
) -> None:
    """Puts residues of boxes `begin` to `end` - 1 of k into `sums` (2, end - begin) int64, without the GIL.

    Into `peaks` (end - begin,) int64 go the largest of their words, as they are stored and without the sign. 0 may
    stand for a peak that is less than that of an infinite number. `words` has all boxes: int8, uint8 (of a
    floating-point type), int16 or int32 words, or uint32 as float32 to be digested as bfloat16.

    `start` (k,) is the index of a box's first element in `words`. `size` and `stride` (k, D), D >= 2, are in elements;
    sums are taken in vectors along the last dimension. `place` (k, D) is the column where the constants of each
    dimension begin. `whole` (2, m) int32 has them, and `halves` (4, m) int16 the upper and lower half of the first
    family, then of the second. `prefix` (2, m + 1) int64 has the sums of all columns before one. With `turn` >= 0 only
    a sample counts. `thin` (k, 3) has the dimension it thins, the step, and the index of the box's first element there.
    """
    width = size.shape[1]
    inner, rows = width - 1, width - 2
    n, s = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
    p, step = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
    lanes = np.empty(_JOINED + 1, dtype=np.int64)
    for k in range(begin, end):
        origin = start[k]
        for d in range(width):
            n[d], s[d], p[d], step[d] = size[k, d], stride[k, d], place[k, d], 1
        if turn >= 0:
            d, every = thin[k, 0], thin[k, 1]
            first = (turn - thin[k, 2]) % every
            n[d] = max(0, (n[d] - first + every - 1) // every)
            origin, p[d], s[d], step[d] = origin + first * s[d], p[d] + first, s[d] * every, every
        outer, total, other_total, peak = 1, BIAS, BIAS, 0
        for d in range(width):
            a, b = prefix[0, p[d] + n[d]] - prefix[0, p[d]], prefix[1, p[d] + n[d]] - prefix[1, p[d]]
            if step[d] != 1:
                a, b = _sums_of_few(whole, p[d], n[d], step[d])
            total, other_total = _times(total, a % PRIME), _times(other_total, b % PRIME)
            outer *= n[d] if d < rows else min(n[d], 1)
        in_vectors = s[inner] == 1 and step[inner] == 1 and n[inner] >= _way(words)[0]
        ahead = _AHEAD // words.itemsize
        if k + 1 < end and n[rows] * n[inner] < _SMALL // words.itemsize:
            ahead = start[k + 1] - start[k]
        elif n[inner] < ahead and s[rows] != n[inner]:
            ahead = s[rows]
        for number in range(outer):  # of fewer than 2^31, each of which adds less than 2^32
            row, quotient, weight, other_weight = origin, number, 1, 1
            for d in range(rows - 1, -1, -1):
                i = quotient % n[d]
                quotient //= n[d]
                row += i * s[d]
                weight = _times(weight, whole[0, p[d] + i * step[d]])
                other_weight = _times(other_weight, whole[1, p[d] + i * step[d]])
            if in_vectors:
                a, b, largest = _in_vectors(
                    words, row, ahead, n[rows], n[inner], s[rows], whole, halves, p[inner], p[rows], step[rows], lanes
                )
            else:
                a, b, largest = _word_by_word(words, row, n, s, p, step, whole)
            total, other_total = total + _times(a, weight), other_total + _times(b, other_weight)
            peak = max(peak, largest)
        sums[0, k - begin], sums[1, k - begin], peaks[k - begin] = total % PRIME, other_total % PRIME, peak
