"""The path of Awex 0.9.0 that moves weights, over the boxes of a plan of ours: a peer for bench_transfer.py.

Awex's package imports Megatron-Core and engines at once; its `transfer` modules, which are measured, need neither. What
is called, with the same arguments, is what its NCCL writer and reader call in an update (awex/writer/nccl_writer.py,
awex/reader/nccl_reader.py): build the operations, `batch_send_recv` in one group, copy what was not contiguous.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import RankPart

__all__ = ["awex_update", "version"]


def version(folder: Path | None) -> str:
    """The version that lies in a folder; empty when there is none."""
    found = importlib.metadata.distributions(name="awex", path=[str(folder)]) if folder else []
    return next((distribution.version for distribution in found), "")


def _modules(folder: Path) -> tuple[Any, Any]:
    os.environ["AWEX_DEVICE_TYPE"] = "cpu"
    if "awex" not in sys.modules:
        package: Any = types.ModuleType("awex")
        package.__path__ = [str(folder / "awex")]
        sys.modules["awex"] = package
        package.logging = importlib.import_module("awex.logging")
        for name, logger in logging.Logger.manager.loggerDict.items():
            if name.startswith("awex") and isinstance(logger, logging.Logger):
                logger.setLevel(logging.ERROR)
    return importlib.import_module("awex.transfer.nccl_comm"), importlib.import_module("awex.transfer.transfer_plan")


def awex_update(folder: Path, part: RankPart, layout: RankLayout, group: Any) -> Callable[[], None]:
    """A call that moves the boxes of a part as the Awex in `folder` would, over a torch group of the same members.

    Each region is a parameter of its own name, which is what Awex's converters make of fused ones.
    """
    comm, plans = _modules(folder)
    ops = part.operations
    parameters = {str(row): layout.view(row) for row in range(len(layout.table))}
    regions = ops.src_region if part.is_trainer else ops.dst_region
    peers = len(part.trainer_ranks) + ops.dst_rank if part.is_trainer else ops.src_rank
    operations: dict[int, list[Any]] = {}
    for i, (region, peer) in enumerate(zip(regions.tolist(), peers.tolist(), strict=True)):
        ndim = int(layout.table.tensors.ndim[layout.table.tensor[region]])
        offset = (ops.offset[i, :ndim] - layout.table.offset[region, :ndim]).tolist()
        size = ops.size[i, :ndim].tolist()
        slices = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
        name = SimpleNamespace(name=str(region))
        operations.setdefault(peer, []).append(
            plans.CommunicationOperation(
                send_rank=0, send_shard_meta=name, send_offset=tuple(offset), recv_rank=peer, recv_shard_meta=name,
                recv_offset=tuple(offset), overlap_shape=tuple(size), train_slices=slices, inf_slices=slices,
            )
        )  # fmt: skip
    plan = plans.TransferPlan(operations=operations)

    def send() -> None:
        sends, _, _ = comm.nccl_build_send_ops(parameters, plan, group, -1)
        comm.batch_send_recv(send_ops=sends, recv_ops=[], blocking=True, use_group=True)

    def receive() -> None:
        receives, pairs, _ = comm.nccl_build_recv_ops(parameters, plan, group)
        comm.batch_send_recv(send_ops=[], recv_ops=receives, blocking=True, use_group=True)
        with torch.no_grad():
            for original, received in pairs:
                original.copy_(received)

    return send if part.is_trainer else receive
