"""One trainer process over plain tensors, for `examples/own_engine.py`: three versions of one tensor.

WEIGHTCAST_TOKEN=... python examples/own_trainer.py http://127.0.0.1:8900 main rollout-1
"""

from __future__ import annotations

import sys

import torch

from weightcast import GatewayClient, PlainSource, TrainerWorker


def main(url: str, pair: str, instance: str) -> None:
    weights = {"model.norm.weight": torch.ones(64)}
    with GatewayClient(url) as client:
        client.create_pair(pair, 1, {instance: {"kind": "worker", "world_size": 1}})
    worker = TrainerWorker(url, pair, PlainSource(weights), rank=0, world_size=1)
    worker.connect()
    for version in (1, 2, 3):
        weights["model.norm.weight"].mul_(0.5)
        print(version, worker.update(version).instances[instance]["verified"])
    worker.close()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
