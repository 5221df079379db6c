"""What the processes of test_colocated.py do where nothing but a communicator joins them. Pairs: colocated_pairs.py."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from executor_workers import TRAINERS, Case, check, fill, group_of, least_gain, peak, reset_peak, three_instances
from part_support import make_parts
from plain_support import Piece, describe_pieces

from weightcast.transfer.colocated.host_memory import share_memory
from weightcast.transfer.colocated.offers import Share
from weightcast.transfer.colocated.peers import Neighbours, PeerPlace, find_neighbours, meet_neighbours
from weightcast.transfer.copy.batch import CopyBatch
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import TransferError
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.plan import stages
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.transports.communicator import Communicator

SOON = 20.0
SHARES: tuple[Share, Share] = ("in_place", "staged")


def run_random_shared(
    rank: int, world: int, _: int, port: int, trainer: int, hosts: str, seeds: Sequence[int]
) -> tuple[int, int, int, int]:
    """Two versions through every case, every second one staged.

    Returns bytes checked, in messages, in place, and the most rounds of a case.
    """
    checked = messages = shared = rounds = 0
    groups: dict[tuple[object, ...], tuple[Communicator, Neighbours]] = {}
    for seed in seeds:
        case = Case.make(seed, trainer, world - trainer)
        part = case.trainer_parts[rank] if rank < trainer else case.parts[rank - trainer]
        if part is None:
            continue
        layout = (case.source.layouts if part.is_trainer else case.target.layouts)[part.rank]
        staged = bool(seed % 4 > 1)
        if part.is_trainer and not staged:
            layout = share_memory(layout)
        key = (part.trainer_ranks, staged)
        if key not in groups:
            made = group_of(port, part.group_rank, member_labels(part), f"senders {key}")
            groups[key] = made, meet_neighbours(made, part, PeerPlace(hosts[rank]), Deadline.after(SOON), staged)
        executor = Executor(part, layout, *groups[key])
        for version in (1, 2):
            if part.is_trainer:
                case.fill(part.rank, version)
            report = executor.run(Deadline.after(SOON))
            if not part.is_trainer:
                checked += case.check(part.rank, version)
            messages += report.bytes_received + report.bytes_sent
            shared += report.bytes_shared
            rounds = max(rounds, report.rounds)
    for group, neighbours in groups.values():
        neighbours.close()
        group.close()
    return checked, messages, shared, rounds


def measure_shared(rank: int, _: int, __: int, port: int, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """64 MiB in regions of 256 KiB, in place, where they are cast on the way, and staged.

    Returns for each the bytes that this process gained at its peak while it prepared and ran, beside what it reads; in
    a later run; and the executor's own account.
    """
    for share in SHARES:
        measured_sharing(rank, port, share, bucket_bytes, 1 << 20)  # Code is loaded when it first runs.
    return [measured_sharing(rank, port, share, bucket_bytes, 64 << 20) for share in SHARES]


def measured_sharing(rank: int, port: int, share: Share, bucket_bytes: int, total: int) -> tuple[int, int, int]:
    held = torch.float32 if share == "in_place" and rank == 0 else torch.bfloat16
    kinds = (torch.float32 if share == "in_place" else torch.bfloat16, torch.bfloat16)

    def pieces(dtype: torch.dtype) -> list[Piece]:
        return [Piece(f"t{i}", (1 << 17,), (0,), torch.ones(1 << 17, dtype=dtype)) for i in range(total >> 18)]

    tables = [describe_pieces(pieces(dtype)).table for dtype in kinds]
    (sender,), (receiver,) = make_parts(tables[:1], tables[1:], bucket_bytes)
    part, layout = receiver if rank else sender, describe_pieces(pieces(held))
    assert part is not None
    if rank == 0 and share == "in_place":
        layout = share_memory(layout)
    group = group_of(port, part.group_rank, member_labels(part), f"memory {share} {total}")
    neighbours = find_neighbours(group, part, layout, None if rank else share, Deadline.after(SOON))
    before = reset_peak()
    executor = Executor(part, layout, group, neighbours)
    executor.run(Deadline.after(SOON))
    lent = sum(segment.nbytes for segment in neighbours.opened)
    first = peak() - before - lent
    second = least_gain(lambda: executor.run(Deadline.after(SOON)))
    group.close()
    return first, second, executor.staging_bytes


# One side is killed in the middle


def vector(rank: int, port: int, seconds: float) -> tuple[Executor, torch.Tensor]:
    """Trainer rank 0 or rollout-0 rank 0 of a transfer of 1 MiB, joined."""
    memory = torch.full((1 << 18,), float(1 - rank))
    layout = describe_pieces([Piece("w", (1 << 18,), (0,), memory)])
    other = describe_pieces([Piece("w", (1 << 18,), (0,), torch.zeros(1 << 18))])
    sides = [layout.table, other.table] if rank == 0 else [other.table, layout.table]
    (sender,), (receiver,) = make_parts(sides[:1], sides[1:], 1 << 20)
    part = receiver if rank else sender
    assert part is not None
    group = group_of(port, part.group_rank, member_labels(part), "killed", seconds)
    share: Share = None if rank else "in_place"
    held = layout if rank else share_memory(layout)
    neighbours = find_neighbours(group, part, held, share, Deadline.after(seconds))
    return Executor(part, held, group, neighbours), memory


def killing(pid: int) -> None:
    """From now on the first copy of this process kills a process with SIGKILL."""
    run = CopyBatch.run

    def killed(batch: CopyBatch) -> None:
        CopyBatch.run = run  # type: ignore[method-assign]
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        run(batch)

    CopyBatch.run = killed  # type: ignore[method-assign]


def doomed(rank: int, port: int, sees: Connection) -> None:
    """The other side; a reader kills itself in the middle, a lender is killed by its reader."""
    executor, _ = vector(rank, port, SOON)
    sees.send(os.getpid())
    if rank == 1:
        killing(os.getpid())
    executor.run(Deadline.after(SOON))
    time.sleep(SOON)


def survive(_: int, world: int, __: int, port: int, rank: int) -> tuple[float, str, list[float], list[str]]:
    """Rank 0 lends or rank 1 reads, the other is killed in the middle: seconds, error, what was read, segments left."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=doomed, args=(1 - rank, port, theirs), daemon=True)
    child.start()
    executor, memory = vector(rank, port, SOON)
    pid = ours.recv()
    if rank == 1:
        killing(pid)
    start = time.monotonic()
    try:
        executor.run(Deadline.after(SOON))
        said = "nothing was wrong"
    except TransferError as error:
        said = str(error)
    seconds = time.monotonic() - start
    child.join(SOON)
    read = sorted(set(memory.tolist()))
    del executor, memory
    gc.collect()
    return seconds, said, read, segments_of(pid) + segments_of(os.getpid())


def segments_of(pid: int) -> list[str]:
    """Shared memory of ours that a process still has."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return []
    return [line for line in maps.splitlines() if "memfd:weightcast" in line]


def run_relays(rank: int, world: int, _: int, port: int, hosts: str, seeds: Sequence[int]) -> tuple[int, int, int]:
    """Two trainer ranks and an instance that passes boxes on. Returns bytes checked, lent, and sent by the instance."""
    stages._WAVE_BYTES = 64
    checked = shared = passed = 0
    for seed in seeds:
        source, (target,), shapes, plan, bucket = three_instances(seed, [world - TRAINERS])
        made, own = PlanParts(plan, bucket), rank - TRAINERS
        if rank < TRAINERS and rank not in made.trainer_ranks("rollout-0"):
            continue
        if rank < TRAINERS:
            part, layout = made.trainer_part("rollout-0", rank), share_memory(source.layouts[rank])
        else:
            part, layout = made.instance_part("rollout-0", own), target.layouts[own]
        group = group_of(port, part.group_rank, member_labels(part), f"relays {seed}")
        executor = Executor(
            part, layout, group, meet_neighbours(group, part, PeerPlace(hosts[rank]), Deadline.after(SOON))
        )
        for version in (1, 2):
            if rank < TRAINERS:
                fill(source, shapes, rank, version)
            report = executor.run(Deadline.after(SOON))
            if rank >= TRAINERS:
                checked += check(target, source, shapes, own, version)
                passed += report.bytes_sent
                shared += report.bytes_shared
        group.close()
    return checked, shared, passed
