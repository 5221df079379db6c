"""Do the regions of all ranks rebuild the truth? Shared by the tests of sources."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from weightcast.transfer.layout.memory import RankLayout

__all__ = ["Rows", "count_calls", "faults", "rows_of"]

Rows: TypeAlias = "list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]"
"""(tensor, global shape, offset, contents) of every region of a rank."""


def rows_of(layout: RankLayout) -> Rows:
    """A copy of what a rank holds, to be saved for the test."""
    found = []
    for row in range(len(layout.table)):
        region = layout.table.region(row)
        shape = layout.table.tensors.spec(int(layout.table.tensor[row])).shape
        found.append((region.tensor, shape, region.offset, layout.view(row).clone()))
    return found


def faults(ranks: list[Rows], truth: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong with these regions; empty when they rebuild the truth."""
    held = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in truth.items()}
    found = []
    for rank, regions in enumerate(ranks):
        for name, shape, offset, view in regions:
            if name not in truth or shape != tuple(truth[name].shape) or view.dtype != truth[name].dtype:
                found.append(f"rank {rank}: {name} {shape} {view.dtype} is not in the checkpoint")
                continue
            box = tuple(slice(begin, begin + size) for begin, size in zip(offset, view.shape, strict=True))
            held[name][box] = True
            if not torch.equal(truth[name][box], view):
                found.append(f"rank {rank}: {name} at {offset} differs")
    return found + [f"{name}: part is on no rank" for name, mask in held.items() if not mask.all()]


def count_calls(work: Callable[[], Any]) -> int:
    """How many functions, of Python and of C, are called: the cost of something, whatever else the machine does."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
