"""Tables of the regions that one rank holds.

A *region* is a box of one logical tensor that lies in this rank's memory as one strided view. `RegionTable` has the
boxes in numpy columns and goes on the wire. `memory.Memory` has, in the same order, the place of each box, and stays.
Row i of one is row i of the other, because one call of `memory.LayoutBuilder.add` appends to both. So the regions that
are advertised and those that are moved cannot differ.

Boxes have one width D in a table, the largest number of dimensions of its tensors and at least 1. Dimensions that a
tensor lacks are padded at the end with offset 0 and size 1, so that volumes and intersections need no special case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_code, dtype_name
from weightcast.transfer.layout.tensor_names import ParsedNames, parse_names

if TYPE_CHECKING:
    from weightcast.transfer.layout.placement import RankPlacement

__all__ = ["NO_SLOT", "LayoutNotes", "RankReport", "Region", "RegionTable", "TensorSpec", "TensorTable"]

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


@dataclass(frozen=True)
class TensorTable:
    """Logical tensors in columns, T of them, names distinct.

    `shape` is (T, D) int64, padded with 1; `ndim` (T,) int64, `dtype` (T,) int64 codes of
    `weightcast.transfer.layout.dtypes`.
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
        """Specs of all tensors by name, in order."""
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
        region_table = cls(table, tensor, offset, size, slot)
        region_table.validate()
        return region_table

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def region(self, row: int) -> Region:
        """One row as a Region, for people and messages."""
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
        """Checks columns and indices, and that every box is inside its tensor. Raises LayoutError naming the first
        fault."""
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
        fault = (self.tensor < 0) | (self.tensor >= len(self.tensors))
        if fault.any():
            row = int(fault.argmax())
            raise LayoutError(f"region {row} names tensor row {int(self.tensor[row])} of {len(self.tensors)}")
        bounds = self.tensors.shape[self.tensor]
        # Compared without adding first: offset + size of a hostile report can wrap around in int64.
        outliers = (self.offset < 0) | (self.size < 0) | (self.offset > bounds) | (self.size > bounds - self.offset)
        if outliers.any():
            row = int(outliers.any(axis=1).argmax())
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


@dataclass(frozen=True, slots=True)
class LayoutNotes:
    """Declarations of a rank beside its regions; all of them go on the wire and are shown by `weightcast inspect`.

    `parameter_bytes` is what the rank's parameters occupy, `padding_bytes` how much of that the engine itself fills and
    nobody sends. `derived` names tensors that are computed from parameters after an update. `left_out` names logical
    tensors that this rank deliberately does not hold (for example MTP layers that are not loaded), with the reason.
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
