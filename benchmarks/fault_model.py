"""The weights of `faults.py`, so small that 200 updates take minutes, and what every rank should hold of them.

The trainer has `w` in row shards and the experts of two layers by parity. An instance has `w` in column shards and
experts in slots by a placement map, some of them twice, also twice on one rank.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

import numpy as np
import torch

from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement
from weightcast.transfer.layout.tables import NO_SLOT, LayoutNotes

LAYERS, EXPERTS = 2, 4
W, E = (64, 32), (16, 24)
TRAINERS = 2
INSTANCES = {"rollout-0": 2, "rollout-1": 1}
"""Ranks of each instance."""
MAPS = {
    "rollout-0": ([0, 1, 2, 3, 3, 0], [3, 2, 1, 0, 0, 1], [1, 1, 0, 2, 3, 3]),
    "rollout-1": ([0, 1, 2, 3, 3], [3, 3, 2, 1, 0], [2, 0, 0, 1, 3]),
}
"""Maps that the last layer of an instance may have; the other layer keeps the first."""


class Held(NamedTuple):
    """One region of a rank: its box, its memory, its slot, and a name for messages."""

    tensor: str
    offset: tuple[int, ...]
    view: torch.Tensor
    slot: int = NO_SLOT


class Seen(NamedTuple):
    """What a region really holds: the hash of its bytes."""

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    slot: int
    hash: str


def expert_name(layer: int, expert: int) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"


def shape_of(tensor: str) -> tuple[int, int]:
    return W if tensor == "w" else E


def content(tensor: str, version: int) -> np.ndarray:
    """The whole tensor in a version; no element is the same in two versions or in two tensors."""
    rows, columns = shape_of(tensor)
    seed = zlib.crc32(tensor.encode()) % 1000
    values = np.arange(rows * columns, dtype=np.float64) + 10_000.0 * version + 10_000_000.0 * (seed + 1)
    return (values / 7.0).astype(np.float32).reshape(rows, columns) if seed else values.astype(np.float32)


def expected(seen: Seen, version: int) -> str:
    """The hash that a region has if it holds `version`."""
    box = tuple(slice(o, o + n) for o, n in zip(seen.offset, seen.size, strict=True))
    return hash_of(content(seen.tensor, version)[box])


def hash_of(values: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()


def trainer_pieces(rank: int) -> list[Held]:
    """What a trainer rank holds, zeros at first."""
    rows = W[0] // TRAINERS
    pieces = [Held("w", (rows * rank, 0), torch.zeros(rows, W[1]))]
    for layer in range(LAYERS):
        pieces += [Held(expert_name(layer, e), (0, 0), torch.zeros(E)) for e in range(rank, EXPERTS, TRAINERS)]
    return pieces


def fill(pieces: list[Held], version: int) -> None:
    """The trainer's step to `version`."""
    for piece in pieces:
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.view.shape, strict=True))
        piece.view.copy_(torch.from_numpy(content(piece.tensor, version)[box].copy()))


class Sink:
    """One rank of an instance. All NaN at first."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank, self.world = name, rank, INSTANCES[name]
        self.columns = W[1] // self.world
        self.w = torch.full((W[0], self.columns), float("nan"))
        self.count = len(MAPS[name][0]) // self.world
        self.slots = torch.full((LAYERS, self.count, *E), float("nan"))
        self.map = 0

    def rows(self) -> list[list[int]]:
        """The map of each layer as it is now."""
        return [MAPS[self.name][0]] * (LAYERS - 1) + [MAPS[self.name][self.map]]

    def placement(self) -> RankPlacement:
        rows = self.rows()
        placement = ExpertPlacement(np.array(rows), EXPERTS, self.world)
        return RankPlacement(placement, self.rank, self.count, len(rows[0]), 0)

    def pieces(self) -> list[Held]:
        placement = self.placement()
        held = [Held("w", (0, self.columns * self.rank), self.w)]
        for layer in range(LAYERS):
            for slot, expert in enumerate(placement.experts(layer).tolist()):
                held.append(Held(expert_name(layer, expert), (0, 0), self.slots[layer, slot], slot))
        return held

    def describe(self) -> RankLayout:
        return describe(self.pieces(), self.placement())

    def seen(self) -> list[Seen]:
        """The bytes that really lie here, by a hash that weightcast has no part in."""
        return [Seen(p.tensor, p.offset, tuple(p.view.shape), p.slot, hash_of(p.view.numpy())) for p in self.pieces()]


class Source:
    """One rank of the trainer."""

    def __init__(self, rank: int) -> None:
        self.pieces = trainer_pieces(rank)

    def describe(self) -> RankLayout:
        return describe(self.pieces, None)


def describe(pieces: list[Held], placement: RankPlacement | None) -> RankLayout:
    builder = LayoutBuilder()
    for piece in pieces:
        builder.add(piece.tensor, shape_of(piece.tensor), piece.offset, piece.view, piece.slot)
    nbytes = {piece.view.data_ptr(): piece.view.nbytes for piece in pieces}
    return builder.build(placement, LayoutNotes(parameter_bytes=sum(nbytes.values())))
