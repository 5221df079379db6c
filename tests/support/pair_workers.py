"""Ranks of a whole pair over plain tensors, run in processes of their own by test_worker.py.

The trainer holds `w` (8, 4) in row shards and four experts; an instance holds `w` in column shards, and expert slots by
a placement map. Everything between them is real: HTTP gateway, Gloo, planner, digests.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from plain_support import Piece, PlainSink

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import UpdateError, WeightcastError
from weightcast.transfer.executor import TransferReport
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement

EXPERTS = 4
W = (8, 4)
E = (3, 5)


def expert_name(expert: int) -> str:
    return f"model.layers.0.mlp.experts.{expert}.down_proj.weight"


def w_of(version: int) -> torch.Tensor:
    return torch.arange(32, dtype=torch.float32).reshape(W) + 100 * version


def expert_of(expert: int, version: int) -> torch.Tensor:
    return torch.full(E, float(expert + 1)) * (version + 1)


class ShardSource:
    """Trainer rank `rank` of `world`: its share of the rows of w, and each `world`th expert."""

    def __init__(self, rank: int, world: int = 2) -> None:
        rows = W[0] // world
        self.rows, self.experts = slice(rows * rank, rows * (rank + 1)), range(rank, EXPERTS, world)
        self.pieces = [Piece("w", W, (rows * rank, 0), w_of(0)[self.rows].clone())]
        self.pieces += [Piece(expert_name(e), E, (0, 0), expert_of(e, 0)) for e in self.experts]

    def describe(self) -> RankLayout:
        return PlainSink(self.pieces).describe()

    def train(self, version: int) -> None:
        self.pieces[0].view.copy_(w_of(version)[self.rows])
        for piece, e in zip(self.pieces[1:], self.experts, strict=True):
            piece.view.copy_(expert_of(e, version))


class SlotSink:
    """Rank `rank` of an instance of `world`: columns of w, and the slots that the map gives it. All NaN at first."""

    def __init__(self, rank: int, world: int, row: list[int]) -> None:
        self.rank, self.world = rank, world
        self.columns = W[1] // world
        self.w = torch.full((W[0], self.columns), float("nan"))
        self.slots = torch.full((len(row) // world, *E), float("nan"))
        self.row = row

    def placement(self) -> RankPlacement:
        count = len(self.row) // self.world
        placement = ExpertPlacement(np.array([self.row]), EXPERTS, self.world)
        return RankPlacement(placement, self.rank, count, len(self.row), 0)

    def describe(self) -> RankLayout:
        placement = self.placement()
        pieces = [Piece("w", W, (0, self.columns * self.rank), self.w)]
        for slot, expert in enumerate(placement.experts(0).tolist()):
            pieces.append(Piece(expert_name(expert), E, (0, 0), self.slots[slot], slot))
        return PlainSink(pieces, placement).describe()

    def check(self, version: int) -> list[str]:
        """What is wrong with this rank's memory for a version; empty when every byte is right."""
        faults: list[str] = []
        own = w_of(version)[:, self.columns * self.rank : self.columns * (self.rank + 1)]
        if not torch.equal(self.w, own):
            faults.append(f"w {self.w.tolist()}")
        for slot, expert in enumerate(self.placement().experts(0).tolist()):
            if not torch.equal(self.slots[slot], expert_of(expert, version)):
                faults.append(f"slot {slot} should hold expert {expert}: {self.slots[slot][0, 0]}")
        return faults


class SettlingSink(SlotSink):
    """A rank that keeps twice w beside it; what `settle` says of the numbers in `fails` is an error."""

    def __init__(self, rank: int, world: int, row: list[int], fails: list[int]) -> None:
        super().__init__(rank, world, row)
        self.doubled = torch.full_like(self.w, float("nan"))
        self.fails = [w_of(version)[0, self.columns * rank] for version in fails]

    def settle(self) -> None:
        if self.w[0, 0] in self.fails:
            raise UpdateError("doubled could not be computed anew")
        self.doubled.copy_(self.w).mul_(2)

    def check(self, version: int) -> list[str]:
        faults = super().check(version)
        return faults if torch.equal(self.doubled, self.w * 2) else [*faults, f"doubled {self.doubled.tolist()}"]


def create(
    url: str, pair: str, instances: dict[str, int], verify: str = "full", trainers: int = 2, **settings: float
) -> None:
    with GatewayClient(url) as client:
        specs = {name: {"kind": "worker", "world_size": world} for name, world in instances.items()}
        client.create_pair(pair, trainers, specs, settings, verify=verify)


def error_of(error: WeightcastError) -> str:
    return f"{type(error).__name__}: {error}"


def trainer(
    rank: int,
    url: str,
    pair: str,
    versions: list[int],
    deadline: float,
    deaf_seconds: float = 0.0,
    backend: str = "tcp",
) -> list[Any]:
    """Connects and sends each version; what came of each, an error as text.

    The answer to its digests takes `deaf_seconds` to arrive.
    """
    source = ShardSource(rank)
    worker = TrainerWorker(url, pair, source, rank=rank, world_size=2, deadline=deadline, backend=backend)
    tell = worker._client.digests

    def told(*arguments: Any, **which: Any) -> Any:
        answer = tell(*arguments, **which)
        time.sleep(deaf_seconds)
        return answer

    worker._client.digests = told  # type: ignore[method-assign]
    said: list[Any] = []
    try:
        worker.connect()
        for version in versions:
            source.train(version)
            try:
                said.append(worker.update(version).instances)
            except WeightcastError as error:
                said.append(error_of(error))
    except WeightcastError as error:
        said.append(error_of(error))
    worker.close()
    return said


def instance(
    rank: int,
    world: int,
    url: str,
    pair: str,
    name: str,
    row: list[int],
    plays: dict[str, Any],
    deadline: float,
    backend: str = "tcp",
) -> list[list[str]]:
    """Serves until as many versions as `plays["versions"]` are committed; the faults of its memory after each.

    `plays` says what goes wrong: "rebalance" {version: row} changes the map after that version, "corrupt" flips a bit
    of a slot between transfer and digest of that version, "unsettled" are versions after which rank 1 cannot settle.
    """
    sink = SlotSink(rank, world, row)
    if "unsettled" in plays:
        sink = SettlingSink(rank, world, row, plays["unsettled"] if rank == 1 else [])
    worker = InstanceWorker(url, pair, name, sink, rank=rank, world_size=world, deadline=deadline, backend=backend)
    faults: list[list[str]] = []
    _play_corruption(worker, sink, plays)
    if plays.get("connect"):
        worker.serve(wait=deadline)
    for version in plays["versions"]:
        limit = time.monotonic() + deadline
        while worker.serve(wait=5.0) != version:
            if time.monotonic() > limit:
                return [*faults, [f"version {version} was not committed within {deadline:g} s"]]
        faults.append(sink.check(version))
        if version in plays.get("rebalance", {}):
            sink.row = plays["rebalance"][version]
    worker.close()
    return faults


def _play_corruption(worker: InstanceWorker, sink: SlotSink, plays: dict[str, Any]) -> None:
    """Bits that flip in memory after they were received: the transfer itself cannot see that."""
    if "corrupt" not in plays or sink.rank != plays.get("rank", 0):
        return
    receive = worker.transfer

    def corrupted() -> Any:
        report = receive()
        if torch.equal(sink.w, w_of(plays["corrupt"])[:, sink.columns * sink.rank : sink.columns * (sink.rank + 1)]):
            sink.slots[-1].view(torch.int32)[0, 0] ^= 1
        return report

    worker.transfer = corrupted  # type: ignore[method-assign]


def play(rank: int, _world: int, _port: int, url: str, pair: str, roles: list[tuple[str, dict[str, Any]]]) -> Any:
    """Process `rank` takes the role `roles[rank]`."""
    logging.disable(logging.CRITICAL)  # the failures that are played are asserted, not read
    torch.set_num_threads(1)
    kind, arguments = roles[rank]
    if kind == "trainer":
        return trainer(url=url, pair=pair, **arguments)
    return instance(url=url, pair=pair, **arguments)


def lacking_play(rank: int, world: int, port: int, url: str, pair: str, roles: list[tuple[str, dict[str, Any]]]) -> Any:
    """Like `play`, but the instance's one rank reports no placement, and three experts of four."""
    if roles[rank][0] == "trainer":
        return play(rank, world, port, url, pair, roles)
    sink = SlotSink(0, 1, [0, 1, 2, 2])
    pieces = [Piece("w", W, (0, 0), sink.w)]
    pieces += [Piece(expert_name(e), E, (0, 0), sink.slots[e], e) for e in range(3)]
    worker = InstanceWorker(url, pair, "rollout-0", PlainSink(pieces), rank=0, world_size=1, deadline=30.0)
    return worker.serve(wait=10.0)


def again_play(rank: int, world: int, port: int, url: str, pair: str, roles: list[tuple[str, dict[str, Any]]]) -> Any:
    """Like `play`, but a trainer rank plays several trainers, one after the other."""
    if roles[rank][0] != "again":
        return play(rank, world, port, url, pair, roles)
    logging.disable(logging.CRITICAL)
    return [trainer(roles[rank][1]["rank"], url, pair, versions, 150.0) for versions in roles[rank][1]["versions"]]


def move_under(worker: InstanceWorker, sink: SlotSink, rows: dict[int, list[int]]) -> None:
    """Once a version was received that is in `rows`, and before it is verified, the placement is another one."""
    receive = worker.transfer

    def transfer() -> TransferReport:
        report = receive()
        version = 0 if worker.target is None else worker.target.number
        sink.row = rows.pop(version, sink.row)
        return report

    worker.transfer = transfer  # type: ignore[method-assign]
