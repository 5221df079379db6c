"""Tensor tables and boxes on the wire, and the checks that they share: part of `weightcast.transfer.wire.messages`.

Every check raises an InputError. None forms a product or sum before it has checked that it stays within 64 bits.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.layout.dtypes import NAMES
from weightcast.transfer.layout.tables import RegionTable, TensorTable
from weightcast.transfer.wire.frames import FrameReader, FrameWriter

__all__ = ["check_regions", "read_tensors", "write_tensors"]

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
        repeated = next(name for name, number in Counter(names).items() if number > 1)
        raise r.error(f"names tensor {repeated!r:.200} twice")
    shape, ndim = r.matrix("shape", count, width), r.column("ndim", count, 0, width)
    tensors = TensorTable(names, shape, ndim, r.column("tensor_dtype", count, 0, len(NAMES) - 1))
    _check_padding(r, tensors, np.arange(count), np.zeros_like(shape), shape)
    if (tensors.shape < 0).any():
        row = int((tensors.shape < 0).any(axis=1).argmax())
        raise r.error(f"has shape {tensors.shape[row].tolist()} of tensor {names[row]!r:.200}, which is negative")
    _check_elements(r, tensors)
    return tensors


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
    _check_sum(r, elements, "tensors")


def check_regions(r: FrameReader, table: RegionTable, what: str) -> None:
    """Checks that tensor rows are in range and boxes inside their tensors; `what` names the boxes."""
    table.validate()
    _check_padding(r, table.tensors, table.tensor, table.offset, table.size)
    _check_sum(r, table.size.prod(axis=1), what)


def _check_padding(r: FrameReader, tensors: TensorTable, tensor: IntArray, offset: IntArray, size: IntArray) -> None:
    """Checks that dimensions which a tensor lacks have offset 0 and size 1."""
    padding = np.arange(tensors.width)[None, :] >= tensors.ndim[tensor][:, None]
    bad = padding & ((offset != 0) | (size != 1))
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        name = tensors.names[int(tensor[row])]
        raise r.error(f"has a box of {name!r:.200} in row {row} that reaches into dimensions the tensor lacks")


def _check_sum(r: FrameReader, elements: IntArray, what: str) -> None:
    """Checks that the elements of all rows together can be counted in bytes."""
    # Summed in floating point, which cannot wrap around; 2^59 elements of 8 bytes stay well inside int64.
    if float(elements.sum(dtype=np.float64)) > 2.0**59:
        raise r.error(f"has {what} of more elements together than 64 bits can count in bytes")
