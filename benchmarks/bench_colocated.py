"""Reading a trainer's memory in place, beside plain memory copy, beside Gloo, and beside handing over full tensors.

    python benchmarks/bench_colocated.py [--mib 256] [--runs 5]

First table, on CPUs: each line moves the same number of bytes from one trainer process to one instance process of this
machine. `copy` is one large tensor copied inside the reader's process, by turns with ours; `Gloo` is the same plan over
Gloo on the loopback device. `of copy` and `of Gloo` compare in place with both, by the best wall time and by processor
time of both processes. `extra` is the most memory that a process held or took beside the weights, in place and staged;
the setting is 512 MiB.

Second table: bench_handover.py, on GPUs where there are some.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
from bench_handover import measure as measure_handover
from bench_transfer import CASES, peak_bytes, prepared

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.executor import Executor
from weightcast.transfer.neighbours import here, meet_neighbours
from weightcast.transfer.transports.shared_memory import share_memory
from weightcast.transfer.transports.torch_group import TorchGroup, connect_store, open_store

WAYS = ("Gloo", "staged", "in place")


def work(rank: int, port: int, total: int, runs: int, wanted: str) -> None:
    torch.set_num_threads(1)
    soon = Deadline.after(600.0)
    store = connect_store("127.0.0.1", port, soon)
    labels = ("trainer rank 0", "rollout-0 rank 0")

    def group(name: str) -> TorchGroup:
        return TorchGroup.join(store, rank=rank, labels=labels, name=name, deadline=soon, interface="127.0.0.1")

    source, target = torch.ones(total, dtype=torch.uint8), torch.ones(total, dtype=torch.uint8)
    if rank == 1:
        print(
            f"{'case':<29}{'copy':>6}"
            + "".join(f"{way:>9}" for way in WAYS)
            + " GB/s   of copy   by CPU  of Gloo   by CPU   extra  staged"
        )
    meeting = group("meeting")
    for name, layout in CASES.items():
        if wanted not in name:
            continue
        part, held = prepared(layout, total, rank)
        held = held if rank else share_memory(held)
        executors = {}
        for way in WAYS:
            made = group(f"{name} {way}")
            staged = way == "staged"
            neighbours = None if way == "Gloo" else meet_neighbours(made, part, here(made.device), soon, staged)
            executors[way] = Executor(part, held, made, neighbours)
        best = dict.fromkeys(("copy", *WAYS), float("inf"))
        cpu = dict.fromkeys(("copy", *WAYS), float("inf"))
        extra = dict.fromkeys(WAYS, 0)
        for turn in range(runs + 1):
            for way, executor in executors.items():
                resting = peak_bytes(reset=True)
                start, busy = time.perf_counter(), time.process_time()
                executor.run(soon)
                best[way] = min(best[way], time.perf_counter() - start)
                spent = torch.tensor([time.process_time() - busy], dtype=torch.float64).view(torch.uint8)
                theirs = torch.empty_like(spent)
                meeting.post([(1 - rank, spent)], [(1 - rank, theirs)]).wait(soon)
                cpu[way] = min(cpu[way], float(spent.view(torch.float64) + theirs.view(torch.float64)))
                if turn:  # the first maps the trainer's memory
                    extra[way] = max(extra[way], peak_bytes() - resting + executor.staging_bytes)
            if rank == 1:
                start, busy = time.perf_counter(), time.process_time()
                target.copy_(source)
                best["copy"] = min(best["copy"], time.perf_counter() - start)
                cpu["copy"] = min(cpu["copy"], time.process_time() - busy)
            word = torch.zeros(1, dtype=torch.uint8)
            meeting.post(*([[(0, word)], []] if rank else [[], [(1, word)]])).wait(soon)
        most = torch.tensor(list(extra.values())).view(torch.uint8)
        others = torch.empty_like(most)
        meeting.post([(1 - rank, most)], [(1 - rank, others)]).wait(soon)
        extra = dict(zip(WAYS, torch.maximum(*(m.view(torch.int64) for m in (most, others))).tolist(), strict=True))
        if rank == 1:
            print(
                f"{name:<29}"
                + f"{total / best['copy'] / 1e9:>6.2f}"
                + "".join(f"{total / best[way] / 1e9:>9.2f}" for way in WAYS)
                + "     "
                + f"{best['copy'] / best['in place']:>10.0%}{cpu['copy'] / cpu['in place']:>9.0%}"
                + f"{best['Gloo'] / best['in place']:>8.1f}x{cpu['Gloo'] / cpu['in place']:>8.1f}x"
                + "".join(f"{extra[way] >> 20:>4} MiB" for way in ("in place", "staged")),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="bytes moved by each case (default 256)")
    parser.add_argument("--runs", type=int, default=5, help="the best of so many runs counts (default 5)")
    parser.add_argument("--case", default="", help="only the cases whose name has this in it")
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, torch {torch.__version__}")
    store, port = open_store("127.0.0.1", Deadline.after(60.0))
    torch.multiprocessing.spawn(work, (port, options.mib << 20, options.runs, options.case), nprocs=2)
    del store
    print()
    measure_handover(options.mib, options.runs, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
