"""An inference rank of an engine of your own: a sink with two methods, and a call of `serve` between two batches.

    WEIGHTCAST_TOKEN=... python examples/own_engine.py http://127.0.0.1:8900 main rollout-1

The trainer's side creates the pair, with `{"kind": "worker", "world_size": 1}` for an instance of that name, and holds
the same tensors; `examples/own_trainer.py` is the one for this. Start either first: `serve` waits for its pair. The
loop outlives its gateway: it goes on with the version that it has.
"""

from __future__ import annotations

import logging
import sys

import torch

from weightcast import InstanceWorker, LayoutBuilder, RankLayout, RankPlacement


class MySink:
    """A rank that holds the whole of every tensor it knows by its checkpoint name."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def describe(self) -> RankLayout:
        builder = LayoutBuilder()
        for name, tensor in self.weights.items():
            builder.add(name, tensor.shape, (0,) * tensor.ndim, tensor)  # a shard has another offset and a smaller view
        return builder.build()

    def placement(self) -> RankPlacement | None:
        return None  # no expert placement that could move


def main(url: str, pair: str, instance: str) -> None:
    weights = {"model.norm.weight": torch.zeros(64)}
    worker = InstanceWorker(url, pair, instance, MySink(weights), rank=0, world_size=1)
    while True:
        if (version := worker.serve(wait=1.0)) is not None:
            print("serving version", version)
        if not worker.fenced:  # else nothing was committed yet, or its memory may hold bytes of two versions
            ...  # generate the next batch here


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    logging.basicConfig(level=logging.WARNING)  # what fails is logged, and told to the gateway
    main(*sys.argv[1:4])
