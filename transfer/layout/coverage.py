"""A check that every logical tensor is held whole, and a message in compact ranges about those that are not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weightcast.transfer.boxes.algebra import Cells, decompose, uncovered
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import changes, lex_sort, starts_of, volumes
from weightcast.transfer.errors import CoverageError, LayoutError
from weightcast.transfer.layout.summaries import summarize
from weightcast.transfer.layout.tables import TensorTable

__all__ = ["describe_gaps", "missing_boxes", "require_cover"]

_SHOWN_TENSORS = 4
_SHOWN_BOXES = 4


def require_cover(
    tensors: TensorTable, trainer: Cells, instances: Mapping[str, Cells], required: Mapping[str, IntArray]
) -> None:
    """Checks that the instances and the trainer hold their tensors whole.

    An instance must hold the whole of each tensor that it holds part of and of each required one; the trainer the whole
    of all these. `required[name]` are tensor rows that instance `name` must hold. Raises CoverageError naming all gaps
    in one line.
    """
    gaps: list[str] = []
    union = np.zeros(len(tensors), dtype=np.bool_)
    for name, cells in instances.items():
        mask = np.zeros(len(tensors), dtype=np.bool_)
        mask[cells.key] = True
        mask[required[name]] = True
        union |= mask
        gaps.extend(_gaps(tensors, cells, mask, f"on no rank of {name}"))
    gaps.extend(_gaps(tensors, trainer, union, "on no trainer rank"))
    if gaps:
        raise CoverageError("; ".join(gaps))


def _gaps(tensors: TensorTable, cells: Cells, wanted: np.ndarray, where: str) -> list[str]:
    rows = uncovered(cells.key, cells.offset, cells.size, tensors.shape)
    rows = rows[wanted[rows]]
    return [f"{describe_gaps(tensors, cells, rows)}: {where}"] if rows.size else []


def describe_gaps(tensors: TensorTable, cells: Cells, short: IntArray) -> str:
    """Names the tensors of `short` that no cell touches, in ranges. Of the others it says which boxes are missing."""
    touch = np.isin(short, cells.key)
    texts = [summarize(tensors.names[row] for row in short[~touch].tolist())] if not touch.all() else []
    partial_rows = short[touch].tolist()
    for row in partial_rows[:_SHOWN_TENSORS]:
        mask = cells.key == row
        texts.append(f"{tensors.names[row]}{_boxes(tensors, row, cells.offset[mask], cells.size[mask])}")
    if len(partial_rows) > _SHOWN_TENSORS:
        texts.append("parts of " + summarize(tensors.names[row] for row in partial_rows[_SHOWN_TENSORS:]))
    return "; ".join(texts)


def _boxes(tensors: TensorTable, row: int, offset: IntArray, size: IntArray) -> str:
    ndim = int(tensors.ndim[row])
    shape = [int(n) for n in tensors.shape[row, :ndim]]
    try:
        low, extent = missing_boxes(offset, size, tensors.shape[row])
    except LayoutError:
        return f" (parts of shape {shape})"
    texts = [
        "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(box[:ndim], span[:ndim], strict=True)) + "]"
        for box, span in zip(low[:_SHOWN_BOXES].tolist(), extent[:_SHOWN_BOXES].tolist(), strict=True)
    ]
    ending = f" and {len(low) - _SHOWN_BOXES} more boxes" if len(low) > _SHOWN_BOXES else ""
    return f"{' '.join(texts)}{ending} of shape {shape}"


def missing_boxes(offset: IntArray, size: IntArray, shape: IntArray) -> tuple[IntArray, IntArray]:
    """Disjoint boxes (offset, size) of a tensor of `shape` (D,) that the given boxes leave free, neighbours joined.

    Raises LayoutError when the boxes are too many and too irregular to describe.
    """
    tensor_row = offset.shape[0]
    offset = np.concatenate([offset, np.zeros((1, shape.shape[0]), dtype=np.int64)])
    size = np.concatenate([size, shape[None, :]])
    cells = decompose(np.zeros(tensor_row + 1, dtype=np.int64), offset, size)
    gap = (np.diff(cells.start) == 1) & (cells.row[cells.start[:-1]] == tensor_row)
    return _joined(cells.offset[gap], cells.size[gap])


def _joined(offset: IntArray, size: IntArray) -> tuple[IntArray, IntArray]:
    """Joins boxes that touch along one dimension and agree in the others. Returns offset and size, (n, D) each."""
    dims = offset.shape[1]
    for dim in reversed(range(dims)):
        columns = [column for d in range(dims) if d != dim for column in (offset[:, d], size[:, d])]
        order, _ = lex_sort([*columns, offset[:, dim]])
        offset, size = offset[order], size[order]
        heads = np.ones(offset.shape[0], dtype=np.bool_)
        heads[1:] = offset[1:, dim] != offset[:-1, dim] + size[:-1, dim]
        for column in columns:
            heads |= changes(column[order])
        starts = starts_of(heads)
        end = offset[starts[1:] - 1, dim] + size[starts[1:] - 1, dim]
        offset, size = offset[starts[:-1]], size[starts[:-1]]
        size[:, dim] = end - offset[:, dim]
    assert (volumes(size) > 0).all()
    order, _ = lex_sort(list(offset.T))
    return offset[order], size[order]
