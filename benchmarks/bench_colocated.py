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
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
from bench_handover import measure as measure_handover
from bench_transfer import CASES, peak_bytes, prepared

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.executor import Executor
from weightcast.transfer.neighbours import here, meet_neighbours
from weightcast.transfer.transports.rendezvous import connect_store, open_store
from weightcast.transfer.transports.shared_memory import share_memory
from weightcast.transfer.transports.torch_group import TorchGroup

WAYS = ("Gloo", "staged", "in place")


@dataclass(slots=True)
class Found:
    """The least seconds of a run, the least processor seconds of both processes, the most extra bytes of one."""

    wall: float = float("inf")
    cpu: float = float("inf")
    extra: int = 0


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


def by_turns(
    ways: dict[str, Callable[[], object]], held: dict[str, int], runs: int, meeting: Meeting
) -> dict[str, Found]:
    """Each way `runs` times after one to warm up; `held` are the bytes that it keeps between runs."""
    found = {way: Found() for way in ways}
    for turn in range(runs + 1):
        for way, one in found.items():
            resting = peak_bytes(reset=True)
            meeting.both(0.0)
            wall, cpu = time.perf_counter(), time.process_time()
            ways[way]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            taken = peak_bytes() - resting + held.get(way, 0)
            cpu, extra = sum(meeting.both(cpu)), max(meeting.both(taken))
            if turn:
                one.wall, one.cpu = min(one.wall, wall), min(one.cpu, cpu)
                one.extra = max(one.extra, int(extra))
    return found


def line(name: str, total: int, found: dict[str, Found]) -> str:
    copy, gloo, staged, ours = (found[way] for way in ("copy", *WAYS))
    rates = "".join(f"{total / one.wall / 1e9:>9.2f}" for one in (copy, gloo, staged, ours))
    of_copy = f"{copy.wall / ours.wall:>10.0%}{copy.cpu / ours.cpu:>9.0%}"
    of_gloo = f"{gloo.wall / ours.wall:>8.1f}x{gloo.cpu / ours.cpu:>8.1f}x"
    return f"{name:<27}{rates}     {of_copy}{of_gloo}{ours.extra >> 20:>4} MiB{staged.extra >> 20:>4} MiB"


def work(rank: int, port: int, total: int, runs: int, wanted: str) -> None:
    torch.set_num_threads(1)
    soon = Deadline.after(600.0)
    store = connect_store("127.0.0.1", port, soon)
    labels = ("trainer rank 0", "rollout-0 rank 0")

    def group(name: str) -> TorchGroup:
        return TorchGroup.join(store, rank=rank, labels=labels, name=name, deadline=soon, interface="127.0.0.1")

    meeting = Meeting(group("meeting"), soon)
    if rank == 1:
        rates = "".join(f"{way:>9}" for way in ("copy", *WAYS))
        print(f"{'case':<27}{rates} GB/s   of copy   by CPU  of Gloo   by CPU   extra  staged")
    source, target = torch.ones(total, dtype=torch.uint8), torch.ones(total, dtype=torch.uint8)
    for name, layout in CASES.items():
        if wanted not in name:
            continue
        part, memory = prepared(layout, total, rank)
        memory = memory if rank else share_memory(memory)
        ways: dict[str, Callable[[], object]] = {"copy": (lambda: target.copy_(source)) if rank else (lambda: None)}
        held = {}
        for way in WAYS:
            made = group(f"{name} {way}")
            neighbours = (
                None if way == "Gloo" else meet_neighbours(made, part, here(made.device), soon, way == "staged")
            )
            executor = Executor(part, memory, made, neighbours)
            executor.run(soon)  # the first run takes what it keeps
            ways[way], held[way] = functools.partial(executor.run, soon), executor.staging_bytes
        found = by_turns(ways, held, runs, meeting)
        if rank == 1:
            print(line(name, total, found), flush=True)


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
