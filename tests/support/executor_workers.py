"""What the processes of test_executor.py and test_torch_group.py do."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from group_support import together
from part_support import make_parts
from plain_support import Piece, describe_pieces

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import TransferError
from weightcast.transfer.exchange import messages_in_memory as traffic
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
from weightcast.transfer.layout.tables import RegionTable
from weightcast.transfer.plan import stages
from weightcast.transfer.plan.operations import RankPart, TransferPlan
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.planner.topology import Hosts, Topology
from weightcast.transfer.transports.choose import BACKENDS, join_group
from weightcast.transfer.transports.communicator import Communicator
from weightcast.transfer.transports.rendezvous import connect_store

POISON = 0xA5
DTYPES = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32),
          (torch.uint8, torch.uint8), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)]  # fmt: skip
Box = tuple[list[int], list[int]]


def group_of(
    port: int, rank: int, labels: Sequence[str], name: str, seconds: float = 20.0, backend: str = "tcp"
) -> Communicator:
    torch.set_num_threads(1)
    deadline = Deadline.after(seconds)
    store = connect_store("127.0.0.1", port, deadline)
    return join_group(
        store, rank=rank, labels=labels, name=name, deadline=deadline, backend=backend, address="127.0.0.1"
    )


# Random layouts


@dataclass
class Side:
    """Layouts of the ranks of one side, and the tensors that own their memory, by rank."""

    layouts: list[RankLayout]
    memory: list[list[torch.Tensor]]
    holds: list[list[tuple[str, Box, torch.Tensor]]]


def grid(rng: random.Random, shape: Sequence[int]) -> list[Box]:
    """Disjoint boxes that tile a shape: random cuts along up to two dimensions, some of them empty."""
    boxes: list[Box] = [([], [])]
    cuttable = rng.sample(range(len(shape)), min(len(shape), rng.choice([0, 1, 1, 2])))
    for d, length in enumerate(shape):
        edges = sorted([0, length, *(rng.randint(0, length) for _ in range(rng.randint(1, 2)) if d in cuttable)])
        boxes = [([*o, a], [*s, b - a]) for o, s in boxes for a, b in itertools.pairwise(edges)]
    return boxes


def memory_for(
    rng: random.Random, size: Sequence[int], dtype: torch.dtype, fused: dict[str, list]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of that size that is contiguous, strided, transposed or a slot of something larger; and who owns it."""
    form = rng.choice(["own", "strided", "transposed", "slot", "slot"])
    if form == "strided" and size:
        owner = torch.empty([n + 3 for n in size], dtype=dtype)
        return owner[tuple(slice(1, 1 + n) for n in size)], owner
    if form == "transposed" and len(size) > 1:
        owner = torch.empty(list(reversed(size)), dtype=dtype)
        return owner.permute(*reversed(range(len(size)))), owner
    if form == "slot":
        pool = fused.setdefault(str(dtype), [torch.empty(8192, dtype=dtype), 0])
        count = torch.Size(size).numel()
        if pool[1] + count <= pool[0].numel():
            view = pool[0][pool[1] : pool[1] + count].view(list(size))
            pool[1] += count + rng.choice([0, 0, 0, 5])
            return view, pool[0]
    owner = torch.empty(list(size), dtype=dtype)
    return owner, owner


def side(
    rng: random.Random, tensors: dict[str, tuple[list[int], torch.dtype]], ranks: int, replicate: float, idle: bool
) -> Side:
    """Every box on one rank at least; with probability `replicate` once more, perhaps on the same rank."""
    builders = [LayoutBuilder() for _ in range(ranks)]
    made = Side([], [[] for _ in range(ranks)], [[] for _ in range(ranks)])
    fused: list[dict[str, list]] = [{} for _ in range(ranks)]
    busy = range(ranks - 1) if idle and ranks > 1 else range(ranks)
    for name, (shape, dtype) in tensors.items():
        for offset, size in grid(rng, shape):
            holders = [rng.choice(busy)]
            while rng.random() < replicate and len(holders) < 4:
                holders.append(rng.choice(busy))
            for rank in holders:
                view, owner = memory_for(rng, size, dtype, fused[rank])
                if not any(owner is known for known in made.memory[rank]):
                    owner.view(-1).view(torch.uint8).fill_(POISON)
                    made.memory[rank].append(owner)
                builders[rank].add(name, shape, offset, view)
                made.holds[rank].append((name, (offset, size), view))
    made.layouts = [b.build() for b in builders]
    return made


def value(name: str, shape: Sequence[int], dtype: torch.dtype, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) + 7919 * version)
    if dtype == torch.uint8:
        return torch.randint(0, 256, list(shape), dtype=dtype, generator=generator)
    return torch.randn(list(shape), generator=generator).to(dtype)


def box_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))]


def planned(
    trainer: Sequence[RegionTable], instance: Sequence[RegionTable], bucket_bytes: int
) -> tuple[list[RankPart | None], list[RankPart]]:
    """The same as make_parts, by the planner."""
    made = PlanParts(plan_transfer(trainer, {"rollout-0": instance}), bucket_bytes)
    senders = made.trainer_ranks("rollout-0")
    sending = [made.trainer_part("rollout-0", r) if r in senders else None for r in range(len(trainer))]
    return sending, [made.instance_part("rollout-0", r) for r in range(len(instance))]


@dataclass
class Case:
    """A trainer and an instance with random layouts; the same in every process."""

    source: Side
    target: Side
    shapes: dict[str, list[int]]
    trainer_parts: list[RankPart | None]
    parts: list[RankPart]

    @classmethod
    def make(cls, seed: int, trainer: int, instance: int) -> Case:
        rng = random.Random(seed)
        shapes = {
            f"t{i}": [rng.randint(1, 9) for _ in range(rng.choice([0, 1, 2, 2, 3]))] for i in range(rng.randint(1, 8))
        }
        if rng.random() < 0.2:
            shapes["empty"] = [0, 4]
        dtypes = {name: rng.choice(DTYPES) for name in shapes}
        source = side(
            rng, {n: (s, dtypes[n][0]) for n, s in shapes.items()}, trainer, rng.choice([0, 0.4]), rng.random() < 0.3
        )
        target = side(
            rng, {n: (s, dtypes[n][1]) for n, s in shapes.items()}, instance, rng.choice([0.2, 0.6]), rng.random() < 0.3
        )
        tables = [layout.table for layout in source.layouts]
        bucket = rng.choice([64, 512, 2048, 1 << 20]) * max(trainer, instance)
        targets = [layout.table for layout in target.layouts]
        trainer_parts, parts = (planned if seed % 2 else make_parts)(tables, targets, bucket)
        return cls(source, target, shapes, trainer_parts, parts)

    def fill(self, rank: int, version: int) -> None:
        fill(self.source, self.shapes, rank, version)

    def check(self, rank: int, version: int) -> int:
        return check(self.target, self.source, self.shapes, rank, version)


def fill(source: Side, shapes: dict[str, list[int]], rank: int, version: int) -> None:
    """What a trainer rank holds of a version."""
    for name, box, view in source.holds[rank]:
        view.copy_(box_of(value(name, shapes[name], view.dtype, version), box))


def check(target: Side, source: Side, shapes: dict[str, list[int]], rank: int, version: int) -> int:
    """Every byte of the rank's memory is what it should be, also those between regions. Returns how many."""
    found = [owner.clone() for owner in target.memory[rank]]
    for owner in target.memory[rank]:
        owner.view(-1).view(torch.uint8).fill_(POISON)
    sources = {n: v.dtype for holds in source.holds for n, _, v in holds}
    for name, box, view in target.holds[rank]:
        view.copy_(box_of(value(name, shapes[name], sources[name], version), box))
    for owner, was in zip(target.memory[rank], found, strict=True):
        same = torch.equal(owner.view(-1).view(torch.uint8), was.view(-1).view(torch.uint8))
        assert same, f"rank {rank} version {version}: {owner} != {was}"
        owner.copy_(was)
    return sum(owner.nbytes for owner in found)


def run_random(
    rank: int, world: int, _: int, port: int, trainer: int, seeds: Sequence[int]
) -> tuple[int, int, int, int]:
    """Two versions through every case, by TCP and by Gloo in turn, with messages of which more or less is packed.

    Returns bytes checked, received, copied, and the most rounds of a case.
    """
    checked = received = copied = rounds = 0
    groups: dict[tuple[tuple[int, ...], str], Communicator] = {}
    for seed in seeds:
        case = Case.make(seed, trainer, world - trainer)
        part = case.trainer_parts[rank] if rank < trainer else case.parts[rank - trainer]
        if part is None:
            continue
        layout = (case.source.layouts if part.is_trainer else case.target.layouts)[part.rank]
        key = part.trainer_ranks, BACKENDS[seed % 2]
        traffic.SPAN_BYTES = (8, 64, 1 << 11)[seed % 3]
        if key not in groups:
            groups[key] = group_of(port, part.group_rank, member_labels(part), f"senders {key}", backend=key[1])
        executor = Executor(part, layout, groups[key])
        for version in (1, 2):
            if part.is_trainer:
                case.fill(part.rank, version)
            report = executor.run(Deadline.after(20.0))
            if not part.is_trainer:
                checked += case.check(part.rank, version)
            received += report.bytes_received
            copied += report.bytes_copied
            rounds = max(rounds, report.rounds)
    for group in groups.values():
        group.close()
    return checked, received, copied, rounds


TRAINERS = 2


def three_instances(
    seed: int, worlds: Sequence[int]
) -> tuple[Side, list[Side], dict[str, list[int]], TransferPlan, int]:
    """Trainer, instances, shapes of the tensors, a plan that relays inside instances, and bytes of staging memory."""
    rng = random.Random(1000 + seed)
    shapes = {
        f"t{i}": [rng.randint(1, 9) for _ in range(rng.choice([0, 1, 2, 2, 3]))] for i in range(rng.randint(3, 9))
    }
    held = {name: rng.choice([torch.float32, torch.bfloat16]) for name in shapes}
    source = side(rng, {n: (s, held[n]) for n, s in shapes.items()}, TRAINERS, rng.choice([0, 0.4]), False)
    targets = []
    for world in worlds:
        dtypes = {n: rng.choice([torch.bfloat16, torch.float16, d]) for n, d in held.items()}
        # Much is held by several ranks, so that there is something to pass on.
        targets.append(side(rng, {n: (s, dtypes[n]) for n, s in shapes.items()}, world, 0.7, False))
    names = [f"rollout-{i}" for i in range(len(worlds))]
    tables = {name: [layout.table for layout in t.layouts] for name, t in zip(names, targets, strict=True)}
    plan = plan_transfer(
        [layout.table for layout in source.layouts],
        tables,
        hosts=Hosts.packed([TRAINERS, *worlds], 1),
        topology=Topology(nic_gbps=1, between_instances=False),
    )
    return source, targets, shapes, plan, rng.choice([256, 1024, 1 << 20]) * 4 * max(worlds)


def feed_three_instances(
    rank: int, world: int, _: int, port: int, worlds: Sequence[int], seeds: Sequence[int]
) -> tuple[int, int, int, int, int]:
    """Two versions through every case; trainer ranks feed all instances at once.

    Returns bytes checked, received, copied and passed on, and the stages of all cases.
    """
    stages._WAVE_BYTES = 64
    counts = [0, 0, 0, 0, 0]
    for seed in seeds:
        source, targets, shapes, plan, bucket = three_instances(seed, worlds)
        made = PlanParts(plan, bucket)
        if rank < TRAINERS:
            names = [party.name for party in plan.instances if rank in made.trainer_ranks(party.name)]
            parts = [made.trainer_part(name, rank) for name in names]
            layout, target = source.layouts[rank], None
        else:
            index = int(np.searchsorted(np.cumsum(worlds), rank - TRAINERS, side="right"))
            target, own = targets[index], rank - TRAINERS - sum(worlds[:index])
            parts, layout = [made.instance_part(plan.instances[index].name, own)], target.layouts[own]
        groups = [group_of(port, p.group_rank, member_labels(p), f"{seed} {p.instance}") for p in parts]
        executors = [Executor(part, layout, group) for part, group in zip(parts, groups, strict=True)]
        for version in (1, 2):
            if rank < TRAINERS:
                fill(source, shapes, rank, version)
            runs = [lambda e=e: e.run(Deadline.after(60.0)) for e in executors]
            for report in together(*runs) if runs else []:
                if isinstance(report, Exception):
                    raise report
                counts[1] += report.bytes_received
                counts[2] += report.bytes_copied
                counts[3] += report.bytes_sent if target else 0
            if target:
                counts[0] += check(target, source, shapes, own, version)
        counts[4] += max((part.stages for part in parts), default=0)
        for group in groups:
            group.close()
    return tuple(counts)  # type: ignore[return-value]


def join_and_stay(port: int, rank: int, labels: Sequence[str], name: str) -> None:
    group = group_of(port, rank, labels, name)
    time.sleep(60.0)
    group.close()


def lose_a_peer(rank: int, world: int, _: int, port: int, backend: str) -> str:
    """Three members; the last lives in a child of rank 1 that is killed while rank 0 waits for it.

    That child begins when rank 1 has, so joining takes twice as long as elsewhere.
    """
    labels = ("trainer rank 0", "rollout-0 rank 0", "rollout-0 rank 1")
    if rank == 1:
        child = multiprocessing.get_context("spawn").Process(
            target=group_of, args=(port, 2, labels, "lost", 120.0, backend), daemon=True
        )
        child.start()
        group = group_of(port, 1, labels, "lost", 120.0, backend)
        group.post([(0, torch.zeros(64, dtype=torch.uint8))], []).wait(Deadline.after(120.0))
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        return ""
    group = group_of(port, 0, labels, "lost", 120.0, backend)
    receives = [(peer, torch.zeros(64, dtype=torch.uint8)) for peer in (1, 2)]
    try:
        group.post([], receives).wait(Deadline.after(300.0))
    except TransferError as error:
        return str(error)
    return "nothing was lost"


def give_a_stopped_peer_up(rank: int, world: int, _: int, port: int, backend: str) -> tuple[float, str]:
    """Rank 1 stands still once it has asked for a large message; rank 0, which sends it, gives up after a second."""
    group = group_of(port, rank, ("trainer rank 0", "rollout-0 rank 0"), "stopped", backend=backend)
    message, go = torch.zeros(64 << 20, dtype=torch.uint8), torch.zeros(1)
    if rank == 1:
        group.post([(0, go)], []).wait(Deadline.after(20.0))
        group.post([], [(0, message)])
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0, ""
    group.post([], [(1, go)]).wait(Deadline.after(20.0))
    time.sleep(0.5)
    threading.Timer(1.0, group.abort).start()
    start = time.monotonic()
    try:
        group.post([(1, message)], []).wait(Deadline.after(60.0))
    except TransferError as error:
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, "it was sent"


def feed_two_instances(rank: int, world: int, _: int, port: int, stuck: bool) -> list[tuple[str, float]]:
    """Rank 0 trains and feeds rollout-0 (rank 1) and rollout-1 (rank 2).

    In the second update rollout-0 dies, or it gets stuck until all is over.
    """
    # More than sockets take whose other end nobody reads: Linux lets both ends grow to 36 MiB here.
    shape = 8, 3 << 20
    sources = [Piece("w", shape, (0, 0), torch.zeros(shape)), Piece("b", (), (), torch.zeros(()))]
    targets = [Piece(p.name, p.shape, p.offset, torch.zeros(p.shape, dtype=torch.bfloat16)) for p in sources]
    trainer, instance = describe_pieces(sources), describe_pieces(targets)
    names = ["rollout-0", "rollout-1"] if rank == 0 else [f"rollout-{rank - 1}"]
    executors = []
    for name in names:
        (source,), (target,) = make_parts([trainer.table], [instance.table], 1 << 23, name)
        part, layout = (source, trainer) if rank == 0 else (target, instance)
        assert part is not None
        group = group_of(port, part.group_rank, member_labels(part), name)
        executors.append(Executor(part, layout, group))
    outcome = []
    for version in (1, 2, 3):
        for piece in sources:
            piece.view.fill_(version)
        if rank == 1 and version == 2:
            if stuck:
                connect_store("127.0.0.1", port, Deadline.after(60.0)).get("over")
            return outcome
        for name, executor in zip(names, executors, strict=False):
            start = time.monotonic()
            try:
                executor.run(Deadline.after(3.0 if stuck and version == 2 and name == "rollout-0" else 60.0))
                outcome.append((f"{name} {version}", float(targets[0].view.mean() + targets[1].view)))
            except TransferError as error:
                outcome.append((f"{name} {version}: {error}", time.monotonic() - start))
    connect_store("127.0.0.1", port, Deadline.after(60.0)).set("over", "")
    return outcome


def measure_memory(
    rank: int, world: int, _: int, port: int, bucket_bytes: int, region_bytes: int, backend: str
) -> list[int]:
    """Bytes of memory that this process gained at its peak while it prepared and ran, and in a later run; what torch
    allocated in a third; and the executor's own account."""
    group = group_of(port, rank, ("trainer rank 0", "rollout-0 rank 0"), f"memory {backend}", backend=backend)

    def executor_of(total: int) -> Executor:
        n = region_bytes // 2
        pieces = [Piece(f"t{i}", (n,), (0,), torch.ones(n, dtype=torch.bfloat16)) for i in range(total // region_bytes)]
        layout = describe_pieces(pieces)
        sender, receiver = make_parts([layout.table], [layout.table], bucket_bytes)
        part = (*sender, *receiver)[rank]
        assert part is not None
        before.append(reset_peak())
        return Executor(part, layout, group)

    before: list[int] = []
    executor_of(1 << 20).run(Deadline.after(60.0))  # Code is loaded when it first runs.
    executor = executor_of(64 << 20)
    executor.run(Deadline.after(60.0))
    first = peak() - before[1]
    second = least_gain(lambda: executor.run(Deadline.after(60.0)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        executor.run(Deadline.after(60.0))
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    group.close()
    return [first, second, sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]"), executor.staging_bytes]


def reset_peak() -> int:
    """Bytes that this process has, from which its peak is counted from now on (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def least_gain(run: Callable[[], object]) -> int:
    """Bytes that this process gained at the peak of one of three runs.

    The least counts: a system short of memory takes pages away, which then come again.
    """
    gains = []
    for _ in range(3):
        again = reset_peak()
        run()
        gains.append(peak() - again)
    return min(gains)


def peak() -> int:
    """The most bytes that this process had since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10


def share_a_process(rank: int, world: int, _: int, port: int, backend: str) -> list[object]:
    """Rank 0 has a default process group, as a trainer or an engine would, and uses it before and after ours."""
    total = torch.zeros(1)
    if rank == 0:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = group_of(port, rank, ("trainer rank 0", "rollout-0 rank 0"), "shared", backend=backend)
    message = torch.full((8,), 5 * (1 - rank), dtype=torch.uint8)
    sends, receives = ([(1, message)], []) if rank == 0 else ([], [(0, message)])
    group.post(sends, receives).wait(Deadline.after(20.0))
    group.close()
    if rank == 0:
        total += 1
        torch.distributed.all_reduce(total)
    return [torch.distributed.is_initialized(), float(total), int(message[0])]
