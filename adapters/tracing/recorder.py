"""Rows of a trace: the regions, fills and opaque writes of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightcast.adapters.tracing.strided import Aligned, Base, Box, Copy, Dim, NotABoxError, align

if TYPE_CHECKING:
    import torch


__all__ = ["Fill", "OpaqueWrite", "Recorder", "TracedRegion", "copy_between"]


@dataclass(frozen=True, slots=True)
class TracedRegion:
    """Box `box` of `parameter` is written with the box (offset, view.shape) of logical tensor `tensor`.

    `view` is the memory of the box, its dimensions in the order of the logical tensor's; `box` is in the coordinates of
    the parameter. `order` numbers all writes of the trace.
    """

    parameter: str
    box: Box
    tensor: str
    offset: tuple[int, ...]
    view: torch.Tensor
    order: int


@dataclass(frozen=True, slots=True)
class Fill:
    """The loader fills box `box` of `parameter` with a constant: padding, unless a later copy overwrites it.

    `value` is NaN where the trace does not tell several numbers apart.
    """

    parameter: str
    box: Box
    order: int
    value: float


@dataclass(frozen=True, slots=True)
class OpaqueWrite:
    """A write of `operator` into box `box` of `parameter` that is no strided copy; `why` says what it is."""

    parameter: str
    box: Box
    operator: str
    why: str


@dataclass(slots=True)
class Recorder:
    """Collects the writes of a trace and turns them into regions in the parameters' own coordinates."""

    parameters: Mapping[str, torch.Tensor]
    regions: list[TracedRegion] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    opaque: list[OpaqueWrite] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Logical tensors that were read."""
    written: set[str] = field(default_factory=set)
    """Parameters that were written; the tracer empties it between the loader and the end of a session."""
    order: int = 0
    """Number of writes into parameters so far."""
    _bases: dict[str, Base] = field(default_factory=dict)

    def base(self, parameter: str) -> Base:
        """Offset, sizes and strides of a parameter as allocated, in elements."""
        base = self._bases.get(parameter)
        if base is None:
            t = self.parameters[parameter]
            base = self._bases[parameter] = Base(int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))
        return base

    def copied(self, parameter: str, tensor: str, logical: Base, copy: Copy) -> None:
        """Records a copy of logical `tensor`, allocated as `logical`, into a parameter. Raises NotABoxError."""
        self.used.add(tensor)
        for source in align(copy, logical, "src"):
            parts = list(align(source.copy, self.base(parameter), "dst"))
            if len(parts) == 1:
                self._region(parameter, parts[0].box, tensor, source)
                continue
            for part in parts:
                pieces = list(align(part.copy, logical, "src"))
                if len(pieces) != 1:
                    raise NotABoxError("boxes of the parameter and of the checkpoint tensor that do not fit together")
                self._region(parameter, part.box, tensor, pieces[0])

    def _region(self, parameter: str, box: Box, tensor: str, source: Aligned) -> None:
        import torch

        memory = self.parameters[parameter].data
        view = torch.as_strided(memory, source.box.size, source.other, source.copy.dst_offset)
        self.order += 1
        self.written.add(parameter)
        self.regions.append(TracedRegion(parameter, box, tensor, source.box.start, view, self.order))

    def filled(self, parameter: str, copy: Copy, value: float) -> None:
        """Records a constant in a view of a parameter; only the destination of `copy` counts. Raises NotABoxError."""
        for piece in align(copy, self.base(parameter), "dst"):
            self.order += 1
            self.written.add(parameter)
            self.fills.append(Fill(parameter, piece.box, self.order, value))

    def refused(self, parameter: str, dst: torch.Tensor, operator: str, why: str) -> None:
        """Records a write of a parameter that is no strided copy."""
        self.written.add(parameter)
        self.opaque.append(OpaqueWrite(parameter, self._around(parameter, dst), operator, why))

    def _around(self, parameter: str, dst: torch.Tensor) -> Box:
        """The box of a view for a message; the whole parameter where the view is no box."""
        base = self.base(parameter)
        try:
            boxes = [piece.box for piece in align(copy_between(dst), base, "dst")]
        except NotABoxError:
            boxes = []
        return boxes[0] if len(boxes) == 1 else Box((0,) * len(base.size), base.size)


def copy_between(dst: torch.Tensor, src: torch.Tensor | None = None) -> Copy:
    """The copy of one view into another of the same shape; without `src` the source does not move."""
    steps = (0,) * dst.dim() if src is None else src.stride()
    dims = tuple(Dim(n, d, s) for n, d, s in zip(dst.shape, dst.stride(), steps, strict=True) if n > 1)
    return Copy(int(dst.storage_offset()), 0 if src is None else int(src.storage_offset()), dims)
