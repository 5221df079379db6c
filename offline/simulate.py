"""Predicts the time of a plan on a topology, the link that it waits for, and a lower bound for every plan.

The cost model is that of `planner.topology`. It knows bytes and links, no software: it says what the machine allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.algebra import decompose, intersect
from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.boxes.columns import lex_sort, ranges, volumes
from weightcast.transfer.layout.dtypes import ITEMSIZE
from weightcast.transfer.layout.joined import JoinedPair, Ranks, join_pair
from weightcast.transfer.plan.operations import Kind, Operations, TransferPlan
from weightcast.transfer.plan.stages import hops
from weightcast.transfer.planner.holders import find_sources
from weightcast.transfer.planner.topology import LINK_NAMES, Hosts, Topology, link_bytes, link_seconds
from weightcast.transfer.planner.waterfill import Pools, level

__all__ = ["Bound", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A time below which no plan can be, and the reason."""

    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """The predicted times of a plan. Ranks are numbered over the pair, the trainer's first.

    `labels` name the ranks; `nbytes` and `seconds` (5, ranks) are per link. `rank_seconds` (ranks,) is each rank's
    busiest link with the latency of its hops. `total` is that of the slowest rank `bottleneck`, waiting for `link`.
    `hops` is the longest chain. `bounds` come largest first.
    """

    labels: tuple[str, ...]
    first: IntArray
    nbytes: FloatArray
    seconds: FloatArray
    rank_seconds: FloatArray
    hops: int
    bounds: tuple[Bound, ...]

    @property
    def total(self) -> float:
        return float(self.rank_seconds.max(initial=0.0))

    @property
    def bottleneck(self) -> int:
        return int(self.rank_seconds.argmax())

    @property
    def link(self) -> str:
        return LINK_NAMES[int(self.seconds[:, self.bottleneck].argmax())]

    @property
    def ratio(self) -> float:
        """Predicted time over the lower bound; 1 if that is 0 s."""
        return self.total / self.bounds[0].seconds if self.bounds[0].seconds else 1.0


def simulate(
    plan: TransferPlan, trainer: Ranks, instances: Mapping[str, Ranks], hosts: Hosts, topology: Topology
) -> Simulation:
    """Plays a plan for these tables on a topology. Raises LayoutError for speeds that no link has."""
    o, topology = plan.operations, Topology.given(topology)
    source, target = hosts.number(o.src_party, o.src_rank), hosts.number(o.dst_party, o.dst_rank)
    loads = link_bytes(hosts, source, target, plan.nbytes)
    seconds = link_seconds(topology, hosts, loads)
    rank_hops = _rank_hops(plan, hosts, target)
    bounds = _bounds(plan, target, join_pair(trainer, instances), hosts, topology)
    return Simulation(
        labels=tuple(f"{party} {rank}" for party in plan.parties for rank in range(party.world)),
        first=hosts.first,
        nbytes=loads,
        seconds=seconds,
        rank_seconds=seconds.max(axis=0) + rank_hops * topology.latency_us * 1e-6,
        hops=int(rank_hops.max(initial=0)),
        bounds=tuple(sorted(bounds, key=lambda bound: -bound.seconds)),
    )


def _rank_hops(plan: TransferPlan, hosts: Hosts, target: IntArray) -> IntArray:
    """(ranks,) number of hops from the trainer to the last box of a rank; 1 for trainer ranks that send."""
    o, depth = plan.operations, hops(plan)
    counts = np.zeros(len(hosts), dtype=np.int64)
    np.maximum.at(counts, target, depth)
    counts[o.src_rank[o.kind == Kind.SEND]] = 1
    return counts


def _bounds(plan: TransferPlan, target: IntArray, pair: JoinedPair, hosts: Hosts, topology: Topology) -> list[Bound]:
    """Lower bounds for plans whose bytes are in the dtype of their destination, with relays, cuts and copies at will.

    Each operation writes to the rank `target`. Every rank of an instance receives each byte that it needs
    once, as the invariants prove of this plan.
    """
    o = plan.operations
    is_copy, nbytes = o.kind == Kind.COPY, plan.nbytes
    copy_bytes = np.bincount(target[is_copy], weights=nbytes[is_copy], minlength=len(hosts))
    transfers, code = o.take(~is_copy), plan.wire_dtype[~is_copy]
    target, nbytes = target[~is_copy], nbytes[~is_copy]
    need = np.bincount(target, weights=nbytes, minlength=len(hosts))
    seconds_per_byte = 8e-9 / topology.nic_gbps
    _, host = np.unique(hosts.host, return_inverse=True)
    ranks = np.bincount(host)
    has_peers = ranks[host] > 1
    entry = np.where(has_peers, topology.nic_gbps + topology.nvlink_gbps, topology.nic_gbps)
    bounds = [Bound(float((need * 8e-9 / entry).max(initial=0.0)), "what one rank needs, over all its links")]
    memory = (need + 2 * copy_bytes).max(initial=0.0) * 8e-9 / topology.memory_gbps
    bounds.append(Bound(float(memory), "what one rank writes to its memory"))
    # Distinct bytes that a host needs, by dtype, less those that a trainer rank on it holds.
    tensors = len(plan.tensors)
    dtypes = int(code.max(initial=0)) + 1
    boxes = decompose((host[target] * dtypes + code) * tensors + transfers.tensor, transfers.offset, transfers.size)
    cell_host = boxes.key // (dtypes * tensors)
    cell_bytes = (volumes(boxes.size) * ITEMSIZE[boxes.key // tensors % dtypes]).astype(np.float64)
    host_bytes = np.bincount(cell_host, weights=cell_bytes, minlength=ranks.shape[0])
    side = pair.trainer
    home = host[hosts.number(0, side.rank)]
    mask = np.isin(home, np.unique(cell_host))
    if mask.any():
        holdings = decompose(home[mask] * tensors + side.tensor[mask], side.offset[mask], side.size[mask])
        cell, _, _, size = intersect(
            (cell_host * tensors + boxes.key % tensors, boxes.offset, boxes.size),
            (holdings.key, holdings.offset, holdings.size),
        )
        host_bytes -= np.bincount(
            cell_host[cell], weights=volumes(size) * ITEMSIZE[boxes.key // tensors % dtypes][cell],
            minlength=ranks.shape[0],
        )  # fmt: skip
    receivers = np.bincount(host[plan.trainer.world :], minlength=ranks.shape[0])
    nics = np.ones_like(receivers) if topology.nic_per_host else np.maximum(receivers, 1)
    bounds.append(
        Bound(float((host_bytes / nics).max(initial=0.0)) * seconds_per_byte, "what one host needs once, over its NICs")
    )
    exit_seconds = _once(transfers, code, pair, hosts, topology) * seconds_per_byte
    bounds.append(Bound(exit_seconds, "one copy of all, over the NICs of the trainer's hosts"))
    return bounds


def _once(moved: Operations, code: IntArray, pair: JoinedPair, hosts: Hosts, topology: Topology) -> float:
    """The least that the busiest NIC sends if all that is needed away from the trainer's hosts leaves them once.

    A box leaves by a NIC of a host on which a trainer rank holds it. That is the NIC of this rank, or of a rank of an
    instance there, which may have the box over NVLink.
    """
    tensors = len(pair.tensors)
    side = pair.trainer
    homes = np.unique(hosts.host[: side.world])
    rows = np.flatnonzero(~np.isin(hosts.host[hosts.number(moved.dst_party, moved.dst_rank)], homes))
    boxes = decompose(
        code[rows] * tensors + moved.tensor[rows], np.take(moved.offset, rows, axis=0),
        np.take(moved.size, rows, axis=0),
    )  # fmt: skip
    sources = find_sources(side, str)
    cells = sources.cells
    cell, box, _, size = intersect(
        (cells.key, cells.offset, cells.size), (boxes.key % tensors, boxes.offset, boxes.size)
    )
    weight = volumes(size) * ITEMSIZE[boxes.key // tensors][box]
    total = np.bincount(sources.pool[cell], weights=weight, minlength=len(sources.pools)).astype(np.float64)
    _, load = level(_exits(sources.pools, side.world, hosts, topology), total, len(hosts))
    return float(load)


def _exits(pools: Pools, world: int, hosts: Hosts, topology: Topology) -> Pools:
    """The NICs by which the boxes of a pool of trainer ranks can leave their hosts: numbers of ranks, or of hosts where
    ranks share a NIC."""
    _, host = np.unique(hosts.host, return_inverse=True)
    pool = np.repeat(np.arange(len(pools), dtype=np.int64), np.diff(pools.start))
    homes = np.unique(np.stack([pool, host[pools.rank]]), axis=1)
    if topology.nic_per_host:
        pool, member = homes
    else:
        guests = world + np.argsort(host[world:], kind="stable")
        start, end = (np.searchsorted(host[guests], homes[1], side=bound) for bound in ("left", "right"))
        pool = np.concatenate([pool, np.repeat(homes[0], end - start)])
        member = np.concatenate([pools.rank, guests[ranges(start, end - start)]])
    order, _ = lex_sort([pool, member])
    return Pools(np.searchsorted(pool[order], np.arange(len(pools) + 1)), member[order])
