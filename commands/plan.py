"""`weightcast plan`: plan a transfer offline, from a layout bundle or the shape of a published model."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.commands.options import Commands, read_file
from weightcast.offline.bundle import Bundle, plan_document, read_bundle
from weightcast.offline.chart import draw
from weightcast.offline.models import (
    DENSE_CUTS,
    MODELS,
    instance_tables,
    random_placement,
    read_instances,
    trainer_tables,
)
from weightcast.offline.simulate import Simulation, simulate
from weightcast.transfer.errors import InputError
from weightcast.transfer.plan.operations import TransferPlan
from weightcast.transfer.plan.traffic import Traffic, traffic_of
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.planner.topology import LINK_NAMES, Hosts, Topology, read_topology

__all__ = ["add"]

RANKS_PER_HOST = 8
"""Ranks of a simulated host, unless layouts or topology say otherwise."""
_MOST_REDUNDANT = 1 << 14
"""Slots beyond the experts of a layer: far more than an instance has, and few enough to make layouts of."""


def add(commands: Commands) -> None:
    """Adds the parser of `weightcast plan`."""
    parser = commands.add_parser("plan", help="plan a transfer offline, from a layout bundle or a model's shape")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--layouts", type=Path, metavar="FILE", help="layout bundle, JSON or msgpack")
    source.add_argument("--shape", choices=sorted(MODELS), help="a published model instead of a bundle")
    parser.add_argument("--json", action="store_true", help="print all operations as JSON (with --shape the summary)")
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not prove the plan's invariants")
    shape = parser.add_argument_group("with --shape")
    shape.add_argument("--trainer", default="pp8xep32", help="pp8xep32, pp8xep32xdp2 or fsdp64 (default: %(default)s)")
    shape.add_argument("--instances", default="8x16", help="how many x ranks of each (default: %(default)s)")
    shape.add_argument("--redundant", type=int, default=0, help="redundant slots a layer (default: %(default)s)")
    shape.add_argument("--maps", choices=["equal", "different"], default="different", help="instances' placements")
    shape.add_argument("--dense", choices=DENSE_CUTS, default="replicated", help="dense weights of an instance")
    shape.add_argument("--dtype", default="bfloat16", help="dtype of the instances' matrices (default: %(default)s)")
    cluster = parser.add_argument_group("on a cluster")
    cluster.add_argument(
        "--simulate",
        type=Path,
        metavar="TOPOLOGY",
        help="TOML or JSON with nic_gbps and optionally nvlink_gbps, memory_gbps, latency_us, nic_per_host, "
        f"ranks_per_host ({RANKS_PER_HOST}), colocated, between_instances: predict the time of each rank",
    )
    cluster.add_argument("--no-relays", dest="relays", action="store_false", help="all boxes straight from the trainer")
    cluster.add_argument("--picture", type=Path, metavar="HTML", help="draw the load of each rank")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.picture and not arguments.simulate:
        raise InputError("--picture draws a simulation: give --simulate TOPOLOGY too")
    bundle = _of_shape(arguments) if arguments.shape else read_bundle(read_file(arguments.layouts))
    topology = _topology(arguments.simulate) if arguments.simulate else None
    hosts = Hosts.of(bundle.trainer_hosts, list(bundle.instance_hosts.values()), topology)
    start = time.perf_counter()
    plan = plan_transfer(
        bundle.trainer,
        bundle.instances,
        check=arguments.check,
        required=bundle.tensors.names,
        hosts=hosts,
        topology=topology if arguments.relays else None,
    )
    seconds = time.perf_counter() - start
    traffic = traffic_of(plan)
    simulation = None
    if topology is not None and hosts is not None:
        simulation = simulate(plan, bundle.trainer, bundle.instances, hosts, topology)
    if arguments.picture and simulation is not None:
        _write(arguments.picture, draw(simulation, _title(arguments)))
    if arguments.json:
        document = plan_document(plan, traffic, seconds, operations=not arguments.shape)
        if simulation is not None:
            document["simulation"] = _document(simulation)
        json.dump(document, sys.stdout)
        print()
    elif simulation is not None:
        print(_verdict(simulation, plan, traffic))
    else:
        print(_plan_table(plan, traffic, seconds, checked=arguments.check))


def _topology(path: Path) -> Topology:
    """The topology in a file. Where it does not say how many ranks a host has, they are as many as a host has GPUs."""
    topology = read_topology(read_file(path))
    return replace(topology, ranks_per_host=topology.ranks_per_host or RANKS_PER_HOST)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _of_shape(arguments: argparse.Namespace) -> Bundle:
    model = MODELS[arguments.shape]
    count, world = read_instances(arguments.instances)
    if not 0 <= arguments.redundant <= _MOST_REDUNDANT:
        raise InputError(f"--redundant {arguments.redundant}: expected a number from 0 to {_MOST_REDUNDANT:,}")
    layouts = [
        tuple(
            instance_tables(
                model, world, random_placement(model, arguments.redundant, seed), arguments.dense, arguments.dtype
            )
        )
        for seed in range(1 if arguments.maps == "equal" else count)
    ]
    trainer = tuple(trainer_tables(model, arguments.trainer))
    instances = {f"instance-{i}": layouts[i % len(layouts)] for i in range(count)}
    # Every rank's catalogue has the tensors of that rank alone; nothing beyond what some rank holds is required.
    return Bundle(
        trainer[0].tensors, trainer, ("",) * len(trainer), instances, {name: ("",) * world for name in instances}
    )


def _title(arguments: argparse.Namespace) -> str:
    if not arguments.shape:
        return f"{arguments.layouts.name} on {arguments.simulate.name}"
    return (
        f"{arguments.shape}, trainer {arguments.trainer} to instances {arguments.instances}, {arguments.dtype}, "
        f"on {arguments.simulate.name}"
    )


def _document(s: Simulation) -> dict[str, Any]:
    return {
        "seconds": s.total,
        "bottleneck": {"rank": s.labels[s.bottleneck], "link": s.link},
        "lower_bound_seconds": s.bounds[0].seconds,
        "ratio": s.ratio,
        "hops": s.hops,
        "bounds": [{"seconds": bound.seconds, "reason": bound.reason} for bound in s.bounds],
        "ranks": [
            {"rank": label, "seconds": float(s.rank_seconds[i]), "links": dict(zip(LINK_NAMES, row, strict=True))}
            for i, (label, row) in enumerate(zip(s.labels, s.seconds.T.tolist(), strict=True))
        ],
    }


_SHOWN = 32
"""Number of ranks up to which all are listed; of more, only the two busiest of each side."""


def _verdict(s: Simulation, plan: TransferPlan, traffic: Traffic) -> str:
    rows: list[tuple[str, ...]] = [("rank", "seconds", *LINK_NAMES)]
    for start, stop in zip(s.first[:-1].tolist(), s.first[1:].tolist(), strict=True):
        order = np.arange(start, stop)
        if len(s.labels) > _SHOWN and stop - start > 2:
            order = np.sort(start + np.argsort(-s.rank_seconds[start:stop], kind="stable")[:2])
        rows += [(s.labels[i], f"{s.rank_seconds[i]:.4f}", *(f"{x:.4f}" for x in s.seconds[:, i])) for i in order]
        if len(order) < stop - start:
            rows.append((f"  and {stop - start - 2} more", f"{np.median(s.rank_seconds[start:stop]):.4f}", "(median)"))
    lines = _columns(rows)
    lines += [
        "",
        f"predicted {s.total:.4g} s, waiting for {s.labels[s.bottleneck]}, {s.link}",
        f"lower bound {s.bounds[0].seconds:.4g} s: {s.bounds[0].reason}; ours is {s.ratio:.3f} times that",
        f"{traffic.sends:,} sends, {traffic.copies:,} copies, {traffic.relays:,} relays in chains of up to {s.hops} "
        f"hops, of {len(plan.tensors):,} tensors",
    ]
    return "\n".join(lines)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns, the first to the left, the others to the right; short rows end early."""
    width, *widths = (max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue=""))
    return ["  ".join([row[0].ljust(width), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]


def _plan_table(plan: TransferPlan, traffic: Traffic, seconds: float, *, checked: bool) -> str:
    rows: list[tuple[str, ...]] = [("rank", "bytes sent", "bytes received", "bytes copied")]
    rows += [(f"trainer {rank}", f"{nbytes:,}", "", "") for rank, nbytes in enumerate(traffic.trainer_sent.tolist())]
    for party, *columns in zip(plan.instances, traffic.sent, traffic.received, traffic.copied, strict=True):
        for rank, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            rows.append((f"{party} {rank}", *(f"{number:,}" if number else "" for number in numbers)))
    lines = _columns(rows)
    lines.append("")
    lines.append(
        f"{traffic.sends:,} sends, {traffic.copies:,} copies, {traffic.relays:,} relays of "
        f"{len(plan.tensors):,} tensors"
    )
    lines.append(f"planned{' and checked' if checked else ''} in {seconds:.3f} s")
    return "\n".join(lines)
