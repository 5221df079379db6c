"""A training loop that holds its trainer's ranks as Ray actors and calls `update(version)` on all of them.

    python examples/ray_training_loop.py

Frameworks that keep a worker group of Ray actors (verl, slime and their kin) have the three calls at the bottom of this
file in their drivers; a rank of theirs gets the two methods of TrainRank. It runs on a cluster that RAY_ADDRESS names,
or on one of its own. The engine, which here is a toy that is a Ray actor too, may be any, within the cluster or not.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from pathlib import Path

import ray
import torch

from weightcast import (
    GatewayClient,
    InstanceWorker,
    LayoutBuilder,
    PlainSource,
    RankLayout,
    TrainerWorker,
    start_gateway,
)

GATEWAY, PAIR, INSTANCE = "ray://weightcast", "main", "rollout-0"
HIDDEN = 64


@ray.remote(num_cpus=0)
class TrainRank:
    """A rank: trains what it holds. With FSDP the source is FsdpSource(model), and the rest is the same."""

    def __init__(self, rank: int, world_size: int, token: str) -> None:
        self.weights = {f"model.layers.{rank}.weight": torch.zeros(HIDDEN)}
        self.worker = TrainerWorker(
            GATEWAY, PAIR, PlainSource(self.weights), rank=rank, world_size=world_size, token=token
        )

    def connect(self) -> None:
        self.worker.connect()

    def train(self, step: int) -> None:
        for weight in self.weights.values():
            weight.fill_(step)

    def update(self, version: int) -> list[str]:
        """Returns when every instance is decided, and raises an error that names those that did not commit."""
        return list(self.worker.update(version).instances)


@ray.remote(num_cpus=0)
class Engine:
    """A toy engine of one rank, that looks for updates between two batches."""

    def __init__(self, layers: int, token: str) -> None:
        self.weights = {f"model.layers.{layer}.weight": torch.full((HIDDEN,), float("nan")) for layer in range(layers)}
        self.worker = InstanceWorker(GATEWAY, PAIR, INSTANCE, self, rank=0, world_size=1, token=token)
        threading.Thread(target=self.run, daemon=True).start()

    def describe(self) -> RankLayout:
        builder = LayoutBuilder()
        for name, tensor in self.weights.items():
            builder.add(name, tensor.shape, (0,), tensor)
        return builder.build()

    def placement(self) -> None:
        return None

    def run(self) -> None:
        while True:
            self.worker.serve(wait=0.1)
            if not self.worker.fenced:
                ...  # generate the next batch here

    def generate(self) -> dict[str, float]:
        return {name: float(tensor.mean()) for name, tensor in self.weights.items()}


def main(world_size: int, steps: int) -> None:
    token = os.environ.get("WEIGHTCAST_TOKEN") or secrets.token_urlsafe(32)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False, logging_level="error")
    gateway = start_gateway(tokens={"operator": token})
    with GatewayClient(GATEWAY, token) as client:
        client.create_pair(PAIR, world_size, {INSTANCE: {"kind": "worker", "world_size": 1}})
    engine = Engine.remote(world_size, token)
    ranks = [TrainRank.remote(rank, world_size, token) for rank in range(world_size)]
    ray.get([rank.connect.remote() for rank in ranks])
    for step in range(1, steps + 1):
        ray.get([rank.train.remote(step) for rank in ranks])
        committed = ray.get([rank.update.remote(step) for rank in ranks])[0]
        print(step, committed, ray.get(engine.generate.remote()), flush=True)
    del gateway  # it ends with its last handle, or by stop_gateway
    ray.shutdown()


if __name__ == "__main__":
    main(world_size=2, steps=3)
