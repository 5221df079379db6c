"""Pack, unpack, replica copies and digests on one GPU beside a device copy, and NCCL where there are two.

    python benchmarks/bench_gpu.py [--mib 1024] [--device cuda]

All in one run: bytes read and written a second, as a part of what a plain copy of as many bytes reaches; "-" where
messages leave from or arrive in the parameters themselves. Nothing of this has been measured on a GPU yet;
`--device cpu` runs the same code on a machine without one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from plain_support import Piece, describe_pieces

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.exchange.schedule import Schedule, make_schedule
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.transports.process_group import TorchGroup
from weightcast.transfer.transports.rendezvous import connect_store, open_store

BUCKET_BYTES = 512 << 20
EXPERTS = 128


def layouts(region_bytes: int, total: int, device: torch.device) -> tuple[RankLayout, RankLayout]:
    """Experts in the checkpoint's order at the trainer, in another in the instance, each there in two slots."""
    width = 1024
    shape = (region_bytes // 2 // width, width)
    sides: list[list[Piece]] = [[], []]
    for layer in range(total // region_bytes // EXPERTS):
        held = torch.ones((EXPERTS, *shape), dtype=torch.bfloat16, device=device)
        slots = torch.zeros((2 * EXPERTS, *shape), dtype=torch.bfloat16, device=device)
        for expert in range(EXPERTS):
            name = f"layer.{layer}.expert.{expert}"
            sides[0].append(Piece(name, shape, (0, 0), held[expert]))
            place = expert * 37 % EXPERTS
            sides[1] += [Piece(name, shape, (0, 0), slots[slot]) for slot in (place, EXPERTS + place)]
    return describe_pieces(sides[0]), describe_pieces(sides[1])


def seconds(call: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """The best of several, after one to warm up."""
    taken = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def measure(region_bytes: int, total: int, device: torch.device) -> None:
    trainer, instance = layouts(region_bytes, total, device)
    parts = PlanParts(plan_transfer([trainer.table], {"rollout-0": [instance.table]}), BUCKET_BYTES)
    part = parts.instance_part("rollout-0", 0)
    sending = make_schedule(parts.trainer_part("rollout-0", 0), trainer, device)
    receiving = make_schedule(part, instance, device)

    def staged(schedule: Schedule, phase: str) -> Callable[[], object] | None:
        batches = [getattr(r, phase) for r in schedule.rounds]
        return (lambda: [batch.run() for batch in batches]) if schedule.staging.numel() else None

    flat = torch.empty(total, dtype=torch.uint8, device=device)
    other = torch.empty_like(flat)
    copy = seconds(lambda: other.copy_(flat), device)
    rows = part.digests
    ways = {
        "pack": staged(sending, "pack"),
        "unpack": staged(receiving, "unpack"),
        "replicas": receiving.replicate.run,
        "digest": lambda: Digester(instance, rows.region, rows.offset, rows.size, rows.dtype).run(),
    }
    print(f"{region_bytes >> 10:>6} KiB{2 * total / copy / 1e9:>9.0f} GB/s", end="")
    # A digest reads two slots of each expert and writes nothing, as many bytes as a copy reads and writes.
    for name, way in ways.items():
        found = f"{copy / seconds(way, device):.0%}" if way else "-"
        print(f"{found:>10}", end="\n" if name == "digest" else "", flush=True)


def exchange(rank: int, port: int, total: int) -> None:
    """One of two ranks with a GPU each."""
    device, soon = torch.device("cuda", rank), Deadline.after(600.0)
    torch.cuda.set_device(device)
    layout = layouts(1 << 20, total, device)[rank]
    tables = [layouts(1 << 20, total, device)[side].table for side in (0, 1)]
    parts = PlanParts(plan_transfer([tables[0]], {"rollout-0": [tables[1]]}), BUCKET_BYTES)
    part = parts.trainer_part("rollout-0", 0) if rank == 0 else parts.instance_part("rollout-0", 0)
    store = connect_store("127.0.0.1", port, soon)
    group = TorchGroup.join(
        store, rank=rank, labels=member_labels(part), name="bench", deadline=soon, backend="nccl", device=device
    )
    executor = Executor(part, layout, group)
    large = torch.empty(total, dtype=torch.uint8, device=device)
    sends, receives = ([(1, large)], []) if rank == 0 else ([], [(0, large)])
    full = seconds(lambda: group.post(sends, receives).wait(soon), device)
    ours = seconds(lambda: executor.run(soon), device)
    if rank == 1:
        print(f"NCCL, experts of 1 MiB: {total / full / 1e9:.1f} GB/s as one tensor, {full / ours:.0%} of it by a plan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="bytes moved by each case (default 1024)")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --device cpu runs the same code without one")
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread"
    print(f"{name}, torch {torch.__version__}, {options.mib} MiB in bfloat16")
    print(f"{'region':>10}{'copy':>14}{'pack':>10}{'unpack':>10}{'replicas':>10}{'digest':>10}")
    for region_bytes in (4 << 10, 64 << 10, 1 << 20):
        measure(region_bytes, options.mib << 20, device)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        store, port = open_store("127.0.0.1", Deadline.after(60.0))
        torch.multiprocessing.spawn(exchange, (port, options.mib << 20), nprocs=2)
        del store


if __name__ == "__main__":
    main()
