"""The executor against one large tensor over the same kind of group, on one machine.

    python benchmarks/bench_transfer.py [--mib 256] [--runs 5]

Each line moves the same number of bytes from one trainer process to one instance process, over Gloo on the loopback
device, and gives the best run as a rate and as a part of the limit: one tensor, one send, one receive, in the same
processes and by turns with ours.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from plain_support import Piece, describe_pieces

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.layout import RankLayout
from weightcast.transfer.parts import PlanParts
from weightcast.transfer.plan import RankPart
from weightcast.transfer.planner import plan_transfer
from weightcast.transfer.transports.torch_group import TorchGroup, connect_store, open_store

DTYPE = torch.bfloat16
Layout = Callable[[int, bool], list[Piece]]


def separate(region_bytes: int) -> Layout:
    """Each region a tensor of its own on both sides: nothing to join."""

    def pieces(total: int, sending: bool) -> list[Piece]:
        n = region_bytes // DTYPE.itemsize
        return [Piece(f"t{i}", (n,), (0,), torch.full((n,), i % 251 if sending else 0, dtype=DTYPE))
                for i in range(total // region_bytes)]  # fmt: skip

    return pieces


def experts(region_bytes: int) -> Layout:
    """Parameters of 128 experts each, in the order of the checkpoint at the trainer and in another in the instance."""

    def pieces(total: int, sending: bool) -> list[Piece]:
        n, found = region_bytes // DTYPE.itemsize, []
        for layer in range(total // region_bytes // 128):
            fused = torch.zeros(128, n, dtype=DTYPE)
            for expert in range(128):
                slot = expert if sending else expert * 37 % 128
                found.append(Piece(f"layer.{layer}.expert.{expert}", (n,), (0,), fused[slot].fill_(expert * sending)))
        return found

    return pieces


def columns(region_bytes: int) -> Layout:
    """Matrices of which the trainer holds left and right half apart and the instance the whole: strided there."""

    def pieces(total: int, sending: bool) -> list[Piece]:
        rows, width = 1024, region_bytes // DTYPE.itemsize
        found = []
        for i in range(total // region_bytes // rows // 2):
            if not sending:
                found.append(Piece(f"t{i}", (rows, 2 * width), (0, 0), torch.zeros(rows, 2 * width, dtype=DTYPE)))
                continue
            for half in (0, 1):
                view = torch.full((rows, width), i % 251 + half, dtype=DTYPE)
                found.append(Piece(f"t{i}", (rows, 2 * width), (0, half * width), view))
        return found

    return pieces


CASES: dict[str, Layout] = {
    "large tensors, 64 MiB": separate(64 << 20),
    "regions of 1 MiB": separate(1 << 20),
    "regions of 64 KiB": separate(64 << 10),
    "regions of 4 KiB": separate(4 << 10),
    "experts of 64 KiB, permuted": experts(64 << 10),
    "experts of 4 KiB, permuted": experts(4 << 10),
    "columns, rows of 4 KiB": columns(4 << 10),
}


def by_turns(runs: int, *calls: Callable[[], object]) -> list[float]:
    """Best seconds of each call. They take turns, because the machine may be busier a moment later."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(runs + 1):
        for call, found in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return [min(found[1:]) for found in seconds]


def prepared(layout: Layout, total: int, rank: int) -> tuple[RankPart, RankLayout]:
    sides = [describe_pieces(layout(total, sending)) for sending in (True, False)]
    parts = PlanParts(plan_transfer([sides[0].table], {"rollout-0": [sides[1].table]}), 512 << 20)
    part = parts.trainer_part("rollout-0", 0) if rank == 0 else parts.instance_part("rollout-0", 0)
    return part, sides[rank]


def work(rank: int, port: int, total: int, runs: int) -> None:
    torch.set_num_threads(1)
    soon = Deadline.after(600.0)
    store = connect_store("127.0.0.1", port, soon)
    labels = ("trainer rank 0", "rollout-0 rank 0")
    group = TorchGroup.join(store, rank=rank, labels=labels, name="bench", deadline=soon, interface="127.0.0.1")
    large = torch.ones(total, dtype=torch.uint8)

    def limit() -> None:
        sends, receives = ([(1, large)], []) if rank == 0 else ([], [(0, large)])
        group.post(sends, receives).wait(soon)

    if rank == 1:
        print(f"{'case':<30}{'GB/s':>7}{'of the limit':>14}{'prepare':>10}{'staging':>10}  pack/exchange/unpack s")
    for name, layout in CASES.items():
        part, held = prepared(layout, total, rank)
        assert member_labels(part) == labels
        start = time.perf_counter()
        executor = Executor(part, held, group)
        prepare = time.perf_counter() - start
        full, ours = by_turns(runs, limit, lambda executor=executor: executor.run(soon))
        report = executor.run(soon)
        moved = report.bytes_sent + report.bytes_received
        if rank == 1:
            print(
                f"{name:<30}{moved / ours / 1e9:>7.2f}{moved * full / (total * ours):>13.0%} {prepare:>8.2f} s"
                f"{executor.staging_bytes >> 20:>6} MiB  "
                f"{report.pack_seconds:.2f}/{report.exchange_seconds:.2f}/{report.unpack_seconds:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="bytes moved by each case (default 256)")
    parser.add_argument("--runs", type=int, default=5, help="the best of so many runs counts (default 5)")
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, torch {torch.__version__}, Gloo on 127.0.0.1")
    store, port = open_store("127.0.0.1", Deadline.after(60.0))
    torch.multiprocessing.spawn(work, (port, options.mib << 20, options.runs), nprocs=2)
    del store


if __name__ == "__main__":
    main()
