"""What the cluster files of test_cluster.py start: a trainer's entry, and an engine's program.

python cluster_parts.py GATEWAY PAIR INSTANCE RANK WORLD FOLDER
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from pair_workers import ShardSource, SlotSink

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.instance_worker import InstanceWorker

ROW = [0, 1, 2, 3, 3, 0]
"""The expert in each slot: rank 1 of 2 has expert 3 twice."""


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
    sink = SlotSink(rank, world, ROW)
    worker = InstanceWorker(url, pair, instance, sink, rank=rank, world_size=world)
    while True:
        if (version := worker.serve(wait=1.0)) is not None:
            (folder / f"{instance}-{rank}-{version}").write_text("; ".join(sink.check(version)) or "right")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    _, gateway, of_pair, name, number, size, where = sys.argv
    engine(gateway, of_pair, name, int(number), int(size), Path(where))
