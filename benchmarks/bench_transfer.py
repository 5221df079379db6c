"""The executor beside one large tensor, beside Awex and beside gathering and broadcasting, in one run on one machine.

    python benchmarks/bench_transfer.py [--mib 256] [--runs 7] [--case NAME ...] [--backend gloo] [--awex DIR]

First table: each line moves the same bytes from one trainer process to one instance process over the loopback device:
the limit (one tensor, one send, one receive of our group), the same over Gloo, ours, Awex's `batch_send_recv`. All of
them take the same number of turns, one after the other, `--runs` times. Speeds are those of the median turn. Ratios
compare wall time: the median of the ratios of all turns, and behind the stroke the ratio of the best turns. `by CPU`
compares the median CPU seconds of both processes. `extra` is the peak of memory that a process gained while it prepared
and ran; the setting is 512 MiB.

Second table: the time of digests on both sides, in the same turns, relative to that of the transfer: in time and in CPU
seconds, by their medians. `at N GB/s` is the share that a full digest adds on a wire of that speed with an idle core on
both sides: the trainer's runs beside the transfer there, the instance's after it.

Third table: bench_load.py, a real SGLang model on the ranks of two instances.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from awex_peer import awex_update
from awex_peer import version as awex_version
from bench_load import measure as measure_load
from plain_support import Piece, describe_pieces
from turns import by_turns, percent, times

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import RankPart
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.plan.verification import Sample
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.transports.choose import BACKENDS, join_group
from weightcast.transfer.transports.rendezvous import connect_store, open_store

DTYPE = torch.bfloat16
Layout = Callable[[int, bool], list[Piece]]


def matrix(region_bytes: int) -> tuple[int, int]:
    """A shape of so many bytes: wider for larger ones, as in models."""
    elements = region_bytes // DTYPE.itemsize
    width = min(4096, max(128, 1 << (elements.bit_length() // 2 + 1)))
    return elements // width, width


def separate(region_bytes: int) -> Layout:
    """Each region a tensor of its own on both sides: nothing to join."""

    def pieces(total: int, sending: bool) -> list[Piece]:
        shape = matrix(region_bytes)
        return [Piece(f"t{i}", shape, (0, 0), torch.full(shape, i % 251 if sending else 0, dtype=DTYPE))
                for i in range(total // region_bytes)]  # fmt: skip

    return pieces


def experts(region_bytes: int) -> Layout:
    """Parameters of 128 experts each, in the order of the checkpoint at the trainer and in another in the instance."""

    def pieces(total: int, sending: bool) -> list[Piece]:
        shape, found = matrix(region_bytes), []
        for layer in range(total // region_bytes // 128):
            fused = torch.zeros(128, *shape, dtype=DTYPE)
            for expert in range(128):
                slot = expert if sending else expert * 37 % 128
                view = fused[slot].fill_(expert * sending)
                found.append(Piece(f"layer.{layer}.expert.{expert}", shape, (0, 0), view))
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


def digester_of(part: RankPart, layout: RankLayout) -> Digester:
    """What digests a rank's rows of a part."""
    rows = part.digests
    return Digester(layout, rows.region, rows.offset, rows.size, rows.dtype)


def peak_bytes(reset: bool = False) -> int:
    """The most memory that this process had since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


def prepared(layout: Layout, total: int, rank: int) -> tuple[RankPart, RankLayout]:
    sides = [describe_pieces(layout(total, sending)) for sending in (True, False)]
    parts = PlanParts(plan_transfer([sides[0].table], {"rollout-0": [sides[1].table]}), 512 << 20)
    part = parts.trainer_part("rollout-0", 0) if rank == 0 else parts.instance_part("rollout-0", 0)
    return part, sides[rank]


def work(rank: int, port: int, total: int, runs: int, wanted: list[str], backend: str, awex: Path | None) -> None:
    torch.set_num_threads(1)
    soon = Deadline.after(3600.0)
    store: Any = connect_store("127.0.0.1", port, soon)
    labels = ("trainer rank 0", "rollout-0 rank 0")
    group = join_group(
        store, rank=rank, labels=labels, name="bench", deadline=soon, backend=backend, address="127.0.0.1"
    )
    large, token = torch.ones(total, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)

    def limit() -> None:
        sends, receives = ([(1, large)], []) if rank == 0 else ([], [(0, large)])
        group.post(sends, receives).wait(soon)

    def gloo() -> None:
        (torch.distributed.send if rank == 0 else torch.distributed.recv)(large, 1 - rank)

    def meet() -> None:
        group.post([(1 - rank, token)], [(1 - rank, token.clone())]).wait(soon)

    def gather(name: str, value: float) -> list[float]:
        store.set(f"{name} {rank}", repr(value))
        return [float(store.get(f"{name} {r}")) for r in (0, 1)]

    def of_both(name: str, value: float) -> float:
        return sum(gather(name, value))

    verification: list[str] = []
    if rank == 1:
        print(f"{'case':<29}{'limit':>6}{'Gloo':>6}{'ours':>6}{'Awex':>6} GB/s{'of limit':>13}{'by CPU':>8}"
              f"{'of Gloo':>13}{'ours/Awex':>14}{'prepare':>10}{'extra':>9}")  # fmt: skip
    for name, pieces in CASES.items():
        if wanted and not any(word in name for word in wanted):
            continue
        part, layout = prepared(pieces, total, rank)
        assert member_labels(part) == labels
        before, start = peak_bytes(reset=True), time.perf_counter()
        executor = Executor(part, layout, group)
        prepare = time.perf_counter() - start
        run = functools.partial(executor.run, soon)
        run()
        extra = peak_bytes() - before
        digester = digester_of(part, layout)
        calls: dict[str, Callable[[], object]] = {
            "limit": limit,
            "Gloo": gloo,
            "ours": run,
            "sampled": functools.partial(digester.run, Sample(0)),
            "full": digester.run,
        }
        if awex is not None:
            calls["Awex"] = awex_update(awex, part, layout, torch.distributed.group.WORLD)
        turns = by_turns(runs, meet, calls)
        most = max(int(extra) for extra in gather(f"{name} extra", extra))
        cpu = {what: of_both(f"{name} {what}", median(contender.cpu)) for what, contender in turns.items()}
        if rank == 1:
            ours = turns["ours"]
            speeds = "".join(
                f"{total / turns[what].seconds / 1e9:>6.2f}" if what in turns else f"{'':>6}"
                for what in ("limit", "Gloo", "ours", "Awex")
            )
            print(
                f"{name:<29}{speeds}     {percent(turns['limit'].ratio(ours)):>13}{cpu['limit'] / cpu['ours']:>8.0%}"
                f"{percent(turns['Gloo'].ratio(ours)):>13}{times(turns['Awex'].ratio(ours)) if awex else '':>14}"
                f"{prepare:>8.2f} s{most >> 20:>5} MiB",
                flush=True,
            )
            every = median(turns["full"].cpu)
            added = "".join(
                f"{turns[what].seconds / ours.seconds:>+9.0%}{cpu[what] / cpu['ours']:>+9.0%}"
                for what in ("sampled", "full")
            )
            slower = "".join(f"{every * wire * 1e9 / total:>+8.0%}" for wire in (1, 3, 10))
            verification.append(f"{name:<29}{added}{total / every / 1e9:>9.1f} GB/s{slower}")
    if rank == 1:
        heads = "".join(f"{head:>9}{'by CPU':>9}" for head in ("sampled", "full"))
        print(f"\n{'what verification adds':<29}{heads}"
              f"{'digests':>14}{'at 1':>8}{'3':>8}{'10 GB/s':>8}")  # fmt: skip
        print(*verification, sep="\n", flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="bytes moved by each case (default 256)")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name has this in it; repeatable")
    parser.add_argument("--runs", type=int, default=7, help="turns of each contender (default 7)")
    parser.add_argument("--backend", choices=BACKENDS[:2], default=BACKENDS[0], help="our transport (default tcp)")
    parser.add_argument("--awex", type=Path, help="folder with Awex (pip install --no-deps --target DIR awex==0.9.0)")
    parser.add_argument("--skip-load", action="store_true", help="without the second table, which needs SGLang")
    options = parser.parse_args()
    version = awex_version(options.awex)
    load = os.getloadavg()[0]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f} before"
    print(f"{machine}, torch {torch.__version__}, {options.backend} on 127.0.0.1, Awex {version or 'not given'}")
    store, port = open_store("127.0.0.1", Deadline.after(60.0))
    torch.multiprocessing.spawn(
        work,
        (port, options.mib << 20, options.runs, options.case, options.backend, options.awex if version else None),
        nprocs=2,
    )
    del store
    if not options.skip_load:
        measure_load()


if __name__ == "__main__":
    main()
