"""Boxes of a rank's memory as few tensors of stacked boxes: those of one form are digested by one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import lex_sort, pad_boxes
from weightcast.transfer.copy.runs import gather_boxes
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.verification import Sample, sampled_rows

__all__ = ["Boxes", "Buffer"]


class Buffer:
    """Memory that one stack of boxes after another is copied to: new memory costs more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """Memory of at least so many bytes, which the next call gives again."""
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory


@dataclass(frozen=True, slots=True)
class Boxes:
    """k boxes in a rank's memory, in columns of width D: start in the base, strides, and place in the logical tensor.

    `kind` (k,) numbers the device and dtype of the base among `kinds`. Samples thin dimension `thin`, to one index of
    `every`; `step` is 1 but for boxes that have been thinned.
    """

    kinds: tuple[tuple[torch.device, torch.dtype], ...]
    base: IntArray
    kind: IntArray
    start: IntArray
    stride: IntArray
    offset: IntArray
    step: IntArray
    size: IntArray
    ndim: IntArray
    dtype: IntArray
    thin: IntArray
    every: IntArray

    @classmethod
    def of(cls, layout: RankLayout, rows: IntArray, offsets: IntArray, sizes: IntArray, dtypes: IntArray) -> Boxes:
        """Boxes inside rows of a layout's table; `dtypes` are codes of the dtypes to digest in."""
        table, memory = layout.table, layout.memory
        width = max(table.tensors.width, offsets.shape[1])
        offset, size = pad_boxes(offsets, width, 0), pad_boxes(sizes, width, 1)
        stride = pad_boxes(memory.stride[rows], width, 0)
        tensor = table.tensor[rows]
        ndim, shape = table.tensors.ndim[tensor], pad_boxes(table.tensors.shape[tensor], width, 1)
        start = memory.start[rows] + ((offset - pad_boxes(table.offset[rows], width, 0)) * stride).sum(axis=1)
        of_base = [(base.device, base.dtype) for base in memory.bases]
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(of_base))}
        kind = np.array([kinds[pair] for pair in of_base], dtype=np.int64)
        base, ones = memory.base[rows], np.ones_like(size)
        return cls(
            tuple(kinds), base, kind[base], start, stride, offset, ones, size, ndim, dtypes, *sampled_rows(shape, ndim)
        )  # fmt: skip

    def __len__(self) -> int:
        return int(self.base.shape[0])

    def take(self, which: IntArray) -> Boxes:
        """The boxes at `which`, in that order."""
        return Boxes(self.kinds, *(getattr(self, name)[which] for name in self.__slots__[1:]))

    def sampled(self, sample: Sample | None) -> Boxes:
        """The part of the boxes that a sample has; without a sample all of them."""
        if sample is None:
            return self
        offset, size, step = sample.thin(self.thin, self.every, self.offset, self.size)
        start = self.start + ((offset - self.offset) * self.stride).sum(axis=1)
        return replace(self, start=start, stride=self.stride * step, offset=offset, step=step, size=size)

    def alike(self) -> list[IntArray]:
        """Groups of boxes that differ only in where they lie and in dimensions of size 1; by place within a group."""
        plain = self.size == 1
        keys = [self.kind, self.dtype, *self.size.T]
        for column in (self.stride, self.offset, self.step):
            keys.extend(np.where(plain, 0, column).T)
        order, _ = lex_sort([*keys, self.base, self.start])
        begins = np.zeros(len(order), dtype=bool)
        for key in keys:
            begins[1:] |= np.diff(key[order]) != 0
        return np.split(order, np.flatnonzero(begins)) if len(order) else []

    def stacks(self, members: IntArray, limit: int) -> list[IntArray]:
        """Cuts a group into runs of at most `limit` elements together, or single boxes."""
        step = max(1, limit // max(1, int(self.size[members[0]].prod())))
        return [members[i : i + step] for i in range(0, len(members), step)]

    def stacked(self, layout: RankLayout, members: IntArray, buffer: Buffer) -> torch.Tensor:
        """Boxes as one tensor (n, *size): a view where they are evenly spaced in one base, else a copy."""
        bases, base_numbers = layout.memory.bases, self.base[members]
        size, stride = self.size[members[0]].tolist(), self.stride[members[0]].tolist()
        starts = self.start[members]
        gaps = np.unique(np.diff(starts))
        first = bases[int(base_numbers[0])]
        if len(gaps) <= 1 and (base_numbers == base_numbers[0]).all():
            return first.as_strided([len(members), *size], [int(gaps[0]) if len(gaps) else 0, *stride], int(starts[0]))
        if first.device.type == "cpu":
            numbers, inverse = np.unique(base_numbers, return_inverse=True)
            origin = np.array([bases[number].data_ptr() for number in numbers.tolist()], dtype=np.int64)
            target = buffer.take(len(members) * prod(size) * first.itemsize)
            copy = gather_boxes(origin[inverse] + starts * first.itemsize, size, stride, first.dtype, target)
            if copy is not None:
                return copy
        origins = zip(base_numbers.tolist(), starts.tolist(), strict=True)
        return torch.stack([bases[base].as_strided(size, stride, start) for base, start in origins])
