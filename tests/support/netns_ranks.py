"""What runs on the hosts of test_several_hosts.py.

An empty ADDRESS is the worker's own choice.

python netns_ranks.py trainer URL ADDRESS RANK      sends each version that it reads, and says what came of it
python netns_ranks.py engine URL ADDRESS INSTANCE   says each version that it serves, and whether its memory is right
python netns_ranks.py waits URL ADDRESS INSTANCE    the same, and how long a call of `serve` took that asked in vain
"""

from __future__ import annotations

import json
import logging
import sys
import time

import torch
from plain_support import Piece, PlainSink

from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import WeightcastError

PAIR = "main"
SHAPE = (8192, 1024)
"""32 MiB: more than a second at the rate of a link."""
TRAINERS = 2


def weights(version: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + version


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def trainer(url: str, address: str, rank: int) -> None:
    half = SHAPE[0] // TRAINERS
    own = weights(0)[half * rank : half * (rank + 1)].clone()
    source = PlainSink([Piece("w", SHAPE, (half * rank, 0), own)])
    worker = TrainerWorker(url, PAIR, source, rank=rank, world_size=TRAINERS, address=address or None)
    try:
        worker.connect()
    except WeightcastError as error:
        say(f"{type(error).__name__}: {error}")
        return
    say("connected")
    for line in sys.stdin:
        own.copy_(weights(int(line))[half * rank : half * (rank + 1)])
        try:
            say(sorted(worker.update(int(line)).instances))
        except WeightcastError as error:
            say(f"{type(error).__name__}: {error}")
    worker.close()


def engine(url: str, address: str, instance: str, tells: bool = False) -> None:
    held = torch.full(SHAPE, float("nan"))
    sink = PlainSink([Piece("w", SHAPE, (0, 0), held)])
    worker = InstanceWorker(url, PAIR, instance, sink, rank=0, world_size=1, address=address or None)
    while True:
        begun, before = time.monotonic(), worker._outage._next
        version = worker.serve(wait=0.05 if tells else 1.0)
        if tells and worker._outage._next != before:
            say(["asked in vain", time.monotonic() - begun])
        if version is not None:
            say([version, bool(torch.equal(held, weights(version))), worker.fenced])


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    _, role, gateway, here, which = sys.argv
    if role == "trainer":
        trainer(gateway, here, int(which))
    else:
        engine(gateway, here, which, tells=role == "waits")
