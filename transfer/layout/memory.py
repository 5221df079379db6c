"""The memory of a rank's regions, and the layout that a rank describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.dtypes import from_torch
from weightcast.transfer.layout.tables import NO_SLOT, LayoutNotes, Region, RegionTable, TensorSpec

if TYPE_CHECKING:
    import torch

    from weightcast.transfer.layout.placement import RankPlacement


__all__ = ["LayoutBuilder", "Memory", "RankLayout"]


@dataclass(frozen=True)
class Memory:
    """The place in memory of each row of a table, in columns.

    `bases` are flat tensors, one per storage and dtype. Row i is `bases[base[i]].as_strided(size[i], stride[i],
    start[i])` with `start` and `stride` in elements. `address` (len(bases),) holds the data pointers at the time when
    the layout was made.
    """

    bases: tuple[torch.Tensor, ...]
    base: IntArray
    start: IntArray
    stride: IntArray
    address: IntArray

    def moved(self) -> list[int]:
        """Indices of bases whose storage was freed, resized or reallocated since the layout was made."""
        # The first look costs a third of the second and errs only for empty bases. There may be ten thousand bases.
        pointers = np.array([base.data_ptr() for base in self.bases], dtype=np.int64)
        suspects: list[int] = np.flatnonzero(pointers != self.address).tolist()
        return [i for i in suspects if self.bases[i].untyped_storage().data_ptr() != self.address[i]]


@dataclass(frozen=True)
class RankLayout:
    """The holdings of one rank: the table, the memory behind it, its expert placement if it has one, and its notes."""

    table: RegionTable
    memory: Memory
    placement: RankPlacement | None = None
    notes: LayoutNotes = field(default_factory=LayoutNotes)

    def view(self, row: int) -> torch.Tensor:
        """The memory of one region, shape = its size without padding dimensions. A view, never a copy."""
        m = self.memory
        ndim = int(self.table.tensors.ndim[self.table.tensor[row]])
        return m.bases[int(m.base[row])].as_strided(
            self.table.size[row, :ndim].tolist(), m.stride[row, :ndim].tolist(), int(m.start[row])
        )


class LayoutBuilder:
    """Collects regions and the views behind them, one call a region, and makes the RankLayout.

    >>> builder = LayoutBuilder()
    >>> builder.add("model.norm.weight", (64,), (0,), view)
    >>> layout = builder.build()
    """

    def __init__(self) -> None:
        self._specs: dict[str, TensorSpec] = {}
        self._regions: list[Region] = []
        self._bases: list[torch.Tensor] = []
        self._base_index: dict[tuple[int, torch.dtype], int] = {}
        self._memory: list[tuple[int, int, tuple[int, ...]]] = []

    def add(
        self, tensor: str, shape: Sequence[int], offset: Sequence[int], view: torch.Tensor, slot: int = NO_SLOT
    ) -> None:
        """Adds one region: the box at `offset` of logical tensor `tensor` with global `shape`; `view` is its memory.

        The size of the box is `view.shape`, the dtype is the view's. Raises LayoutError when the tensor was added
        before with another shape or dtype, and for views that are no tensors or whose layout is not strided.
        """
        import torch

        if not (isinstance(tensor, str) and isinstance(view, torch.Tensor)):
            raise LayoutError(
                f"a region has a name and a torch tensor as its memory, found {tensor!r} and {type(view).__name__}"
            )
        spec = TensorSpec(tuple(int(n) for n in shape), from_torch(view.dtype))
        first_spec = self._specs.setdefault(tensor, spec)
        if first_spec != spec:
            raise LayoutError(f"tensor {tensor!r} is {first_spec} in one region and {spec} in another of the same rank")
        if view.layout != torch.strided:
            raise LayoutError(
                f"tensor {tensor!r}: memory layout {view.layout} is not strided; it cannot be written in place"
            )
        self._regions.append(Region(tensor, tuple(offset), tuple(view.shape), slot))
        self._memory.append((self._base_of(view), int(view.storage_offset()), tuple(view.stride())))

    def _base_of(self, view: torch.Tensor) -> int:
        import torch

        storage = view.untyped_storage()
        key = (storage._cdata, view.dtype)
        index = self._base_index.get(key)
        if index is None:
            index = self._base_index[key] = len(self._bases)
            numel = storage.nbytes() // view.element_size()
            # Engines describe in inference mode, and a tensor made in it could not be written by another thread.
            with torch.inference_mode(False):
                flat = torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, (numel,), (1,))
            self._bases.append(flat)
        return index

    def build(self, placement: RankPlacement | None = None, notes: LayoutNotes | None = None) -> RankLayout:
        """The finished layout, validated. Raises LayoutError."""
        table = RegionTable.from_regions(self._specs, self._regions)
        stride = np.zeros((len(table), table.tensors.width), dtype=np.int64)
        for row, (_, _, strides) in enumerate(self._memory):
            stride[row, : len(strides)] = strides
        memory = Memory(
            tuple(self._bases),
            np.array([base for base, _, _ in self._memory], dtype=np.int64),
            np.array([start for _, start, _ in self._memory], dtype=np.int64),
            stride,
            np.array([b.untyped_storage().data_ptr() for b in self._bases], dtype=np.int64),
        )
        return RankLayout(table, memory, placement, notes or LayoutNotes())
