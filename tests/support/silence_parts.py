"""usage: silence_parts.py trainer|engine URL [RANK WORLD]

A trainer rank of pair "main" that connects, says so and ends, or a rank of its engine "rollout-1"; token in
WEIGHTCAST_TOKEN. Neither sets up logging.
"""

from __future__ import annotations

import sys

import torch
from plain_support import Piece, PlainSink

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker


def trainer(url: str, rank: int, world: int) -> None:
    TrainerWorker(url, "main", PlainSource({"t": torch.ones(8)}), rank=rank, world_size=world).connect()
    print("connected", flush=True)


def engine(url: str, rank: int, world: int) -> None:
    sink = PlainSink([Piece("t", (8,), (0,), torch.zeros(8))])
    worker = InstanceWorker(url, "main", "rollout-1", sink, rank=rank, world_size=world)
    print("serving", flush=True)
    while True:
        if (version := worker.serve(wait=0.5)) is not None:
            print(f"version {version}", flush=True)


if __name__ == "__main__":
    role, address, *numbers = sys.argv[1:]
    {"trainer": trainer, "engine": engine}[role](address, *map(int, numbers or (0, 1)))
