"""Time of an update of the same plan: plain processes and a gateway over HTTP, beside actors and a gateway's actor.

    python benchmarks/bench_ray.py --mib 256 --tensors 500 --updates 20

Both have two trainer ranks and an instance of one rank, live at the same time, and are updated by turns. An update is
timed on trainer rank 0 from the offer to the decision. Ray runs on this machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from turns import Turns

from weightcast.adapters.unsharded import PlainSource
from weightcast.cluster.ray_actors import RankActor, spawn
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.server.ray_actor import start_gateway
from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout

PAIR, INSTANCE, TRAINERS = "main", "rollout-0", 2
ADDRESS = "127.0.0.1"
COLUMNS = 1024
LIMIT = 1.10


def weights(mib: int, tensors: int, rank: int | None) -> dict[str, torch.Tensor]:
    """Those of a trainer rank, or all."""
    numbers = range(tensors) if rank is None else range(rank, tensors, TRAINERS)
    rows = (mib << 20) // tensors // (COLUMNS * torch.float32.itemsize)
    return {f"model.layers.{i}.weight": torch.zeros(rows, COLUMNS) for i in numbers}


class Whole:
    """A sink of one rank that has every tensor whole."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def describe(self) -> RankLayout:
        builder = LayoutBuilder()
        for name, tensor in self.tensors.items():
            builder.add(name, tensor.shape, (0, 0), tensor)
        return builder.build()

    def placement(self) -> None:
        return None


def trainer(url: str, rank: int, mib: int, tensors: int, mail: Any) -> None:
    """Says "connected", and for each version the seconds that it took."""
    torch.set_num_threads(1)
    source = PlainSource(weights(mib, tensors, rank))
    worker = TrainerWorker(url, PAIR, source, rank=rank, world_size=TRAINERS, address=ADDRESS)
    worker.connect()
    mail.send("connected")
    while (version := mail.recv()) is not None:
        gc.collect()
        before = time.perf_counter()
        worker.update(version)
        mail.send(time.perf_counter() - before)
    worker.close()


def engine(url: str, mib: int, tensors: int, mail: Any) -> None:
    """Serves until its process ends."""
    torch.set_num_threads(1)
    worker = InstanceWorker(url, PAIR, INSTANCE, Whole(weights(mib, tensors, None)), rank=0, world_size=1)
    while True:
        worker.serve(wait=5.0)


class Plain:
    """Processes, asked through pipes."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        context, size = get_context("spawn"), (arguments.mib, arguments.tensors)
        self._pipes = [context.Pipe() for _ in range(TRAINERS)]
        targets = [(trainer, (url, rank, *size, pipe[1])) for rank, pipe in enumerate(self._pipes)]
        self._all = [
            context.Process(target=f, args=a, daemon=True) for f, a in [*targets, (engine, (url, *size, None))]
        ]
        for process in self._all:
            process.start()

    def tell(self, what: object) -> None:
        for ours, _ in self._pipes:
            ours.send(what)

    def hear(self) -> list[Any]:
        return [ours.recv() for ours, _ in self._pipes]

    def close(self) -> None:
        for process in self._all:
            process.kill()


class OnRay:
    """Actors."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        import ray

        self._get, size = ray.get, (arguments.mib, arguments.tensors)
        environment = {name: os.environ[name] for name in (TOKEN_VARIABLE, "OMP_NUM_THREADS")}
        self._ranks = [spawn(RankActor, f"trainer/{rank}", environment) for rank in range(TRAINERS)]
        self._engine = spawn(RankActor, "engine", environment)
        ray.get(self._engine.begin.remote("bench_ray:engine", url, *size))
        for rank, actor in enumerate(self._ranks):
            ray.get(actor.begin.remote("bench_ray:trainer", url, rank, *size))

    def tell(self, what: object) -> None:
        self._get([actor.tell.remote(what) for actor in self._ranks])

    def hear(self) -> list[Any]:
        said = self._get([actor.hear.remote(300.0) for actor in self._ranks])
        for _, what in said:
            if isinstance(what, Exception):
                raise what
        return [what for _, what in said]

    def close(self) -> None:
        """They end with the cluster."""


@contextmanager
def plain_gateway() -> Iterator[str]:
    import json

    from weightcast.cluster.processes import free_port

    command = [sys.executable, "-m", "weightcast", "gateway", "--json", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def begin(description: str | None) -> argparse.Namespace:
    """What the command line says, in an environment that the processes of one pair share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the model (256)")
    parser.add_argument("--tensors", type=int, default=500, help="tensors of the model (500)")
    parser.add_argument("--updates", type=int, default=20, help="updates of each (20)")
    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{arguments.mib} MiB in {arguments.tensors} tensors, {TRAINERS} trainer ranks, 1 instance")
    return arguments


def main() -> int:
    arguments = begin(__doc__)
    import ray

    paths = os.pathsep.join([str(Path(__file__).resolve().parent), *filter(None, sys.path[1:])])
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address=ADDRESS,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    print(f"Ray {ray.__version__}")
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        actor = start_gateway("bench")  # kept: it ends with its last handle
        sides = {}
        for name, url in (("plain", stack.enter_context(plain_gateway())), ("ray", "ray://bench")):
            with GatewayClient(url) as client:
                client.create_pair(PAIR, TRAINERS, {INSTANCE: {"kind": "worker", "world_size": 1}})
            sides[name] = (Plain if name == "plain" else OnRay)(url, arguments)
            stack.callback(sides[name].close)
        seconds = measure(sides, arguments.updates)
        del actor
    print(f"{'':<8}{'median':>10}{'best':>10}")
    for name, turns in seconds.items():
        print(f"{name:<8}{turns.seconds * 1e3:>7.1f} ms{min(turns.wall) * 1e3:>7.1f} ms")
    median, best = seconds["ray"].ratio(seconds["plain"])
    print(f"{'ratio':<8}{median:>10.3f}{best:>10.3f}   (at most {LIMIT}, of paired turns)")
    return 0 if median <= LIMIT else 3


def measure(sides: dict[str, Any], updates: int) -> dict[str, Turns]:
    """Returns the seconds of each update but the first, by turns."""
    for side in sides.values():
        assert side.hear() == ["connected"] * TRAINERS
    turns = {name: Turns() for name in sides}
    for version in range(1, updates + 2):
        for name, side in sides.items():
            side.tell(version)
            seconds = side.hear()[0]
            if version > 1:
                turns[name].wall.append(seconds)
    return turns


if __name__ == "__main__":
    sys.exit(main())
