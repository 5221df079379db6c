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
import functools
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
from bench_handover import measure as measure_handover
from bench_transfer import CASES, peak_bytes, prepared
from turns import Turns, by_turns, percent, times

from weightcast.transfer.colocated.host_memory import share_memory
from weightcast.transfer.colocated.peers import here, meet_neighbours
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.executor import Executor
from weightcast.transfer.transports.process_group import TorchGroup
from weightcast.transfer.transports.rendezvous import connect_store, open_store

WAYS = ("Gloo", "staged", "in place")


class Meeting:
    """Two processes that tell each other numbers; nobody goes on before the other has come."""

    def __init__(self, group: TorchGroup, soon: Deadline) -> None:
        self._group, self._soon = group, soon

    def both(self, value: float) -> tuple[float, float]:
        """This process's number and the other's."""
        mine = torch.tensor([value], dtype=torch.float64).view(torch.uint8)
        theirs, other = torch.empty_like(mine), 1 - self._group.rank
        self._group.post([(other, mine)], [(other, theirs)]).wait(self._soon)
        return value, float(theirs.view(torch.float64))


def line(name: str, total: int, turns: dict[str, Turns], cpu: dict[str, float], extra: dict[str, int]) -> str:
    copy, gloo, ours = turns["copy"], turns["Gloo"], turns["in place"]
    rates = "".join(f"{total / turns[way].seconds / 1e9:>9.2f}" for way in ("copy", *WAYS))
    of_copy = f"{percent(copy.ratio(ours)):>13}{cpu['copy'] / cpu['in place']:>9.0%}"
    of_gloo = f"{times(gloo.ratio(ours)):>14}{cpu['Gloo'] / cpu['in place']:>8.1f}x"
    return f"{name:<27}{rates}     {of_copy}{of_gloo}{extra['in place'] >> 20:>4} MiB{extra['staged'] >> 20:>4} MiB"


def work(rank: int, port: int, total: int, runs: int, wanted: list[str]) -> None:
    torch.set_num_threads(1)
    soon = Deadline.after(600.0)
    store = connect_store("127.0.0.1", port, soon)
    labels = ("trainer rank 0", "rollout-0 rank 0")

    def group(name: str) -> TorchGroup:
        return TorchGroup.join(store, rank=rank, labels=labels, name=name, deadline=soon, interface="127.0.0.1")

    meeting = Meeting(group("meeting"), soon)
    if rank == 1:
        rates = "".join(f"{way:>9}" for way in ("copy", *WAYS))
        print(f"{'case':<27}{rates} GB/s      of copy   by CPU       of Gloo   by CPU   extra  staged")
    source, target = torch.ones(total, dtype=torch.uint8), torch.ones(total, dtype=torch.uint8)
    for name, layout in CASES.items():
        if wanted and not any(word in name for word in wanted):
            continue
        part, memory = prepared(layout, total, rank)
        memory = memory if rank else share_memory(memory)
        ways: dict[str, Callable[[], object]] = {"copy": (lambda: target.copy_(source)) if rank else (lambda: None)}
        kept = {}
        for way in WAYS:
            made = group(f"{name} {way}")
            neighbours = (
                None if way == "Gloo" else meet_neighbours(made, part, here(made.device), soon, way == "staged")
            )
            executor = Executor(part, memory, made, neighbours)
            executor.run(soon)  # the first run takes what it keeps
            ways[way], kept[way] = functools.partial(executor.run, soon), executor.staging_bytes
        extra = dict.fromkeys(ways, 0)

        def measured(way: str) -> None:
            resting = peak_bytes(reset=True)
            ways[way]()  # noqa: B023
            extra[way] = max(extra[way], peak_bytes() - resting + kept.get(way, 0))  # noqa: B023

        turns = by_turns(runs, lambda: meeting.both(0.0), {way: functools.partial(measured, way) for way in ways})
        cpu = {way: sum(meeting.both(median(turns[way].cpu))) for way in ways}
        extra = {way: int(max(meeting.both(extra[way]))) for way in ways}
        if rank == 1:
            print(line(name, total, turns, cpu, extra), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="bytes moved by each case (default 256)")
    parser.add_argument("--runs", type=int, default=5, help="turns of each way (default 5)")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name has this in it; repeatable")
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
