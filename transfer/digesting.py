"""Digests of many boxes of a rank, prepared once for a layout and made again for every version.

    digester = Digester(layout, rows, offsets, sizes, dtypes)
    digests = digester.run()

On a CPU with numba most boxes are scanned (`digest_scan`). The others, and all on a GPU, are digested by torch, those
that are alike together: slots of an expert parameter, the same parameters of all layers.
"""

from __future__ import annotations

import numpy as np
import torch

from weightcast.transfer.digest import block_limit, box_residues, join, scale
from weightcast.transfer.digest_scan import Scan, scannable
from weightcast.transfer.dtypes import dtype_name, to_torch
from weightcast.transfer.errors import StalePlanError
from weightcast.transfer.layout import IntArray, RankLayout
from weightcast.transfer.residues import DigestArray
from weightcast.transfer.stacks import Boxes, Buffer
from weightcast.transfer.verification import Sample

__all__ = ["Digester", "digest_rows"]


class Digester:
    """k boxes of a rank: what `digest(layout.box_view(...), offset, dtype)` gives for each, one by one.

    `rows` (k,) are rows of the layout's table, `offsets` and `sizes` (k, D) boxes inside them in the coordinates of
    their logical tensors, `dtypes` (k,) codes of the dtypes to digest in.
    """

    def __init__(
        self, layout: RankLayout, rows: IntArray, offsets: IntArray, sizes: IntArray, dtypes: IntArray
    ) -> None:
        self._layout = layout
        boxes = Boxes.of(layout, rows, offsets, sizes, dtypes)
        scanned = scannable(layout, boxes)
        self._scanned, self._stacked = np.flatnonzero(scanned), np.flatnonzero(~scanned)
        self._scan = Scan(layout, boxes.take(self._scanned)) if len(self._scanned) else None
        self._stacks = _Stacks(layout, boxes.take(self._stacked)) if len(self._stacked) else None
        held = np.unique(boxes.base)
        self._storages = [layout.memory.bases[base].untyped_storage() for base in held.tolist()]
        self._addresses = layout.memory.address[held].tolist()

    def run(self, sample: Sample | None = None) -> DigestArray:
        """(k,) digests of what lies in memory now. With a `sample` only the elements in it count; such digests add up
        to the digest of the tensor's sample.

        Uses as many threads as torch does. Raises StalePlanError when memory was reallocated since the layout was made.
        """
        self._check_memory()
        digests = np.empty(len(self._scanned) + len(self._stacked), dtype=np.uint64)
        if self._stacks is not None:
            digests[self._stacked] = self._stacks.run(sample)
        if self._scan is not None:
            turn = None if sample is None else sample.turn
            digests[self._scanned] = self._scan.run(turn, torch.get_num_threads())
        return digests

    def _check_memory(self) -> None:
        # There may be ten thousands of storages: nothing but the call for each, and of storages, which cost less.
        seen = list(map(torch.UntypedStorage.data_ptr, self._storages))
        if seen != self._addresses:
            moved = sum(now != then for now, then in zip(seen, self._addresses, strict=True))
            raise StalePlanError(
                f"{moved} of the {len(seen)} storages to digest were reallocated since they were described; "
                "connect again to plan anew"
            )


def digest_rows(
    layout: RankLayout,
    rows: IntArray,
    offsets: IntArray,
    sizes: IntArray,
    dtypes: IntArray,
    sample: Sample | None = None,
) -> DigestArray:
    """The digests of a Digester that is needed once."""
    return Digester(layout, rows, offsets, sizes, dtypes).run(sample)


class _Stacks:
    """Boxes that torch digests: those that are alike together. The device is waited for once."""

    def __init__(self, layout: RankLayout, boxes: Boxes) -> None:
        self._layout, self._boxes = layout, boxes
        self._whole: list[IntArray] | None = None
        self._scale = scale(boxes.offset, boxes.size, boxes.ndim)

    def run(self, sample: Sample | None) -> DigestArray:
        """(k,) digests."""
        if sample is not None:
            boxes = self._boxes.sampled(sample)
            return self._digests(boxes, self._grouped(boxes), scale(boxes.offset, boxes.size, boxes.ndim))
        if self._whole is None:
            self._whole = self._grouped(self._boxes)
        return self._digests(self._boxes, self._whole, self._scale)

    def _grouped(self, boxes: Boxes) -> list[IntArray]:
        groups: list[IntArray] = []
        for members in boxes.alike():
            device, _ = boxes.kinds[int(boxes.kind[members[0]])]
            groups.extend(boxes.stacks(members, block_limit(device)))
        return groups

    def _digests(self, boxes: Boxes, groups: list[IntArray], factors: IntArray) -> DigestArray:
        found: list[tuple[IntArray, torch.Tensor]] = []
        buffer = Buffer()
        for some in groups:
            target = to_torch(dtype_name(int(boxes.dtype[some[0]])))
            place = boxes.offset[some[0]].tolist(), boxes.step[some[0]].tolist()
            found.append((some, box_residues(boxes.stacked(self._layout, some, buffer), *place, target)))
        digests = np.zeros(len(boxes), dtype=np.uint64)
        for device in {sums.device for _, sums in found}:
            here = [(some, sums) for some, sums in found if sums.device == device]
            which = np.concatenate([some for some, _ in here])
            digests[which] = join(torch.cat([sums for _, sums in here], dim=1), factors[:, which])
        return digests
