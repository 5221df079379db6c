"""What one rank holds: a table of regions, and the memory behind each row.

A *region* is a box of one logical tensor that lies in this rank's memory as one strided view. `RegionTable` has the
boxes in numpy columns and goes on the wire; `Memory` has, in the same order, where each box lies, and stays. Row i of
one is row i of the other because one call of `LayoutBuilder.add` appends to both: what is advertised and what is moved
cannot differ.

Boxes have one width D in a table, the largest number of dimensions of its tensors and at least 1. Dimensions that a
tensor lacks are padded at the end with offset 0 and size 1, so that volumes and intersections need no special case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weightcast.transfer.dtypes import ITEMSIZE, dtype_code, dtype_name, from_torch
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.expert_names import IntArray, ParsedNames, parse_names

if TYPE_CHECKING:
    import torch

    from weightcast.transfer.placement import RankPlacement

__all__ = [
    "NO_SLOT",
    "IntArray",
    "LayoutBuilder",
    "LayoutNotes",
    "Memory",
    "RankLayout",
    "RankReport",
    "Region",
    "RegionTable",
    "TensorSpec",
    "TensorTable",
    "pad_boxes",
]

NO_SLOT = -1
"""Value of the slot column for a region that belongs to no expert slot."""


class TensorSpec(NamedTuple):
    """Global shape and element type of a logical tensor; dtype is the one in the holder's memory."""

    shape: tuple[int, ...]
    dtype: str


class Region(NamedTuple):
    """One row of a table, for building and for people. Offset and size are in the logical tensor's coordinates."""

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    slot: int = NO_SLOT


def pad_boxes(column: IntArray, width: int, fill: int) -> IntArray:
    """(n, D) -> (n, width), new columns at the end filled with `fill` (0 for offsets, 1 for sizes and shapes)."""
    missing = width - column.shape[1]
    if missing <= 0:
        return column
    return np.pad(column, ((0, 0), (0, missing)), constant_values=fill)


@dataclass(frozen=True)
class TensorTable:
    """Logical tensors in columns, T of them, names distinct.

    `shape` is (T, D) int64, padded with 1; `ndim` (T,) int64, `dtype` (T,) int64 codes of `weightcast.transfer.dtypes`.
    """

    names: tuple[str, ...]
    shape: IntArray
    ndim: IntArray
    dtype: IntArray

    @classmethod
    def from_specs(cls, specs: Mapping[str, TensorSpec]) -> TensorTable:
        """Columns of `{name: (shape, dtype)}`, order kept. Raises LayoutError for an unknown dtype."""
        width = max((len(s.shape) for s in specs.values()), default=1) or 1
        shape = np.ones((len(specs), width), dtype=np.int64)
        for row, spec in enumerate(specs.values()):
            shape[row, : len(spec.shape)] = spec.shape
        ndim = np.array([len(s.shape) for s in specs.values()], dtype=np.int64)
        dtype = np.array([dtype_code(s.dtype) for s in specs.values()], dtype=np.int64)
        return cls(tuple(specs), shape, ndim, dtype)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def width(self) -> int:
        """D, the number of dimensions every box of the table is padded to."""
        return int(self.shape.shape[1])

    def spec(self, row: int) -> TensorSpec:
        """Shape (not padded) and dtype name of one tensor."""
        shape = tuple(int(n) for n in self.shape[row, : self.ndim[row]])
        return TensorSpec(shape, dtype_name(int(self.dtype[row])))

    def specs(self) -> dict[str, TensorSpec]:
        """All of them by name, in order."""
        return {name: self.spec(row) for row, name in enumerate(self.names)}

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The row of each name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def parsed_names(self) -> ParsedNames:
        """Layer, expert and family of each name."""
        return parse_names(self.names)

    @cached_property
    def joined_names(self) -> bytes:
        """The names with a NUL between each two: to hash and compare them all at once."""
        return "\0".join(self.names).encode()

    @cached_property
    def elements(self) -> IntArray:
        """(T,) elements of each whole logical tensor."""
        return np.asarray(self.shape.prod(axis=1))

    @property
    def nbytes(self) -> IntArray:
        """(T,) bytes of each whole logical tensor."""
        return np.asarray(self.elements * ITEMSIZE[self.dtype])


@dataclass(frozen=True)
class RegionTable:
    """The regions of one rank in columns, n of them.

    `tensor` is (n,) int64 rows of `tensors`; `offset` and `size` are (n, D) int64; `slot` is (n,) int64, NO_SLOT where
    the region belongs to no expert slot, else the local slot index on that rank.
    """

    tensors: TensorTable
    tensor: IntArray
    offset: IntArray
    size: IntArray
    slot: IntArray

    @classmethod
    def from_regions(cls, tensors: Mapping[str, TensorSpec], regions: Iterable[Region]) -> RegionTable:
        """Columns of a list of rows; validated. Raises LayoutError naming row, tensor and box."""
        table = TensorTable.from_specs(tensors)
        index = {name: row for row, name in enumerate(table.names)}
        rows = list(regions)
        tensor = np.empty(len(rows), dtype=np.int64)
        offset = np.zeros((len(rows), table.width), dtype=np.int64)
        size = np.ones((len(rows), table.width), dtype=np.int64)
        slot = np.empty(len(rows), dtype=np.int64)
        for i, region in enumerate(rows):
            row = index.get(region.tensor)
            if row is None:
                raise LayoutError(f"region {i} names tensor {region.tensor!r}, which is not declared")
            ndim = int(table.ndim[row])
            if len(region.offset) != ndim or len(region.size) != ndim:
                raise LayoutError(
                    f"region {i} of {region.tensor!r} has offset {list(region.offset)} and size {list(region.size)}, "
                    f"expected {ndim} numbers each for shape {list(table.spec(row).shape)}"
                )
            tensor[i], slot[i] = row, region.slot
            offset[i, :ndim], size[i, :ndim] = region.offset, region.size
        made = cls(table, tensor, offset, size, slot)
        made.validate()
        return made

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def region(self, row: int) -> Region:
        """One row for people and messages."""
        tensor = int(self.tensor[row])
        ndim = int(self.tensors.ndim[tensor])
        return Region(
            self.tensors.names[tensor],
            tuple(int(n) for n in self.offset[row, :ndim]),
            tuple(int(n) for n in self.size[row, :ndim]),
            int(self.slot[row]),
        )

    @property
    def nbytes(self) -> IntArray:
        """(n,) bytes of each region in the holder's memory."""
        return np.asarray(self.size.prod(axis=1) * ITEMSIZE[self.tensors.dtype[self.tensor]])

    def validate(self) -> None:
        """Shapes of the columns, indices, every box inside its tensor. Raises LayoutError naming the first fault."""
        n, width = len(self), self.tensors.width
        for name, column, expected in (
            ("offset", self.offset, (n, width)),
            ("size", self.size, (n, width)),
            ("slot", self.slot, (n,)),
        ):
            if column.shape != expected:
                raise LayoutError(f"column {name} has shape {column.shape}, expected {expected}")
        if len(set(self.tensors.names)) != len(self.tensors):
            raise LayoutError("two logical tensors of one table have the same name")
        bad = (self.tensor < 0) | (self.tensor >= len(self.tensors))
        if bad.any():
            row = int(bad.argmax())
            raise LayoutError(f"region {row} names tensor row {int(self.tensor[row])} of {len(self.tensors)}")
        bounds = self.tensors.shape[self.tensor]
        # Compared without adding first: offset + size of a hostile report can wrap around in int64.
        outside = (self.offset < 0) | (self.size < 0) | (self.offset > bounds) | (self.size > bounds - self.offset)
        if outside.any():
            row = int(outside.any(axis=1).argmax())
            region = self.region(row)
            raise LayoutError(
                f"region {row} of {region.tensor!r} has offset {list(region.offset)} and size {list(region.size)}, "
                f"which is not inside shape {list(self.tensors.spec(int(self.tensor[row])).shape)}"
            )
        if (self.slot < NO_SLOT).any():
            row = int((self.slot < NO_SLOT).argmax())
            raise LayoutError(
                f"region {row} of {self.region(row).tensor!r} has slot {int(self.slot[row])}, expected >= 0"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of names, shapes, dtypes and rows; equal tables, and only those, have equal fingerprints."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.tensors.joined_names)
        t = self.tensors
        for column in (t.shape, t.ndim, t.dtype, self.tensor, self.offset, self.size, self.slot):
            digest.update(repr(column.shape).encode())
            digest.update(np.ascontiguousarray(column, dtype="<i8").data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Memory:
    """Where each row of a table lies, in columns.

    `bases` are flat tensors, one per storage and dtype; row i is `bases[base[i]].as_strided(size[i], stride[i],
    start[i])` with `start` and `stride` in elements. `address` (len(bases),) holds the data pointers seen when the
    layout was made.
    """

    bases: tuple[torch.Tensor, ...]
    base: IntArray
    start: IntArray
    stride: IntArray
    address: IntArray

    def moved(self) -> list[int]:
        """Indices of bases whose storage was freed, resized or reallocated since the layout was made."""
        # The first look costs a third, there may be ten thousands of bases, and it only errs for those that are empty.
        seen = np.array([base.data_ptr() for base in self.bases], dtype=np.int64)
        suspects: list[int] = np.flatnonzero(seen != self.address).tolist()
        return [i for i in suspects if self.bases[i].untyped_storage().data_ptr() != self.address[i]]


@dataclass(frozen=True, slots=True)
class LayoutNotes:
    """What a rank declares beside its regions; all of it goes on the wire and is shown by `weightcast inspect`.

    `parameter_bytes` is what the rank's parameters occupy, `padding_bytes` how much of that the engine itself fills and
    nobody sends. `derived` names tensors that are computed from parameters after an update. `left_out` names
    logical tensors that this rank deliberately does not hold (for example MTP layers that are not loaded), with the
    reason.
    `dispatch` is the dispatch audit of an inference rank: (layer, logical expert, physical slot) triples, shape (n, 3),
    that its token dispatcher may choose.
    """

    parameter_bytes: int = 0
    padding_bytes: int = 0
    derived: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    dispatch: IntArray = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))
    dispatch_shared: bool = False
    """True where all EP ranks must have the same dispatch table (SGLang's `moe_a2a_backend none`)."""


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds: the table, the memory behind it, its expert placement if it has one, and its notes."""

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

    def box_view(self, row: int, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """The part of region `row` that is the box (offset, size) of its logical tensor; a view.

        Offset and size may be padded. The box must lie inside the region: plans are checked before they are run.
        """
        m, t = self.memory, self.table
        ndim = int(t.tensors.ndim[t.tensor[row]])
        stride = m.stride[row, :ndim]
        delta = np.asarray(offset[:ndim], dtype=np.int64) - t.offset[row, :ndim]
        start = int(m.start[row]) + int((delta * stride).sum())
        return m.bases[int(m.base[row])].as_strided([int(n) for n in size[:ndim]], stride.tolist(), start)


@dataclass(frozen=True, slots=True)
class RankReport:
    """A RankLayout as it goes on the wire: everything but the memory.

    `rank` counts within its side (trainer or one instance), 0 <= rank < world_size. `host` is a name that is equal for
    ranks on one machine, or empty when unknown.
    """

    rank: int
    world_size: int
    host: str
    table: RegionTable
    placement: RankPlacement | None = None
    notes: LayoutNotes = field(default_factory=LayoutNotes)


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
        """One region: the box at `offset` of logical tensor `tensor` with global `shape`; `view` is its memory.

        The size of the box is `view.shape`, the dtype is the view's. Raises LayoutError when the tensor was added
        before with another shape or dtype, and for views whose layout is not strided.
        """
        import torch

        spec = TensorSpec(tuple(int(n) for n in shape), from_torch(view.dtype))
        known = self._specs.setdefault(tensor, spec)
        if known != spec:
            raise LayoutError(f"tensor {tensor!r} is {known} in one region and {spec} in another of the same rank")
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
