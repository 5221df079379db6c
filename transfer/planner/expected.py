"""Demand that each layer of each instance is expected to have on the trainer's ranks, whatever its expert map.

A block is what one instance receives of one layer. Each block is assigned by itself (`assign`), beside the load that is
expected of the others. So a map that changes in one block leaves the sources of all others alone.
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
    """Bytes that blocks are expected to ask for.

    `alone` (blocks, world) are asked of ranks that alone hold them. `shared` (blocks, pools) are asked of each pool
    with more than one member, in the order of `shared_pools`. They are about `items` (blocks, pools) boxes of one size.
    """

    alone: FloatArray
    shared: FloatArray
    items: FloatArray

    def of(self, blocks: IntArray) -> Expected:
        """The rows of `blocks` (indices) alone."""
        return Expected(self.alone[blocks], self.shared[blocks], self.items[blocks])


def shared_pools(pools: Pools) -> IntArray:
    """Numbers of the pools with more than one member, ascending."""
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
    """Expected demand of an instance by layer: for its slots, as much of each expert of a layer as of others.

    The size of the regions in slots counts, the experts in them do not. `side` is the instance's number and
    columns, `weight` the bytes of its sends. `rows` are those of the side that were bound, None for all.
    """
    number, ranks = side
    cells, layers = sources.cells, pair.layers.shape[0]
    shape = layers, len(reach.pools)
    row = receives.row[receives.sends]
    slotless = np.flatnonzero(ranks.slot[row] == NO_SLOT)
    cell, nbytes = receives.cell[slotless], weight[slotless].astype(np.float64)
    layer, pool = pair.layer[cells.key[cell]], reach.pool(cell, reach.columns(number, ranks.rank[row[slotless]]))
    demand = sums(layer, pool, nbytes, shape)
    squares = sums(layer, pool, nbytes**2, shape)
    slot_rows = np.flatnonzero(ranks.slot != NO_SLOT) if rows is None else rows[ranks.slot[rows] != NO_SLOT]
    if slot_rows.size:
        tensor = ranks.tensor[slot_rows]
        slot_tensors = np.zeros(len(pair.tensors), dtype=np.bool_)
        slot_tensors[tensor] = True
        cell = np.flatnonzero(slot_tensors[cells.key])
        layer = pair.layer[cells.key[cell]]
        load = (volumes(np.take(cells.size, cell, axis=0)) * ITEMSIZE[ranks.dtype[cells.key[cell]]]).astype(np.float64)
        layer_load = np.maximum(np.bincount(layer, weights=load, minlength=layers), 1.0)[:, None]
        nbytes = volumes(np.take(ranks.size, slot_rows, axis=0)) * ITEMSIZE[ranks.dtype[tensor]]
        columns = reach.columns(number, ranks.rank[slot_rows])
        for column in reach.hosts_of(number):
            host_rows = np.flatnonzero(columns == column)
            total = np.bincount(pair.layer[tensor[host_rows]], weights=nbytes[host_rows], minlength=layers)[:, None]
            pool = reach.pool(cell, column)
            demand += np.rint(sums(layer, pool, load, shape) * (total / layer_load))
            squares += total / layer_load * sums(layer, pool, load**2, shape)
    shared_pool = shared_pools(reach.pools)
    lone_pool = np.flatnonzero(np.diff(reach.pools.start) == 1)
    lone_demand = np.zeros((layers, pair.trainer.world))
    lone_demand[:, reach.pools.rank[reach.pools.start[lone_pool]]] = demand[:, lone_pool]
    return Expected(lone_demand, demand[:, shared_pool], (demand**2 / np.maximum(squares, 1.0))[:, shared_pool])


def sums(row: IntArray, column: IntArray, weight: IntArray | FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Sums of weights (n,) in a matrix of `shape`, by `row` and `column` (n,)."""
    totals = np.bincount(row * shape[1] + column, weights=weight, minlength=shape[0] * shape[1])
    return totals.astype(np.float64).reshape(shape)


def others_load(pools: Pools, expected: Expected) -> FloatArray:
    """(blocks, world) for each block the load that all other blocks are expected to put on each rank.

    Pools are served one after the other. First the blocks with fewer boxes than a pool has ranks are assigned, box by
    box, to the ranks in turn. The rest rises to one level on top of that. Each block with more boxes uses all ranks
    alike, so that it can make up for what its map asks of them. Where boxes leave a rank below the level of fractions
    it counts as level: each block would fill the same gap.
    """
    block_load = expected.alone.copy()
    load = block_load.sum(axis=0)
    level = load.copy()
    for column, pool in enumerate(shared_pools(pools).tolist()):
        weight, items = expected.shared[:, column], expected.items[:, column]
        if not weight.any():
            continue
        ranks = pools.rank[pools.start[pool] : pools.start[pool + 1]]
        level[ranks] += fill(weight.sum()[None], level[None, ranks])[0]
        small_blocks = np.flatnonzero((weight > 0) & (items < ranks.shape[0]))
        if small_blocks.size:
            count = np.maximum(np.rint(items[small_blocks]), 1.0).astype(np.int64)
            block, box = np.repeat(small_blocks, count), np.repeat(weight[small_blocks] / count, count)
            turn = np.cumsum(fill(weight[small_blocks].sum()[None], load[None, ranks])[0])
            rank = ranks[np.minimum(np.searchsorted(turn, np.cumsum(box) - box / 2), ranks.shape[0] - 1)]
            np.add.at(block_load, (block, rank), box)
            np.add.at(load, rank, box)
        large_blocks = np.setdiff1d(np.flatnonzero(weight), small_blocks)
        if large_blocks.size:
            room = fill(weight[large_blocks].sum()[None], load[None, ranks])[0]
            block_load[np.ix_(large_blocks, ranks)] += weight[large_blocks, None] * (room / weight[large_blocks].sum())
            load[ranks] += room
    other_load: FloatArray = np.rint(np.maximum(np.maximum(load, level) - block_load, 0.0))
    return other_load
