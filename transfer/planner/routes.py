"""Routes of the boxes that ranks need: from a trainer rank that holds a box, or an inference rank that passes it on.

Holders on the same host come first (`locality`), and loads are level (`holders`). Relays are used where the cost model
of a topology finds them faster (`relay_trees`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.columns import Columns
from weightcast.transfer.plan.operations import Kind
from weightcast.transfer.planner.assign import assign_boxes
from weightcast.transfer.planner.holders import Sources
from weightcast.transfer.planner.locality import Reach
from weightcast.transfer.planner.relay_trees import DIRECT, SHAPES, RelayGroups, depths
from weightcast.transfer.planner.topology import Hosts, Link, Topology, link_bytes, link_seconds

__all__ = ["Machine", "Needs", "Routes", "route"]

_WORTH = 0.999
"""Relays are used if they take at most so much of the time that they would replace; fewer relays are better."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Boxes that ranks of instances have to receive, n of them, ordered by party.

    `cell` is the trainer's cell, `column` the number that the Reach gives the receiver's host. `party`, `rank` and
    `region` are the receiver's, `offset` and `size` (n, D) the box. It travels in the dtype of code `dtype`, whose
    elements have `itemsize` bytes.
    """

    cell: IntArray
    column: IntArray
    party: IntArray
    rank: IntArray
    region: IntArray
    offset: IntArray
    size: IntArray
    dtype: IntArray
    itemsize: IntArray


@dataclass(frozen=True, slots=True)
class Routes(Columns):
    """Sends and relays that together fill the needs, m of them, in the order of the needs, all (m,) or (m, D).

    `need` is the row of the needs that the box is all or a part of.
    """

    need: IntArray
    kind: IntArray
    src_party: IntArray
    src_rank: IntArray
    src_region: IntArray
    offset: IntArray
    size: IntArray


@dataclass(frozen=True, slots=True)
class Machine:
    """Links and hosts by which relays are weighed.

    `copied` (ranks of the pair,) are the bytes that each rank copies in its memory, whoever sends to it.
    """

    topology: Topology
    hosts: Hosts
    copied: IntArray


def route(sources: Sources, reach: Reach, needs: Needs, world: int, machine: Machine | None = None) -> Routes:
    """Chooses among the holders in reach, and relays where they are faster. `world` counts trainer ranks.

    Relays need a `machine`, and have to be faster than the plan without relays.
    """
    router = _Router(sources, reach, needs, world)
    if machine is None:
        return router.routes(np.full(needs.cell.shape[0], DIRECT, dtype=np.int64))
    return router.best(machine)


class _Router:
    def __init__(self, sources: Sources, reach: Reach, needs: Needs, world: int) -> None:
        self._sources, self._reach, self._needs, self._world = sources, reach, needs, world
        self._pools, self._pool = reach.pools, reach.pool(needs.cell, needs.column)

    def best(self, machine: Machine) -> Routes:
        """The routes that take the least time; of those about as fast the ones tried first."""
        n, hosts, latency = self._needs, machine.hosts, machine.topology.latency_us * 1e-6
        number = hosts.number(n.party, n.rank)
        volume = n.size.prod(axis=1) * n.itemsize
        is_local = hosts.host[self._pools.rank[self._pools.start[self._pool]]] == hosts.host[number]
        scope = np.zeros_like(n.party) if machine.topology.between_instances else n.party
        groups = RelayGroups([n.cell, *n.offset.T, *n.size.T, n.dtype, scope], number, hosts.host, volume, is_local)
        best: tuple[float, Routes] | None = None
        parents: list[IntArray] = []
        for inside, between in SHAPES:
            parent = groups.parents(inside, between)
            if any(np.array_equal(parent, previous) for previous in parents):
                continue
            parents.append(parent)
            routes = self.routes(parent)
            seconds = self._seconds(routes, machine) + int(depths(parent).max(initial=0)) * latency
            if best is None or seconds < _WORTH * best[0]:
                best = seconds, routes
        assert best is not None
        return best[1]

    def _seconds(self, routes: Routes, machine: Machine) -> float:
        hosts = machine.hosts
        nbytes = routes.size.prod(axis=1) * self._needs.itemsize[routes.need]
        source = hosts.number(routes.src_party, routes.src_rank)
        target = hosts.number(self._needs.party, self._needs.rank)[routes.need]
        loads = link_bytes(hosts, source, target, nbytes)
        loads[Link.MEMORY] += 2 * machine.copied
        return float(link_seconds(machine.topology, hosts, loads).max(initial=0.0))

    def routes(self, parent: IntArray) -> Routes:
        """Sends of the items without a parent, relays of the others."""
        n = self._needs
        send_items, relay_items = np.flatnonzero(parent == DIRECT), np.flatnonzero(parent != DIRECT)
        boxes = (np.take(n.offset, send_items, axis=0), np.take(n.size, send_items, axis=0))
        send_boxes = assign_boxes(self._pools, self._pool[send_items], boxes, n.itemsize[send_items], self._world)
        need = send_items[send_boxes.item]
        entry = self._reach.entry(n.cell[need], n.column[need], send_boxes.choice)
        rank, region = self._sources.rank[entry], self._sources.region[entry]
        if not relay_items.size:
            count = need.shape[0]
            kind = np.full(count, Kind.SEND, dtype=np.int64)
            return Routes(need, kind, np.zeros(count, dtype=np.int64), rank, region, send_boxes.offset, send_boxes.size)
        giver = parent[relay_items]
        routes = Routes(
            np.concatenate([need, relay_items]),
            np.repeat(np.array([Kind.SEND, Kind.RELAY], dtype=np.int64), [need.shape[0], relay_items.shape[0]]),
            np.concatenate([np.zeros_like(need), n.party[giver]]),
            np.concatenate([rank, n.rank[giver]]),
            np.concatenate([region, n.region[giver]]),
            np.concatenate([send_boxes.offset, np.take(n.offset, relay_items, axis=0)]),
            np.concatenate([send_boxes.size, np.take(n.size, relay_items, axis=0)]),
        )
        order = np.argsort(routes.need, kind="stable")
        return routes.take(order)
