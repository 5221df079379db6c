"""What the cluster files of test_cluster.py start: a trainer's entry, and an engine's program.

python cluster_parts.py GATEWAY PAIR INSTANCE RANK WORLD FOLDER
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pair_workers import ShardSource, SlotSink, w_of
from plain_support import Piece, PlainSink

from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.layout.placement import RankPlacement

ROW = [0, 1, 2, 3, 3, 0]
"""The expert in each slot: rank 1 of 2 has expert 3 twice."""


class HeldSink(SlotSink):
    """Waits, once it has received the version that a file names, for as long as there is that file."""

    hold = Path("none")

    def placement(self) -> RankPlacement:
        columns = slice(self.columns * self.rank, self.columns * (self.rank + 1))
        while self.hold.exists() and torch.equal(self.w, w_of(int(self.hold.read_text()))[:, columns]):
            time.sleep(0.05)
        return super().placement()


class Trained(ShardSource):
    """A shard that is trained when it is asked for a version."""

    at = ShardSource.train


def make_source(rank: int, world_size: int) -> Trained:
    assert world_size == 2
    return Trained(rank)


def engine(url: str, pair: str, instance: str, rank: int, world: int, folder: Path) -> None:
    """Writes what is wrong with its memory into a file for each version that it serves."""
    with GatewayClient(url, outage=60.0) as client:
        while pair not in [known["pair"] for known in client.status()]:
            time.sleep(0.2)
    (folder / f"{instance}.token").write_text(os.environ.get(TOKEN_VARIABLE, ""))
    sink = HeldSink(rank, world, ROW)
    sink.hold = folder / f"hold-{instance}"
    worker = InstanceWorker(url, pair, instance, sink, rank=rank, world_size=world)
    while True:
        if (version := worker.serve(wait=1.0)) is not None:
            (folder / f"{instance}-{rank}-{version}").write_text("; ".join(sink.check(version)) or "right")


def whole_trainer(url: str, rank: int, mail: Any) -> None:
    """Trainer rank of 2 that holds everything; says how many bytes it has sent to each instance."""
    source = PlainSink([Piece("w", (1024,), (0,), torch.ones(1024))])
    worker = TrainerWorker(url, "main", source, rank=rank, world_size=2)
    worker.connect()
    result = worker.update(1)
    mail.send({name: result.transfers[name].bytes_sent if name in result.transfers else 0 for name in result.instances})
    worker.close()


def whole_engine(url: str, instance: str, mail: Any) -> None:
    """An instance of one rank that holds everything, until its process ends."""
    sink = PlainSink([Piece("w", (1024,), (0,), torch.zeros(1024))])
    worker = InstanceWorker(url, "main", instance, sink, rank=0, world_size=1)
    while True:
        worker.serve(wait=1.0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    _, gateway, of_pair, name, number, size, where = sys.argv
    engine(gateway, of_pair, name, int(number), int(size), Path(where))
