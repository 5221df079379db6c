"""Ranks of a pair whose SGLang ranks move their experts with SGLang's own mover, between updates and in the middle."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import sglang_support as support
import torch
from sglang_models import read_tensors

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.membership import Member
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.records import Action, Order
from weightcast.transfer.errors import WeightcastError
from weightcast.transfer.executor import Executor

ENGINE_RANKS = 2
SECONDS = 100.0


def weights_of(checkpoint: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    return {name: (t.float() * (1 + version / 4)).to(t.dtype) for name, t in checkpoint.items()}


def play(
    rank: int,
    world: int,
    port: int,
    path: str,
    server: dict[str, Any],
    url: str,
    token: str,
    versions: Sequence[int],
    rows: Sequence[Sequence[int]],
    between: Sequence[int],
    during: dict[int, int],
) -> list[Any]:
    """Two SGLang ranks and one trainer rank go through `versions`.

    `rows` are the maps that layer 0 goes through, one after another: one step before each version of `between`, and one
    in the middle of each of the first `during[version]` transfers of a version. Returns what came of each version: on
    the trainer the gateway's record or the error, on an SGLang rank its faults.
    """
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if rank == ENGINE_RANKS:
        return _train(path, url, token, versions)
    return _serve(support.boot(rank, ENGINE_RANKS, port, path, **server), url, token, versions, rows, between, during)


def _train(path: str, url: str, token: str, versions: Sequence[int]) -> list[Any]:
    checkpoint = read_tensors(path)
    weights = {name: t.clone() for name, t in checkpoint.items()}
    worker = TrainerWorker(url, "moving", PlainSource(weights), rank=0, world_size=1, token=token, deadline=SECONDS)
    worker.connect()
    said: list[Any] = []
    for version in versions:
        for name, t in weights_of(checkpoint, version).items():
            weights[name].copy_(t)
        try:
            said.append(worker.update(version).instances["rollout-0"])
        except WeightcastError as error:
            said.append(str(error))
    worker.close()
    return said


class _Engine:
    """The SGLang side: its model, its map, and its mover."""

    def __init__(self, r: support.Rank, rows: Sequence[Sequence[int]]) -> None:
        from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

        self.rank, self.rows, self.at = r, rows, 0
        support.set_map(r)
        self.model = support.build(r)
        support.load(r, self.model)
        self.sink = support.sink_of(r, self.model)
        self.updater = ExpertLocationUpdater()
        self.updater._first_execution = False  # The first one calls torch.cpu.empty_cache, which does not exist.

    def move(self) -> None:
        """Layer 0 goes to its next map."""
        from sglang.srt.eplb.expert_location import ExpertLocationMetadata

        self.at += 1
        row, rank = list(self.rows[self.at]), self.rank.rank
        moved = ExpertLocationMetadata.init_by_mapping(self.rank.model_config, [row, row], moe_ep_rank=rank)
        weights = self.model.routed_experts_weights_of_layer
        self.updater.update(weights, moved, update_layer_ids=[0], nnodes=1, rank=rank)

    def faults(self, version: int) -> list[str]:
        """Slots and other parameters that do not hold `version`, byte for byte."""
        new = self.rank._replace(checkpoint=weights_of(self.rank.checkpoint, version))
        maps = [self.rows[self.at], self.rows[0]]
        wrong = [f"layer {layer} slot {slot}" for layer, slot in support.wrong_slots(new, self.model, maps)]
        fresh = support.build(new)
        support.load(new, fresh)
        for (name, ours), theirs in zip(self.model.named_parameters(), fresh.parameters(), strict=True):
            if ".experts." not in name and not torch.equal(support.as_bytes(ours), support.as_bytes(theirs)):
                wrong.append(name)
        return wrong


class _MovingExecutor:
    """Runs the mover when the first messages are under way."""

    def __init__(self, executor: Executor, move: Any) -> None:
        self._executor, self._move = executor, move

    def run(self, *arguments: Any) -> Any:
        finish, moved = self._executor._finish, []

        def moving(*ended: Any) -> None:
            if not moved:
                moved.append(True)
                self._move()
            finish(*ended)

        self._executor._finish = moving  # type: ignore[method-assign]
        try:
            return self._executor.run(*arguments)
        finally:
            del self._executor._finish


def _serve(
    r: support.Rank,
    url: str,
    token: str,
    versions: Sequence[int],
    rows: Sequence[Sequence[int]],
    between: Sequence[int],
    during: dict[int, int],
) -> list[Any]:
    engine = _Engine(r, rows)
    worker = InstanceWorker(
        url, "moving", "rollout-0", engine.sink, rank=r.rank, world_size=r.world, token=token, deadline=SECONDS
    )
    ended: list[int | None] = []
    _note_ends(worker, ended)
    _move_during_transfers(worker, engine, dict(during))
    faults: list[Any] = []
    for version in versions:
        if version in between:
            engine.move()
        limit = time.monotonic() + SECONDS
        while version not in ended:
            assert time.monotonic() < limit, f"version {version} did not come"
            worker.serve(wait=1.0)
        faults.append("fenced" if worker.fenced else engine.faults(version))
    worker.close()
    return faults


def _note_ends(worker: InstanceWorker, ended: list[int | None]) -> None:
    """Adds the version of each update that is over, committed or not."""
    committed = worker._committed

    def noting(order: Order) -> int | None:
        if order.action is Action.END:
            ended.append(None if order.version is None else order.version.number)
        return committed(order)

    worker._committed = noting  # type: ignore[method-assign]


def _move_during_transfers(worker: InstanceWorker, engine: _Engine, left: dict[int, int]) -> None:
    """Makes the first `left[version]` transfers of a version run the mover in their middle."""
    ready, executor_for = worker._client.ready, Member.executor_for
    armed: list[bool] = []

    def watching(*arguments: Any) -> tuple[int, Order]:
        number, order = ready(*arguments)
        version = order.version.number if order.version is not None else 0
        if order.action is Action.RUN and left.get(version, 0):
            left[version] -= 1
            armed.append(True)
        return number, order

    def moving(member: Member, *arguments: Any) -> Any:
        executor = executor_for(member, *arguments)
        if not armed:
            return executor
        armed.clear()
        return _MovingExecutor(executor, engine.move)

    worker._client.ready = watching  # type: ignore[method-assign]
    Member.executor_for = moving  # type: ignore[method-assign]
