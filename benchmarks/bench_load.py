"""What most trainers do today, beside weightcast: gather full tensors, broadcast them to all ranks, let engines load.

    python benchmarks/bench_load.py [--layers 24] [--experts 128] [--runs 3]

Two trainer ranks hold a Qwen3-MoE model cut along its first dimension, as FSDP cuts it. Two instances of real SGLang
models with two EP ranks each, one with two redundant experts, receive it: six processes over Gloo on the loopback
device. By turns, after a check that both ways write the same bytes:

- *broadcast*: the trainer gathers full tensors in buckets, its first rank broadcasts each to all ranks of both
  instances, and they call SGLang's own `load_weights`;
- *weightcast*: the executors, each instance in a group of its own.
"""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import sglang_support as support
from plain_support import Piece, describe_pieces
from sglang_models import CONFIGS, QWEN3_MOE, read_tensors, write_checkpoint
from sglang_nest import Nest
from spawn_support import free_port
from turns import by_turns, times

from weightcast.gateway.layouts.merge import merge_instance, merge_trainer
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.layout.tables import RankReport
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.transports.choose import join_group
from weightcast.transfer.transports.rendezvous import connect_store, open_store

TRAINERS, INSTANCES, EP = 2, ("rollout-0", "rollout-1"), 2
BUCKET_BYTES = 512 << 20
BROADCAST_BYTES = 64 << 20


def work(
    rank: int,
    world: int,
    store_port: int,
    engine_ports: list[int],
    path: str,
    layers: int,
    rows: list[list[int]],
    runs: int,
) -> Any:
    """One of six processes: trainer ranks first, then the ranks of the instances."""
    soon = Deadline.after(900.0)
    store: Any = connect_store("127.0.0.1", store_port, soon)
    if rank < TRAINERS:
        torch.set_num_threads(1)
        full, model = read_tensors(path), None
        layout = _trainer_layout(full, rank)
    else:
        instance, ep = divmod(rank - TRAINERS, EP)
        placed = support.map_arguments(rows[instance], layers)
        engine = support.boot(ep, EP, engine_ports[instance], path, tp_size=EP, ep_size=EP, **placed)
        full = engine.checkpoint
        torch.set_num_threads(1)
        support.set_map(engine)
        model = support.build(engine)
        sink = support.sink_of(engine, model)
        layout = sink.describe()
    ours = _ours(rank, store, layout, soon)
    theirs = _theirs(rank, world, store, layout, {name: value.shape for name, value in full.items()}, model)
    written = []
    for way in (ours, theirs):
        if model is not None:
            support.poison(model)
        way()
        written.append(_fingerprint(layout))

    def together(way: Callable[[], None]) -> None:
        way()
        _meet(store, world)

    ways = {"ours": functools.partial(together, ours), "theirs": functools.partial(together, theirs)}
    return (
        by_turns(runs, lambda: _meet(store, world), ways),
        written[0] == written[1],
        len(layout.table),
        int(layout.table.nbytes.sum()),
    )


_met = 0


def _meet(store: Any, world: int) -> None:
    global _met
    _met += 1
    if store.add(f"met {_met}", 1) == world:
        store.set(f"all met {_met}", "")
    store.wait([f"all met {_met}"])


def _trainer_layout(full: dict[str, torch.Tensor], rank: int) -> RankLayout:
    pieces = []
    for name, value in full.items():
        step = -(-value.shape[0] // TRAINERS)
        mine = value[rank * step : (rank + 1) * step].clone()
        pieces.append(Piece(name, tuple(value.shape), (rank * step, *[0] * (value.dim() - 1)), mine))
    return describe_pieces(pieces)


def _fingerprint(layout: RankLayout) -> list[int]:
    """A digest of every region; padding, which the loader fills, is none."""
    table = layout.table
    dtype = table.tensors.dtype[table.tensor]
    found: list[int] = Digester(layout, np.arange(len(table)), table.offset, table.size, dtype).run().tolist()
    return found


def _ours(rank: int, store: Any, layout: RankLayout, deadline: Deadline) -> Callable[[], None]:
    """Reports and parts meet in the store, as they do at the gateway."""
    trainer = rank < TRAINERS
    side, number = ("trainer", rank) if trainer else (INSTANCES[(rank - TRAINERS) // EP], (rank - TRAINERS) % EP)
    report = RankReport(number, TRAINERS if trainer else EP, "", layout.table, layout.placement, layout.notes)
    store.set(f"{side} {number}", pickle.dumps(report))
    if rank == 0:
        reports = {s: [pickle.loads(store.get(f"{s} {r}")) for r in range(2)] for s in ("trainer", *INSTANCES)}
        source = merge_trainer(reports["trainer"])
        held = {name: merge_instance(name, reports[name], source.tensors) for name in INSTANCES}
        parts = PlanParts(plan_transfer(source.joined, {n: h.joined for n, h in held.items()}), BUCKET_BYTES // 2)
        for name in INSTANCES:
            for r in range(2):
                store.set(f"part {name} trainer {r}", pickle.dumps(parts.trainer_part(name, r)))
                store.set(f"part {name} {name} {r}", pickle.dumps(parts.instance_part(name, r)))
    executors = []
    for name in INSTANCES if trainer else (side,):
        part = pickle.loads(store.get(f"part {name} {side} {number}"))
        group = join_group(
            store, rank=part.group_rank, labels=member_labels(part), name=name, deadline=deadline, address="127.0.0.1"
        )
        executors.append(Executor(part, layout, group))

    def run() -> None:
        for executor in executors:
            executor.run(deadline)

    return run


def _theirs(
    rank: int, world: int, store: Any, layout: RankLayout, shapes: dict[str, torch.Size], model: Any
) -> Callable[[], None]:
    """Buckets of whole tensors, flat, as trainers that broadcast buckets send them."""
    buckets = list(_buckets(shapes))
    listeners = [0, *range(TRAINERS, world)]
    if rank in listeners:
        broadcast = _gloo(store, listeners.index(rank), len(listeners), "broadcast")
    if rank < TRAINERS:
        trainers = _gloo(store, rank, TRAINERS, "trainers")
        held = {layout.table.region(row).tensor: layout.view(row) for row in range(len(layout.table))}
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0

    def gathered(names: list[str], counts: list[int]) -> torch.Tensor:
        mine = torch.cat([held[name].reshape(-1) for name in names])
        parts = [torch.empty_like(mine) for _ in range(TRAINERS)]
        trainers.allgather([parts], [mine]).wait()
        cut = [part.split([n // TRAINERS for n in counts]) for part in parts]
        return torch.cat([piece for pieces in zip(*cut, strict=True) for piece in pieces])

    def run() -> None:
        for names in buckets:
            counts = [shapes[name].numel() for name in names]
            flat = gathered(names, counts) if rank < TRAINERS else torch.empty(sum(counts), dtype=torch.bfloat16)
            if rank in listeners:
                broadcast.broadcast([flat], options).wait()
            if model is not None:
                views = flat.split(counts)
                model.load_weights((name, v.view(shapes[name])) for name, v in zip(names, views, strict=True))

    return run


def _gloo(store: Any, rank: int, size: int, name: str) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    return backend(dist.PrefixStore(name, store), rank, size, options)


def _buckets(shapes: dict[str, torch.Size]) -> Iterator[list[str]]:
    names: list[str] = []
    nbytes = 0
    for name, shape in shapes.items():
        names.append(name)
        nbytes += shape.numel() * 2
        if nbytes >= BROADCAST_BYTES:
            yield names
            names, nbytes = [], 0
    if names:
        yield names


def measure(layers: int = 24, experts: int = 128, runs: int = 3) -> None:
    """Prints one line for each way."""
    config = QWEN3_MOE | {"num_experts": experts, "num_hidden_layers": layers, "num_experts_per_tok": 4}
    row = list(range(experts))
    rows = [row, [*row[: experts // 2], 0, *row[experts // 2 :], 1]]
    store, port = open_store("127.0.0.1", Deadline.after(900.0))
    CONFIGS["bench"] = config
    with tempfile.TemporaryDirectory() as folder, Nest() as nest:
        path = str(write_checkpoint("bench", Path(folder)))
        world, ports = TRAINERS + EP * len(INSTANCES), [free_port() for _ in INSTANCES]
        found = nest.run(_entry, world, port, ports, path, layers, rows, runs, timeout=900.0)
    del store
    assert all(same for _, same, _, _ in found), "the two ways wrote different bytes"
    # All ranks meet at the end of each turn, so that one rank's clock is as good as another's.
    ours, theirs = (found[0][0][way] for way in ("ours", "theirs"))
    regions, nbytes = (sum(f[i] for f in found[TRAINERS:]) for i in (2, 3))
    print(f"Qwen3-MoE, {layers} layers of {experts} experts, {TRAINERS} trainer ranks, {len(INSTANCES)} instances of "
          f"{EP} EP ranks: {regions} regions, {nbytes >> 20} MiB received")  # fmt: skip
    print(f"gather, broadcast, load_weights  {theirs.seconds:8.2f} s")
    ratio = times(theirs.ratio(ours))
    print(f"weightcast                       {ours.seconds:8.2f} s   {ratio} faster (median / best of {runs} turns)")


def _entry(rank: int, world: int, _: int, *args: Any) -> Any:
    os.environ["OMP_NUM_THREADS"] = "1"
    return work(rank, world, *args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    measure(options.layers, options.experts, options.runs)


if __name__ == "__main__":
    main()
