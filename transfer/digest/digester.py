"""Digests of many boxes of a rank, prepared once for a layout and made again for every version.

    digester = Digester(layout, rows, offsets, sizes, dtypes)
    digests = digester.run()
    digests, values = digester.read()    # and which boxes hold values that are not finite

On a CPU with numba most boxes are scanned (`cpu_scan`). The others, and all on a GPU, are digested by torch. Boxes of
one form are digested together: slots of an expert parameter, the same parameters of all layers.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import BoolArray, DigestArray, IntArray
from weightcast.transfer.digest.boxes import Boxes, Buffer
from weightcast.transfer.digest.cpu_scan import Scan, scannable
from weightcast.transfer.digest.definition import block_limit, box_residues, join, scale
from weightcast.transfer.digest.values import count_values, least_suspect
from weightcast.transfer.errors import StalePlanError
from weightcast.transfer.layout.dtypes import dtype_name, to_torch
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.verification import Sample, ValueCounts

__all__ = ["Digester", "Reading"]


class Reading(NamedTuple):
    """(k,) digests, and counts of the boxes that hold values that are not finite, by their place among the k."""

    digests: DigestArray
    values: ValueCounts


class Digester:
    """Digests of k boxes of a rank.

    `rows` (k,) are rows of the layout's table. `offsets` and `sizes` (k, D) are boxes inside them, in coordinates of
    their logical tensors. `dtypes` (k,) are codes of the dtypes to digest in.
    """

    def __init__(
        self, layout: RankLayout, rows: IntArray, offsets: IntArray, sizes: IntArray, dtypes: IntArray
    ) -> None:
        self._layout = layout
        boxes = Boxes.of(layout, rows, offsets, sizes, dtypes)
        scan_mask = scannable(layout, boxes)
        self._boxes = boxes
        self._scanned, self._stacked = np.flatnonzero(scan_mask), np.flatnonzero(~scan_mask)
        self._limit = _limits(boxes, scan_mask)
        self._scan = Scan(layout, boxes.take(self._scanned)) if len(self._scanned) else None
        self._stacks = _Stacks(layout, boxes.take(self._stacked)) if len(self._stacked) else None
        bases = np.unique(boxes.base)
        self._storages = [layout.memory.bases[base].untyped_storage() for base in bases.tolist()]
        self._addresses = layout.memory.address[bases].tolist()

    def run(self, sample: Sample | None = None) -> DigestArray:
        """Digests (k,) of what lies in memory now.

        With a `sample` only the elements in it count: such digests add up to the digest of the tensor's sample.

        Uses as many threads as torch does. Raises StalePlanError when memory was reallocated since the layout was made.
        """
        return self._run(sample, with_peaks=False)[0]

    def read(self, sample: Sample | None = None) -> Reading:
        """Digests as of `run`, and counts of the elements that are infinite or no number, or will be by a cast.

        They are found while the boxes are digested; boxes that hold some are read a second time to count them.
        """
        digests, peaks = self._run(sample, with_peaks=True)
        rows = np.flatnonzero(peaks >= self._limit)
        boxes = self._boxes.take(rows).sampled(sample)
        bases, counts = self._layout.memory.bases, {}
        for number, row in enumerate(rows.tolist()):
            geometry = boxes.size[number].tolist(), boxes.stride[number].tolist(), int(boxes.start[number])
            view = bases[int(boxes.base[number])].as_strided(*geometry)
            counts[row] = count_values(view, to_torch(dtype_name(int(boxes.dtype[number]))))
        return Reading(digests, ValueCounts.of(counts))

    def _run(self, sample: Sample | None, with_peaks: bool) -> tuple[DigestArray, IntArray]:
        self._check_memory()
        count = len(self._scanned) + len(self._stacked)
        digests, peaks = np.empty(count, dtype=np.uint64), np.empty(count, dtype=np.int64)
        if self._stacks is not None:
            digests[self._stacked], peaks[self._stacked] = self._stacks.run(sample, with_peaks)
        if self._scan is not None:
            turn = None if sample is None else sample.turn
            digests[self._scanned], peaks[self._scanned] = self._scan.run(turn, torch.get_num_threads())
        return digests, peaks

    def _check_memory(self) -> None:
        # There may be ten thousands: one call for each, on the storage, which costs less than on a tensor.
        addresses = list(map(torch.UntypedStorage.data_ptr, self._storages))
        if addresses != self._addresses:
            moves = sum(address != old_address for address, old_address in zip(addresses, self._addresses, strict=True))
            raise StalePlanError(
                f"{moves} of the {len(addresses)} storages to digest were reallocated since they were described; "
                "connect again to plan anew"
            )


def _limits(boxes: Boxes, scanned: BoolArray) -> IntArray:
    """Least peak (k,) with which each box may hold a value that is not finite (`least_suspect`).

    Scans have peaks of words as they are stored, torch of words as they are digested.
    """
    kinds = np.stack([boxes.kind, boxes.dtype, scanned], axis=1)
    keys, inverse = np.unique(kinds, axis=0, return_inverse=True)
    limits = []
    for kind, code, as_stored in keys.tolist():
        memory_dtype, digest_dtype = boxes.kinds[kind][1], to_torch(dtype_name(code))
        limits.append(least_suspect(memory_dtype, digest_dtype, bool(as_stored)))
    return np.array(limits, dtype=np.int64)[inverse.reshape(-1)]


class _Stacks:
    """Boxes that torch digests, those of one form together. It waits for each device once."""

    def __init__(self, layout: RankLayout, boxes: Boxes) -> None:
        self._layout, self._boxes = layout, boxes

    @cached_property
    def _whole(self) -> tuple[list[IntArray], IntArray]:
        return self._prepared(self._boxes)

    def run(self, sample: Sample | None, with_peaks: bool) -> tuple[DigestArray, IntArray]:
        """Digests (k,), and peaks (k,) of the words as they are digested; zeros if they are not asked for."""
        if sample is None:
            return self._digests(self._boxes, *self._whole, with_peaks)
        boxes = self._boxes.sampled(sample)
        return self._digests(boxes, *self._prepared(boxes), with_peaks)

    def _prepared(self, boxes: Boxes) -> tuple[list[IntArray], IntArray]:
        """Groups of boxes to digest together, and factors (2, k) of what their sums leave out."""
        groups: list[IntArray] = []
        for members in boxes.alike():
            device, _ = boxes.kinds[int(boxes.kind[members[0]])]
            groups.extend(boxes.stacks(members, block_limit(device)))
        return groups, scale(boxes.offset, boxes.size, boxes.ndim)

    def _digests(
        self, boxes: Boxes, groups: list[IntArray], factors: IntArray, with_peaks: bool
    ) -> tuple[DigestArray, IntArray]:
        parts: list[tuple[IntArray, torch.Tensor, torch.Tensor]] = []
        buffer = Buffer()
        for members in groups:
            target = to_torch(dtype_name(int(boxes.dtype[members[0]])))
            origin = boxes.offset[members[0]].tolist(), boxes.step[members[0]].tolist()
            stacked = boxes.stacked(self._layout, members, buffer)
            parts.append((members, *box_residues(stacked, *origin, target, with_peaks and target.is_floating_point)))
        digests, peaks = np.zeros(len(boxes), dtype=np.uint64), np.zeros(len(boxes), dtype=np.int64)
        for device in {sums.device for _, sums, _ in parts}:
            entries = [entry for entry in parts if entry[1].device == device]
            rows = np.concatenate([members for members, _, _ in entries])
            digests[rows] = join(torch.cat([sums for _, sums, _ in entries], dim=1), factors[:, rows])
            peaks[rows] = torch.cat([largest for _, _, largest in entries]).cpu().numpy()
        return digests, peaks
