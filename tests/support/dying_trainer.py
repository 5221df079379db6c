"""usage: dying_trainer.py URL PAIR CONNECT|OFFER|CHECKPOINT

A trainer, with its token in WEIGHTCAST_TOKEN, that ends by itself (kill -9) with its work under way. CONNECT: while the
gateway waits for the second of two ranks to register. OFFER: while it waits for the second one to offer version 1. One
of a CHECKPOINT has one rank, updates to version 1, and ends in the update to 2 while the engine is paused.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from life_support import SIZE

from weightcast.adapters.unsharded import CheckpointSource, PlainSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.trainer import TrainerWorker


def main(url: str, pair: str, stage: str) -> None:
    if stage not in ("CONNECT", "OFFER"):
        worker = TrainerWorker(url, pair, CheckpointSource(stage), rank=0, world_size=1)
        worker.connect()
        worker.update(1)
        GatewayClient.digests = lambda *_, **__: die()  # type: ignore[assignment]
        worker.update(2)
    source = PlainSource({"t": torch.ones(SIZE)})
    workers = [TrainerWorker(url, pair, source, rank=rank, world_size=2) for rank in range(2)]
    if stage == "CONNECT":
        start_connect = GatewayClient.start_connect

        def and_die(client: GatewayClient, *names: str) -> None:
            start_connect(client, *names)
            die()

        GatewayClient.start_connect = and_die  # type: ignore[method-assign]
        workers[0].connect()
    with ThreadPoolExecutor(2) as pool, GatewayClient(url) as client:
        list(pool.map(TrainerWorker.connect, workers))
        pool.submit(workers[0].update, 1)
        while not client.pair_status(pair)["offers"]:
            time.sleep(0.05)
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
