"""Rows of one Megatron-Core tensor as rows of checkpoint tensors. Pure: numbers in, runs of rows out.

Megatron fuses along dimension 0 alone. So a fused tensor is a sequence of runs, each of them rows of one checkpoint
tensor. A rank's part is a range of those rows, whatever parallelism made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

__all__ = ["FusedRows", "Fusion", "Sizes", "fused_rows", "overlap"]


class Fusion(Enum):
    """Kinds of Megatron tensors by their rows. The kinds of rows have the order of the rule's parts."""

    WHOLE = "the rows of one checkpoint tensor"
    VOCABULARY = "rows of the vocabulary, then padding"
    QKV = "for each query group its query heads, its key head and its value head"
    GATE_UP = "gate rows, then as many up rows"


class Sizes(NamedTuple):
    """Sizes that fusions depend on. `vocab_size` is the checkpoint's, without padding; `head_dim` is in rows."""

    heads: int
    query_groups: int
    head_dim: int
    vocab_size: int


class FusedRows(NamedTuple):
    """Rows start..start+length-1 of the Megatron tensor are rows offset..offset+length-1 of `total` of part `part`."""

    start: int
    length: int
    part: int
    offset: int
    total: int


def fused_rows(fusion: Fusion, rows: int, sizes: Sizes) -> tuple[FusedRows, ...]:
    """The runs that a Megatron tensor of `rows` rows consists of; rows in no run are padding.

    Raises ValueError with the expected number when a tensor with this fusion cannot have that many rows.
    """
    match fusion:
        case Fusion.WHOLE:
            return (FusedRows(0, rows, 0, 0, rows),)
        case Fusion.VOCABULARY:
            if rows < sizes.vocab_size:
                raise ValueError(f"at least the {sizes.vocab_size} rows of vocab_size=")
            return (FusedRows(0, sizes.vocab_size, 0, 0, sizes.vocab_size),)
        case Fusion.GATE_UP:
            if rows % 2:
                raise ValueError("an even number of rows, gate and up")
            half = rows // 2
            return (FusedRows(0, half, 0, 0, half), FusedRows(half, half, 1, 0, half))
        case Fusion.QKV:
            return tuple(_query_groups(rows, sizes))


def _query_groups(rows: int, sizes: Sizes) -> Iterator[FusedRows]:
    heads, groups, dim = sizes.heads, sizes.query_groups, sizes.head_dim
    expected = (heads + 2 * groups) * dim
    if rows != expected or heads % groups:
        raise ValueError(f"{expected} rows: {heads} query heads and 2 x {groups} key and value heads of {dim}")
    queries = heads // groups * dim
    start = 0
    for group in range(groups):
        for part, length, total in ((0, queries, heads * dim), (1, dim, groups * dim), (2, dim, groups * dim)):
            yield FusedRows(start, length, part, group * length, total)
            start += length


def overlap(runs: Sequence[FusedRows], start: int, length: int) -> Iterator[FusedRows]:
    """The runs cut to rows start..start+length-1 of the Megatron tensor; `start` stays a row of that tensor."""
    for run in runs:
        low, high = max(run.start, start), min(run.start + run.length, start + length)
        if low < high:
            yield run._replace(start=low, length=high - low, offset=run.offset + low - run.start)
