"""A trainer rank that stands still while it joins, until somebody kills it: python wait_ranks.py URL RANK WORLD"""

from __future__ import annotations

import sys
import time

import torch
from plain_support import Piece, PlainSink

from weightcast.gateway.ranks import trainer as module
from weightcast.gateway.ranks.trainer import TrainerWorker


def main(url: str, rank: int, world: int) -> None:
    def stand_still(*_: object) -> None:
        print("joining", flush=True)
        time.sleep(600)

    module.join = stand_still  # type: ignore[assignment]
    half = 8 // world
    source = PlainSink([Piece("t", (8,), (half * rank,), torch.ones(half))])
    TrainerWorker(url, "main", source, rank=rank, world_size=world).connect()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
