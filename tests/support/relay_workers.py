"""Ranks of a pair whose instance holds its dense tensors on every rank, run in processes of their own by
test_relayed_pair.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from pair_workers import EXPERTS, E, SlotSink, expert_name, expert_of, move_under
from plain_support import Piece, PlainSink

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.host import HOST_VARIABLE
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.versions import Version
from weightcast.transfer.errors import WeightcastError
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import Kind

DENSE = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(8)]
SHAPE = (32, 16)


def dense_of(number: int, version: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + 1000 * number + 7 * version


class Trainer:
    """The one rank of a trainer: all dense tensors and experts."""

    def __init__(self) -> None:
        self.pieces = [Piece(name, SHAPE, (0, 0), dense_of(n, 0)) for n, name in enumerate(DENSE)]
        self.pieces += [Piece(expert_name(e), E, (0, 0), expert_of(e, 0)) for e in range(EXPERTS)]

    def describe(self) -> RankLayout:
        return PlainSink(self.pieces).describe()

    def train(self, version: int) -> None:
        values = [dense_of(n, version) for n in range(len(DENSE))] + [expert_of(e, version) for e in range(EXPERTS)]
        for piece, value in zip(self.pieces, values, strict=True):
            piece.view.copy_(value)


class Replicated(SlotSink):
    """A rank of an instance with data-parallel attention: all dense tensors, and the slots of its own."""

    def __init__(self, rank: int, world: int, row: list[int]) -> None:
        super().__init__(rank, world, row)
        self.dense = torch.full((len(DENSE), *SHAPE), float("nan"))

    def describe(self) -> RankLayout:
        placement = self.placement()
        pieces = [Piece(name, SHAPE, (0, 0), self.dense[n]) for n, name in enumerate(DENSE)]
        for slot, expert in enumerate(placement.experts(0).tolist()):
            pieces.append(Piece(expert_name(expert), E, (0, 0), self.slots[slot], slot))
        return PlainSink(pieces, placement).describe()

    def check(self, version: int) -> list[str]:
        faults = [
            f"{name} is wrong" for n, name in enumerate(DENSE) if not torch.equal(self.dense[n], dense_of(n, version))
        ]
        for slot, expert in enumerate(self.placement().experts(0).tolist()):
            if not torch.equal(self.slots[slot], expert_of(expert, version)):
                faults.append(f"slot {slot} is not expert {expert}")
        return faults


def trainer(url: str, pair: str, versions: list[int]) -> list[Any]:
    """For each version bytes that were sent to each instance and how it ended, or the error."""
    source = Trainer()
    worker = TrainerWorker(url, pair, source, rank=0, world_size=1, deadline=60.0)
    said: list[Any] = []
    worker.connect()
    for version in versions:
        source.train(version)
        try:
            result = worker.update(version)
            said.append(({name: sent.bytes_sent for name, sent in result.transfers.items()}, result.instances))
        except WeightcastError as error:
            said.append(f"{type(error).__name__}: {error}")
            _until(url, pair, lambda instances: not any(one["silent"] for one in instances.values()))
    worker.close()
    return said


def _until(url: str, pair: str, done: Callable[[dict[str, Any]], bool]) -> None:
    """Until the instances of a pair are as they should be, as the gateway sees them."""
    limit = time.monotonic() + 60.0
    with GatewayClient(url) as client:
        while not done(client.pair_status(pair)["instances"]):
            assert time.monotonic() < limit
            time.sleep(0.1)


def instance(
    rank: int, world: int, url: str, pair: str, name: str, row: list[int], versions: list[int], **plays: Any
) -> list[Any]:
    """Serves until `versions` are committed: the faults of its memory after each, and how many boxes it passes on.

    `rebalance` {version: row} changes the map after a version, `moves` {version: row} while one is transferred; in the
    transfer of version `killed` the process ends.
    """
    sink = Replicated(rank, world, row)
    worker = InstanceWorker(url, pair, name, sink, rank=rank, world_size=world, deadline=60.0)
    move_under(worker, sink, dict(plays.get("moves", {})))
    if "killed" in plays:
        _end_in_transfer(worker, plays["killed"])
    said: list[Any] = []
    for version in versions:
        limit = time.monotonic() + 60.0
        while worker.serve(wait=5.0) != version:
            if time.monotonic() > limit:
                return [*said, f"version {version} was not committed"]
        said.append((sink.check(version), passed_on(worker)))
        sink.row = plays.get("rebalance", {}).get(version, sink.row)
    worker.close()
    return said


def passed_on(worker: InstanceWorker) -> int:
    part = worker._joined().part
    return int(((part.operations.kind == Kind.RELAY) & (part.operations.src_rank == part.rank)).sum())


def _end_in_transfer(worker: InstanceWorker, version: int) -> None:
    """kill -9 of a rank that would have passed something on, once all ranks were told to begin."""
    ask = worker._client.ready

    def ready(*asked: Any) -> Any:
        number, order = ask(*asked)
        if order.version == Version.parse(version) and passed_on(worker):
            os.kill(os.getpid(), signal.SIGKILL)
        return number, order

    worker._client.ready = ready  # type: ignore[method-assign]


def doomed(**arguments: Any) -> list[Any]:
    """A rank whose process is killed; what another one says that takes its place when the update has failed."""
    child = multiprocessing.get_context("spawn").Process(target=_alone, kwargs={**arguments, "versions": [1, 2]})
    child.start()
    child.join(90.0)
    if child.exitcode != -signal.SIGKILL:
        child.kill()
        return [f"the process was not killed but ended with {child.exitcode}"]
    name = arguments["name"]
    _until(arguments["url"], arguments["pair"], lambda instances: instances[name]["phase"] == "failed")
    again = {name: value for name, value in arguments.items() if name != "killed"}
    return instance(**again)


def _alone(**arguments: Any) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    instance(**arguments)


def play(
    rank: int, _world: int, _port: int, url: str, pairs: list[str], roles: list[tuple[str, str, dict[str, Any]]]
) -> Any:
    """Process `rank` takes the role `roles[rank]`: kind, host, arguments; in each pair, one after the other."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    kind, host, arguments = roles[rank]
    os.environ[HOST_VARIABLE] = host
    role = {"trainer": trainer, "instance": instance, "doomed": doomed}[kind]
    return [role(url=url, pair=pair, **arguments) for pair in pairs]
