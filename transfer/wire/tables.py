"""Tensor tables and boxes on the wire, and the checks that they share: part of `weightcast.transfer.wire.messages`.

Every check raises an InputError. None forms a product or sum before it has checked that it stays within 64 bits.
"""

from __future__ import annotations

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.layout.dtypes import NAMES
from weightcast.transfer.layout.tables import NO_SLOT, RegionTable, TensorTable
from weightcast.transfer.wire.frames import FrameReader, FrameWriter

__all__ = ["check_boxes", "check_padding", "check_range", "check_sum", "read_tensors", "write_tensors"]

_MAX_TENSOR_ELEMENTS = 1 << 48


def write_tensors(w: FrameWriter, tensors: TensorTable) -> None:
    """Puts a tensor table into a frame."""
    w.strings("names", tensors.names)
    w.matrix("shape", tensors.shape)
    w.column("ndim", tensors.ndim)
    w.column("tensor_dtype", tensors.dtype)


def read_tensors(r: FrameReader) -> TensorTable:
    """Takes a tensor table out of a frame, validated."""
    names = r.strings("names")
    count, width = len(names), r.width("shape")
    if len(set(names)) != count:
        raise r.error(f"names tensor {_first_repeated(names)!r:.200} twice")
    shape, ndim = r.matrix("shape", count, width), r.column("ndim", count)
    tensors = TensorTable(names, shape, ndim, r.column("tensor_dtype", count))
    check_range(r, "ndim", tensors.ndim, 0, width)
    check_range(r, "dtype code", tensors.dtype, 0, len(NAMES) - 1)
    rows = np.arange(count)
    check_padding(r, tensors, rows, np.zeros_like(tensors.shape), tensors.shape)
    if (tensors.shape < 0).any():
        row = int((tensors.shape < 0).any(axis=1).argmax())
        raise r.error(f"has shape {tensors.shape[row].tolist()} of tensor {names[row]!r:.200}, which is negative")
    _check_elements(r, tensors)
    return tensors


def _first_repeated(names: tuple[str, ...]) -> str:
    prefix: set[str] = set()
    return next(name for name in names if name in prefix or prefix.add(name))  # type: ignore[func-returns-value]


def _check_elements(r: FrameReader, tensors: TensorTable) -> None:
    """Checks the number of elements of each tensor and of all together; no product in it can wrap around."""
    elements = np.ones(len(tensors), dtype=np.int64)
    for dimension in np.maximum(tensors.shape, 1).T:
        excess = elements > _MAX_TENSOR_ELEMENTS // dimension
        if excess.any():
            row = int(excess.argmax())
            name = tensors.names[row]
            raise r.error(f"has shape {tensors.shape[row].tolist()} of tensor {name!r:.200}, which is too large")
        elements = elements * dimension
    check_sum(r, elements, "tensors")


def check_range(r: FrameReader, name: str, values: IntArray, low: int, high: int) -> None:
    """Checks that low <= value <= high in every row."""
    bad = (values < low) | (values > high)
    if bad.any():
        row = int(bad.argmax())
        raise r.error(f"has {name} {int(values[row])} in row {row}, expected {low}..{high}")


def check_boxes(r: FrameReader, tensors: TensorTable, tensor: IntArray, offset: IntArray, size: IntArray) -> None:
    """Checks, as for the regions of a report, that tensor rows are in range and boxes inside their tensors."""
    RegionTable(tensors, tensor, offset, size, np.full(len(tensor), NO_SLOT, dtype=np.int64)).validate()
    check_padding(r, tensors, tensor, offset, size)
    check_sum(r, size.prod(axis=1), "boxes")


def check_padding(r: FrameReader, tensors: TensorTable, tensor: IntArray, offset: IntArray, size: IntArray) -> None:
    """Checks that dimensions which a tensor lacks have offset 0 and size 1."""
    padding = np.arange(tensors.width)[None, :] >= tensors.ndim[tensor][:, None]
    bad = padding & ((offset != 0) | (size != 1))
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        name = tensors.names[int(tensor[row])]
        raise r.error(f"has a box of {name!r:.200} in row {row} that reaches into dimensions the tensor lacks")


def check_sum(r: FrameReader, elements: IntArray, what: str) -> None:
    """Checks that the elements of all rows together can be counted in bytes."""
    # Summed in floating point, which cannot wrap around; 2^59 elements of 8 bytes stay well inside int64.
    if float(elements.sum(dtype=np.float64)) > 2.0**59:
        raise r.error(f"has {what} of more elements together than 64 bits can count in bytes")
