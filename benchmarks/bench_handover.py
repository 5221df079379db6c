"""What colocated trainers do today, beside weightcast: gather full tensors, hand them over, let engines load.

    python benchmarks/bench_handover.py [--mib 256] [--runs 5] [--device cpu]

Two trainer ranks hold an MoE model as DTensors, cut along the first dimension as FSDP cuts it; an instance of two
ranks, TP for attention and EP for experts, lies on the same devices. On a machine with GPUs there are as many ranks on
each side as GPUs, up to two, and memory is handed over by CUDA IPC (not yet run there). By turns, after a check that
both write the same bytes:

- *handed over*: every trainer rank makes full tensors (`DTensor.full_tensor`), joins them in a flat bucket that it
  shares with the engine rank beside it, and sends the handle, as `update_weights_from_tensor` is fed with flattened
  buckets; the engine rank opens it and copies its own part out of every tensor, as a `load_weights` does;
- *in place*: the executors.

`extra` is the most memory that a process held or took beside the weights, in a run after the first.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent))
from bench_transfer import peak_bytes
from plain_support import Piece, describe_pieces
from spawn_support import free_port
from turns import Turns, by_turns, times

from weightcast.transfer.colocated.host_memory import share_memory
from weightcast.transfer.colocated.peers import find_neighbours
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.transports.choose import join_group
from weightcast.transfer.transports.rendezvous import connect_store, open_store

HIDDEN, INTERMEDIATE, EXPERTS = 1024, 512, 32
BUCKET_BYTES = 64 << 20
DTYPE = torch.bfloat16
LAYER_BYTES = (EXPERTS * 3 * HIDDEN * INTERMEDIATE + 4 * HIDDEN * HIDDEN) * DTYPE.itemsize
SOON = 600.0


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint: its place in a parameter of the trainer, and the part of it that a rank of the
    instance holds: where in it, and where that lies."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    row: tuple[int, int]
    offset: tuple[int, ...]
    target: torch.Tensor | None


def parameters(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The trainer's, whole."""
    for layer in range(layers):
        yield f"{layer}.q", (2 * HIDDEN, HIDDEN)
        yield f"{layer}.o", (HIDDEN, 2 * HIDDEN)
        yield f"{layer}.w13", (EXPERTS, 2 * INTERMEDIATE, HIDDEN)
        yield f"{layer}.w2", (EXPERTS, HIDDEN, INTERMEDIATE)


def parts_of(layers: int, rank: int, ranks: int, device: torch.device) -> list[Part]:
    """What rank `rank` of the instance holds: its columns of q, its rows of o, its experts in an order of their own."""
    found, mine = [], EXPERTS // ranks
    for layer in range(layers):
        q = torch.zeros(2 * HIDDEN // ranks, HIDDEN, dtype=DTYPE, device=device)
        o = torch.zeros(HIDDEN, 2 * HIDDEN // ranks, dtype=DTYPE, device=device)
        found.append(Part(f"{layer}.q", (2 * HIDDEN, HIDDEN), f"{layer}.q", (0, 2 * HIDDEN), (rank * len(q), 0), q))
        place = (0, rank * o.shape[1])
        found.append(Part(f"{layer}.o", (HIDDEN, 2 * HIDDEN), f"{layer}.o", (0, HIDDEN), place, o))
        w13 = torch.zeros(mine, 2 * INTERMEDIATE, HIDDEN, dtype=DTYPE, device=device)
        w2 = torch.zeros(mine, HIDDEN, INTERMEDIATE, dtype=DTYPE, device=device)
        for expert in range(EXPERTS):
            slot = (expert * 5 % EXPERTS) - rank * mine
            here = 0 <= slot < mine
            for half, name in enumerate(("gate", "up")):
                rows = (half * INTERMEDIATE, (half + 1) * INTERMEDIATE)
                target = w13[slot, slice(*rows)] if here else None
                shape = (INTERMEDIATE, HIDDEN)
                found.append(Part(f"{layer}.{expert}.{name}", shape, f"{layer}.w13", (expert, half), (0, 0), target))
            target = w2[slot] if here else None
            shape = (HIDDEN, INTERMEDIATE)
            found.append(Part(f"{layer}.{expert}.down", shape, f"{layer}.w2", (expert, 0), (0, 0), target))
    return found


class Trainer:
    """A trainer rank: DTensors of a mesh, and the same memory described."""

    def __init__(self, layers: int, rank: int, ranks: int, mesh: DeviceMesh, device: torch.device) -> None:
        self._whole = dict(parameters(layers))
        self._rank, self._ranks = rank, ranks
        generator = torch.Generator().manual_seed(rank)
        local = {
            name: torch.randint(-(1 << 14), 1 << 14, (shape[0] // ranks, *shape[1:]), dtype=torch.int16,
                                generator=generator).view(DTYPE).to(device)
            for name, shape in self._whole.items()
        }  # fmt: skip
        self.local, self._mesh = local, mesh
        self.layout = describe_pieces(list(self._pieces(layers)))

    def share(self, device: torch.device) -> None:
        if device.type == "cpu":
            self.layout = share_memory(self.layout)

    def _pieces(self, layers: int) -> Iterator[Piece]:
        for layer in range(layers):
            for name in ("q", "o"):
                view = self.local[f"{layer}.{name}"]
                whole = self._whole[f"{layer}.{name}"]
                yield Piece(f"{layer}.{name}", whole, (self._rank * len(view), 0), view)
            mine = EXPERTS // self._ranks
            for slot in range(mine):
                expert = self._rank * mine + slot
                gate, up = self.local[f"{layer}.w13"][slot].chunk(2)
                for name, view in (("gate", gate), ("up", up), ("down", self.local[f"{layer}.w2"][slot])):
                    yield Piece(f"{layer}.{expert}.{name}", tuple(view.shape), (0, 0), view)

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One after the other, each gathered from all ranks."""
        for name, local in self.local.items():
            whole = DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False).full_tensor()
            layer, _, kind = name.partition(".")
            if kind in ("q", "o"):
                yield name, whole
                continue
            for expert in range(EXPERTS):
                if kind == "w2":
                    yield f"{layer}.{expert}.down", whole[expert]
                else:
                    for half, each in zip(("gate", "up"), whole[expert].chunk(2), strict=True):
                        yield f"{layer}.{expert}.{half}", each


def hand_over(trainer: Trainer, bucket: torch.Tensor, engine: Connection) -> None:
    """Full tensors, a bucket at a time."""
    waiting: list[tuple[str, torch.Tensor]] = []
    nbytes = 0

    def flush() -> None:
        nonlocal nbytes
        torch.cat([tensor.reshape(-1) for _, tensor in waiting], out=bucket[: nbytes // DTYPE.itemsize])
        if bucket.device.type == "cuda":
            torch.cuda.synchronize()
        engine.send(([(name, tuple(tensor.shape)) for name, tensor in waiting], bucket))
        engine.recv()  # it has loaded them
        waiting.clear()
        nbytes = 0

    for name, tensor in trainer.full_tensors():
        if nbytes + tensor.nbytes > bucket.nbytes:
            flush()
        waiting.append((name, tensor))
        nbytes += tensor.nbytes
    flush()
    engine.send(None)


def load(parts: dict[str, Part], trainer: Connection) -> None:
    """Its own part of every tensor."""
    while (found := trainer.recv()) is not None:
        names, bucket = found
        at = 0
        for name, shape in names:
            whole = bucket[at : at + torch.Size(shape).numel()].view(shape)
            at += whole.numel()
            part = parts[name]
            if part.target is not None:
                box = zip(part.offset, part.target.shape, strict=True)
                part.target.copy_(whole[tuple(slice(first, first + count) for first, count in box)])
        if bucket.device.type == "cuda":
            torch.cuda.synchronize()
        del bucket, found
        trainer.send("loaded")


def in_place(rank: int, ranks: int, store_port: int, layout: RankLayout) -> Executor:
    """The executor of a process, planned from the layouts of all."""
    tables = [None] * (2 * ranks)
    dist.all_gather_object(tables, layout.table)
    parts = PlanParts(plan_transfer(tables[:ranks], {"rollout-0": tables[ranks:]}), 512 << 20)
    trainer = rank < ranks
    part = parts.trainer_part("rollout-0", rank) if trainer else parts.instance_part("rollout-0", rank - ranks)
    soon = Deadline.after(SOON)
    store, labels = connect_store("127.0.0.1", store_port, soon), member_labels(part)
    group = join_group(store, rank=part.group_rank, labels=labels, name="bench", deadline=soon, address="127.0.0.1")
    neighbours = find_neighbours(group, part, layout, "in_place" if trainer else None, soon)
    return Executor(part, layout, group, neighbours)


def work(index: int, ranks: int, port: int, store_port: int, layers: int, runs: int, on: str,
         pipes: list[tuple[Connection, Connection]]) -> None:  # fmt: skip
    torch.set_num_threads(1)
    trains, number = index < ranks, index % ranks
    device = torch.device("cuda", number) if on == "cuda" else torch.device("cpu")
    if on == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=2 * ranks)
    trainers = dist.new_group(list(range(ranks)), backend="nccl" if on == "cuda" else "gloo")
    bucket = torch.empty(0)
    parts: list[Part] = []
    if trains:
        assert isinstance(trainers, dist.ProcessGroup)
        trainer = Trainer(layers, number, ranks, DeviceMesh.from_group(trainers, on), device)
        trainer.share(device)
        layout = trainer.layout
        bucket = torch.empty(BUCKET_BYTES // DTYPE.itemsize, dtype=DTYPE, device=device)
        bucket = bucket.share_memory_() if on == "cpu" else bucket
        theirs: Callable[[], object] = functools.partial(hand_over, trainer, bucket, pipes[number][0])
    else:
        parts = parts_of(layers, number, ranks, device)
        held = [part for part in parts if part.target is not None]
        layout = describe_pieces([Piece(p.name, p.shape, p.offset, p.target) for p in held if p.target is not None])
        theirs = functools.partial(load, {part.name: part for part in parts}, pipes[number][1])
    executor = in_place(index, ranks, store_port, layout)
    ways: dict[str, Callable[[], object]] = {
        "handed over": theirs, "in place": functools.partial(executor.run, Deadline.after(SOON))
    }  # fmt: skip
    written = []
    for way in ways.values():
        for part in parts:
            if part.target is not None:
                part.target.fill_(float("nan"))
        way()
        written.append([part.target.clone() for part in parts if part.target is not None])
    assert all(map(torch.equal, *([t.view(torch.int16) for t in one] for one in written))), "they wrote other bytes"
    held_bytes = {"handed over": bucket.nbytes, "in place": executor.staging_bytes}
    del written
    extra = dict.fromkeys(ways, 0)

    def together(name: str) -> None:
        resting_bytes = resting(on)
        ways[name]()
        dist.barrier()
        extra[name] = max(extra[name], peak(on) - resting_bytes + held_bytes[name])

    turns = by_turns(runs, dist.barrier, {name: functools.partial(together, name) for name in ways})
    report(ranks, layers, turns, extra, index)
    dist.destroy_process_group()


def resting(on: str) -> int:
    """Bytes that this process has now, from which its peak is counted."""
    if on == "cpu":
        return peak_bytes(reset=True)
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(on: str) -> int:
    return peak_bytes() if on == "cpu" else torch.cuda.max_memory_allocated()


def report(ranks: int, layers: int, turns: dict[str, Turns], extra: dict[str, int], index: int) -> None:
    """All processes have the same seconds, but for the barrier's; the peak is the highest of all."""
    most = torch.tensor([extra[name] for name in turns])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if index:
        return
    theirs, ours = turns.values()
    print(f"MoE, {layers} layers of {EXPERTS} experts, {layers * LAYER_BYTES >> 20} MiB; {ranks} trainer ranks and "
          f"{ranks} of an instance on the same devices")  # fmt: skip
    for (name, contender), nbytes in zip(turns.items(), most.tolist(), strict=True):
        end = "" if contender is ours else "\n"
        print(f"{name:<14}{contender.seconds:>8.3f} s{nbytes >> 20:>8} MiB extra", end=end)
    print(f"   {times(theirs.ratio(ours))} as long (median / best)", flush=True)


def measure(mib: int, runs: int, on: str) -> None:
    """Prints a line for each way."""
    ranks = min(2, torch.cuda.device_count()) if on == "cuda" else 2
    layers = max(1, (mib << 20) // LAYER_BYTES)
    store, store_port = open_store("127.0.0.1", Deadline.after(60.0))
    pipes = [torch.multiprocessing.get_context("spawn").Pipe() for _ in range(ranks)]
    arguments = (ranks, free_port(), store_port, layers, runs, on, pipes)
    torch.multiprocessing.spawn(work, arguments, nprocs=2 * ranks)
    del store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="bytes of the model, in whole layers (default 256)")
    parser.add_argument("--runs", type=int, default=5, help="turns of each way (default 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    measure(options.mib, options.runs, options.device)


if __name__ == "__main__":
    main()
