"""Reading a trainer's memory in place, beside plain memory copy and beside Gloo, on one machine.

    python benchmarks/bench_colocated.py [--mib 256] [--runs 5]

Each line moves the same number of bytes from one trainer process to one instance process of this machine. `copy` is one
large tensor copied inside the reader's process, by turns with ours; `Gloo` is the same plan over Gloo on the loopback
device. `CPU` is the processor time of both processes, in seconds for each GB: of a copy, in place, and over Gloo.
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
from bench_transfer import CASES, prepared

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
            f"{'case':<30}{'copy':>6}"
            + "".join(f"{way:>10}" for way in WAYS)
            + "   in place/copy  /Gloo  staging  CPU s/GB"
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
        for _ in range(runs + 1):
            for way, executor in executors.items():
                start, busy = time.perf_counter(), time.process_time()
                executor.run(soon)
                best[way] = min(best[way], time.perf_counter() - start)
                spent = torch.tensor([time.process_time() - busy], dtype=torch.float64).view(torch.uint8)
                theirs = torch.empty_like(spent)
                meeting.post([(1 - rank, spent)], [(1 - rank, theirs)]).wait(soon)
                cpu[way] = min(cpu[way], float(spent.view(torch.float64) + theirs.view(torch.float64)))
            if rank == 1:
                start, busy = time.perf_counter(), time.process_time()
                target.copy_(source)
                best["copy"] = min(best["copy"], time.perf_counter() - start)
                cpu["copy"] = min(cpu["copy"], time.process_time() - busy)
            word = torch.zeros(1, dtype=torch.uint8)
            meeting.post(*([[(0, word)], []] if rank else [[], [(1, word)]])).wait(soon)
        if rank == 1:
            moved = executors["in place"].run(soon).bytes_shared
            rate = {way: (total if way == "copy" else moved) / seconds / 1e9 for way, seconds in best.items()}
            print(
                f"{name:<30}{rate['copy']:>6.2f}"
                + "".join(f"{rate[way]:>10.2f}" for way in WAYS)
                + f"{rate['in place'] / rate['copy']:>15.0%}{rate['in place'] / rate['Gloo']:>6.1f}x"
                + f"{executors['in place'].staging_bytes >> 20:>6} MiB"
                + "   "
                + " / ".join(f"{cpu[way] / total * 1e9:.2f}" for way in ("copy", "in place", "Gloo")),
                flush=True,
            )
        else:
            executors["in place"].run(soon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="bytes moved by each case (default 256)")
    parser.add_argument("--runs", type=int, default=5, help="the best of so many runs counts (default 5)")
    parser.add_argument("--case", default="", help="only the cases whose name has this in it")
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, torch {torch.__version__}, GB/s")
    store, port = open_store("127.0.0.1", Deadline.after(60.0))
    torch.multiprocessing.spawn(work, (port, options.mib << 20, options.runs, options.case), nprocs=2)
    del store


if __name__ == "__main__":
    main()
