"""Ranks of whole pairs on one host, with a gateway: what the processes of test_colocated.py do, and a program.

python colocated_pairs.py URL PAIR INSTANCE VERSION     an instance of one rank, which says what it serves and dies in
                                                        the middle of VERSION
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from colocated_workers import SHARES, killing, segments_of
from pair_workers import EXPERTS, ShardSource, SlotSink, move_under

from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.colocated.offers import Share
from weightcast.transfer.errors import UpdateError

LONG = 100.0


def rows_of(seed: int, version: int) -> list[int]:
    """Some placement of four experts in six slots; now and then another one."""
    rng = random.Random(seed * 1000 + version // 4)
    row = [*range(EXPERTS), rng.randrange(EXPERTS), rng.randrange(EXPERTS)]
    rng.shuffle(row)
    return row


def away_and_back(source: ShardSource, rng: random.Random, share: Share) -> None:
    """What a trainer may do between updates: weights that go away and come back, at another place or at the same."""
    if share == "staged":
        for piece in source.pieces:
            storage = piece.view.untyped_storage()
            nbytes = storage.nbytes()
            storage.resize_(0)
            storage.resize_(nbytes)
        return
    for i in rng.sample(range(len(source.pieces)), rng.randint(1, len(source.pieces))):
        source.pieces[i] = source.pieces[i]._replace(view=source.pieces[i].view.clone())


class Many(NamedTuple):
    """What a rank saw of many updates of one pair.

    `right` are the versions in which every slot and every other byte was, `slots` how many slots that were; `away` how
    often its weights went and came back, `maps` how often its placement changed between updates, `under` how often
    while one ran; `sent` and `shared` bytes in messages and in place, `faults` what was wrong, `left` segments at the
    end.
    """

    right: int = 0
    slots: int = 0
    away: int = 0
    maps: int = 0
    under: int = 0
    sent: int = 0
    shared: int = 0
    faults: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def many_updates(rank: int, _: int, __: int, url: str, pair: str, count: int, seed: int) -> Many:
    """Two trainer ranks, each of which lends another thing, and two of an instance."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rng = random.Random(seed + rank)
    if rank < 2:
        found = lend_often(rank, url, pair, SHARES[rank], count, rng)
    else:
        found = read_often(rank - 2, url, pair, count, seed, rng)
    gc.collect()
    return found._replace(left=tuple(segments_of(os.getpid())))


def lend_often(rank: int, url: str, pair: str, share: Share, count: int, rng: random.Random) -> Many:
    source = ShardSource(rank)
    worker = TrainerWorker(url, pair, source, rank=rank, world_size=2, deadline=LONG, share=share)
    worker.connect()
    away = sent = shared = 0
    for version in range(1, count + 1):
        if rng.random() < 0.5:
            away_and_back(source, rng, share)
            away += 1
        source.train(version)
        for report in worker.update(version).transfers.values():
            sent, shared = sent + report.bytes_sent, shared + report.bytes_shared
    worker.close()
    return Many(away=away, sent=sent, shared=shared)


def read_often(rank: int, url: str, pair: str, count: int, seed: int, rng: random.Random) -> Many:
    """Between updates the memory may be given up and taken back, as engines do it: at its place, the contents lost."""
    sink = SlotSink(rank, 2, rows_of(seed, 0))
    worker = InstanceWorker(url, pair, "rollout-0", sink, rank=rank, world_size=2, deadline=LONG)
    faults: list[str] = []
    right = slots = away = maps = 0
    under = {version: rows_of(seed + 1, version) for version in range(9, count + 1, 10)}
    planned = len(under)
    move_under(worker, sink, under)
    for version in range(1, count + 1):
        limit = time.monotonic() + LONG
        while worker.serve(wait=5.0) != version:
            if time.monotonic() > limit:
                return Many(faults=(*faults, f"version {version} was not committed"))
        wrong = sink.check(version)
        faults += [f"version {version}: {fault}" for fault in wrong]
        right, slots = right + (not wrong), slots + len(sink.slots)
        maps += sink.row != rows_of(seed, version)
        sink.row = rows_of(seed, version)
        if rng.random() < 0.5:
            sink.w.fill_(float("nan"))
            sink.slots.fill_(float("nan"))
            away += 1
    worker.close()
    return Many(right, slots, away, maps, planned - len(under), faults=tuple(faults))


# One host and another, and a side that is killed


class Sent(NamedTuple):
    """What a trainer rank said of one update: bytes in messages and in place for each instance, or what failed."""

    to: dict[str, tuple[int, int]]
    error: str = ""
    seconds: float = 0.0


def lend(rank: int, _: int, __: int, url: str, pair: str, versions: int) -> list[Sent]:
    """One of two trainer ranks, whose weights are read in place where they can be."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    source, said = ShardSource(rank), []
    worker = TrainerWorker(url, pair, source, rank=rank, world_size=2, deadline=LONG, share="in_place")
    worker.connect()
    for version in range(1, versions + 1):
        source.train(version)
        begun = time.monotonic()
        try:
            moved = worker.update(version).transfers
            said.append(Sent({name: (report.bytes_sent, report.bytes_shared) for name, report in moved.items()}))
        except UpdateError as error:
            said.append(Sent({}, str(error), time.monotonic() - begun))
    worker.close()
    return said


def generate(url: str, pair: str, instance: str, dies: int) -> None:
    """An instance of one rank: a line for each version that it serves, with the faults of its memory."""
    torch.set_num_threads(1)
    sink = SlotSink(0, 1, [*range(EXPERTS), 3, 0])
    worker = InstanceWorker(url, pair, instance, sink, rank=0, world_size=1, deadline=LONG)
    while True:
        version = worker.serve(wait=1.0)
        if version is not None:
            print(json.dumps([version, sink.check(version), worker.fenced]), flush=True)
            if version + 1 == dies:
                killing(os.getpid())


def doomed_lender(url: str, pair: str, path: Path) -> None:
    """Trainer rank 1, which says in a file who it is, and waits to be killed."""
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    lend(1, 2, 0, url, pair, 2)


def lose_a_trainer(rank: int, _: int, __: int, url: str, pair: str, path: Path) -> list[Sent] | tuple[object, ...]:
    """Rank 0 trains, rank 1 starts another that does, rank 2 is an engine and kills that one while it reads from it.

    The engine says what it committed, whether it is fenced, in how many seconds, and what shared memory is left.
    """
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if rank == 0:
        return lend(0, 2, 0, url, pair, 2)
    if rank == 1:
        child = multiprocessing.get_context("spawn").Process(target=doomed_lender, args=(url, pair, path), daemon=True)
        child.start()
        child.join(LONG)
        return (child.exitcode,)
    sink = SlotSink(0, 1, [*range(EXPERTS), 3, 0])
    worker = InstanceWorker(url, pair, "rollout-0", sink, rank=0, world_size=1, deadline=LONG)
    while worker.serve(wait=1.0) != 1:
        pass
    killing(int(path.read_text()))
    begun, committed = time.monotonic(), None
    while not worker.fenced and committed is None:
        committed = worker.serve(wait=1.0)
    found = committed, worker.fenced, time.monotonic() - begun
    worker.close()
    gc.collect()
    return (*found, *segments_of(os.getpid()))


# Unequal worlds


def several_worlds(rank: int, _: int, __: int, url: str, worlds: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """One pair after the other: so many trainer ranks and so many of the instance, three versions and another map each.

    Returns for each pair the versions that were right in every byte on this rank, and its bytes in messages and in
    place.
    """
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found = []
    for trainers, engines in worlds:
        pair = f"{trainers}-to-{engines}"
        if rank < trainers:
            found.append(lend_to_another_world(rank, trainers, url, pair))
        else:
            found.append((read_from_another_world(rank - trainers, engines, url, pair), 0, 0))
    return found


def lend_to_another_world(rank: int, world: int, url: str, pair: str) -> tuple[int, int, int]:
    source, share = ShardSource(rank, world), SHARES[rank % 2]
    worker = TrainerWorker(url, pair, source, rank=rank, world_size=world, deadline=LONG, share=share)
    worker.connect()
    sent = shared = 0
    for version in (1, 2, 3):
        source.train(version)
        for report in worker.update(version).transfers.values():
            sent, shared = sent + report.bytes_sent, shared + report.bytes_shared
    worker.close()
    return 0, sent, shared


def read_from_another_world(rank: int, world: int, url: str, pair: str) -> int:
    """Versions in which all was right."""
    sink, right = SlotSink(rank, world, [0, 1, 2, 3, 3, 0, 1, 2]), 0
    worker = InstanceWorker(url, pair, "rollout-0", sink, rank=rank, world_size=world, deadline=LONG)
    for version in (1, 2, 3):
        while worker.serve(wait=5.0) != version:
            pass
        right += not sink.check(version)
        sink.row = [3, 2, 1, 0, version % 2, 2, 3, 0]
    worker.close()
    return right


if __name__ == "__main__":
    generate(*sys.argv[1:4], int(sys.argv[4]))
