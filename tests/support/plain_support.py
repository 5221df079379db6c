"""Endpoints over plain tensors, for tests that need a real source or sink but no framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
from weightcast.transfer.layout.tables import NO_SLOT, LayoutNotes

if TYPE_CHECKING:
    import torch

    from weightcast.transfer.layout.placement import RankPlacement

__all__ = ["Piece", "PlainSink", "describe_pieces"]


class Piece(NamedTuple):
    """One region: the box at `offset` of tensor `name` with global `shape`, in the memory `view`."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    view: torch.Tensor
    slot: int = NO_SLOT


def describe_pieces(pieces: Sequence[Piece], placement: RankPlacement | None = None) -> RankLayout:
    """The layout of these regions, in this order."""
    builder = LayoutBuilder()
    for name, shape, offset, view, slot in pieces:
        builder.add(name, shape, offset, view, slot)
    return builder.build(placement, LayoutNotes(parameter_bytes=sum(p.view.nbytes for p in pieces)))


class PlainSink:
    """An inference rank of given regions. `pieces` and `rank_placement` may be changed to play a rebalance.

    >>> sink = PlainSink([Piece("w", (4, 2), (2, 0), torch.zeros(2, 2))])
    """

    def __init__(self, pieces: Sequence[Piece | tuple], rank_placement: RankPlacement | None = None) -> None:  # type: ignore[type-arg]
        self.pieces = [Piece(*piece) for piece in pieces]
        self.rank_placement = rank_placement

    def describe(self) -> RankLayout:
        return describe_pieces(self.pieces, self.rank_placement)

    def placement(self) -> RankPlacement | None:
        return self.rank_placement
