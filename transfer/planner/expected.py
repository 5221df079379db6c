"""What each layer of each instance is expected to ask of the trainer's ranks, whatever its expert map.

A block is what one instance receives of one layer. Blocks are dealt by themselves (`dealing`), each beside the load
that is expected of the others, so that a map that changes in one block leaves the sources of all others alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import volumes
from weightcast.transfer.layout.dtypes import ITEMSIZE
from weightcast.transfer.layout.joined import JoinedPair, JoinedRanks
from weightcast.transfer.layout.tables import NO_SLOT
from weightcast.transfer.planner.assign import fill
from weightcast.transfer.planner.holders import Sources
from weightcast.transfer.planner.locality import Reach
from weightcast.transfer.planner.receives import Receives
from weightcast.transfer.planner.waterfill import Pools

__all__ = ["Expected", "expect", "others_load", "shared_pools", "sums"]


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes that blocks are expected to ask for: `alone` (blocks, world) of ranks that alone hold them, `shared`
    (blocks, pools) of each pool with more than one member, in the order of `shared_pools`, in about `items` boxes of
    one size."""

    alone: FloatArray
    shared: FloatArray
    items: FloatArray

    def of(self, blocks: IntArray) -> Expected:
        """Some blocks."""
        return Expected(self.alone[blocks], self.shared[blocks], self.items[blocks])


def shared_pools(pools: Pools) -> IntArray:
    """Pools with more than one member."""
    return np.flatnonzero(np.diff(pools.start) > 1)


def expect(
    pair: JoinedPair,
    sources: Sources,
    reach: Reach,
    side: tuple[int, JoinedRanks],
    receives: Receives,
    weight: IntArray,
    rows: IntArray | None = None,
) -> Expected:
    """What an instance is expected to ask for, by layer: for its slots, as much of each expert of a layer as of others.

    How large the regions in slots are counts, which expert is in them does not. `side` is the instance's number and
    columns, `weight` the bytes of its sends; `rows` are those of the side that were bound, None for all.
    """
    number, own = side
    cells, layers = sources.cells, pair.layers.shape[0]
    shape = layers, len(reach.pools)
    sent = receives.row[receives.sends]
    fixed = np.flatnonzero(own.slot[sent] == NO_SLOT)
    cell, nbytes = receives.cell[fixed], weight[fixed].astype(np.float64)
    layer, pool = pair.layer[cells.key[cell]], reach.pool(cell, reach.columns(number, own.rank[sent[fixed]]))
    asked = sums(layer, pool, nbytes, shape)
    squares = sums(layer, pool, nbytes**2, shape)
    in_slot = np.flatnonzero(own.slot != NO_SLOT) if rows is None else rows[own.slot[rows] != NO_SLOT]
    if in_slot.size:
        tensor = own.tensor[in_slot]
        routed = np.zeros(len(pair.tensors), dtype=np.bool_)
        routed[tensor] = True
        cell = np.flatnonzero(routed[cells.key])
        layer = pair.layer[cells.key[cell]]
        held = (volumes(np.take(cells.size, cell, axis=0)) * ITEMSIZE[own.dtype[cells.key[cell]]]).astype(np.float64)
        once = np.maximum(np.bincount(layer, weights=held, minlength=layers), 1.0)[:, None]
        nbytes = volumes(np.take(own.size, in_slot, axis=0)) * ITEMSIZE[own.dtype[tensor]]
        columns = reach.columns(number, own.rank[in_slot])
        for column in reach.hosts_of(number):
            there = np.flatnonzero(columns == column)
            total = np.bincount(pair.layer[tensor[there]], weights=nbytes[there], minlength=layers)[:, None]
            pool = reach.pool(cell, column)
            asked += np.rint(sums(layer, pool, held, shape) * (total / once))
            squares += total / once * sums(layer, pool, held**2, shape)
    many = shared_pools(reach.pools)
    single = np.flatnonzero(np.diff(reach.pools.start) == 1)
    alone = np.zeros((layers, pair.trainer.world))
    alone[:, reach.pools.rank[reach.pools.start[single]]] = asked[:, single]
    return Expected(alone, asked[:, many], (asked**2 / np.maximum(squares, 1.0))[:, many])


def sums(row: IntArray, column: IntArray, weight: IntArray | FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """A matrix of sums of weights."""
    flat = np.bincount(row * shape[1] + column, weights=weight, minlength=shape[0] * shape[1])
    return flat.astype(np.float64).reshape(shape)


def others_load(pools: Pools, expected: Expected) -> FloatArray:
    """(blocks, world) what is expected on each rank of all blocks but one, for each.

    Pools are served one after the other. Of a pool first the blocks with fewer boxes than ranks are dealt, box by box,
    to the ranks in turn. The rest rises to one level on top of that, and each block with more boxes uses all ranks
    alike, so that it can make up for what its map asks of them. Where boxes leave a rank below the level of fractions
    it counts as level: each block would fill the same gap.
    """
    own = expected.alone.copy()
    load = own.sum(axis=0)
    level = load.copy()
    for column, pool in enumerate(shared_pools(pools).tolist()):
        weight, items = expected.shared[:, column], expected.items[:, column]
        if not weight.any():
            continue
        ranks = pools.rank[pools.start[pool] : pools.start[pool + 1]]
        level[ranks] += fill(weight.sum()[None], level[None, ranks])[0]
        few = np.flatnonzero((weight > 0) & (items < ranks.shape[0]))
        if few.size:
            count = np.maximum(np.rint(items[few]), 1.0).astype(np.int64)
            block, box = np.repeat(few, count), np.repeat(weight[few] / count, count)
            turn = np.cumsum(fill(weight[few].sum()[None], load[None, ranks])[0])
            rank = ranks[np.minimum(np.searchsorted(turn, np.cumsum(box) - box / 2), ranks.shape[0] - 1)]
            np.add.at(own, (block, rank), box)
            np.add.at(load, rank, box)
        many = np.setdiff1d(np.flatnonzero(weight), few)
        if many.size:
            room = fill(weight[many].sum()[None], load[None, ranks])[0]
            own[np.ix_(many, ranks)] += weight[many, None] * (room / weight[many].sum())
            load[ranks] += room
    others: FloatArray = np.rint(np.maximum(np.maximum(load, level) - own, 0.0))
    return others
